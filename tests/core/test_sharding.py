"""In: a shape and how it is sharded. Out: the shape on one device, as stored, and the
PartitionSpec.
"""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    axes_of,
    flat,
    flat_start,
    is_flat,
    local_shape,
    on_axis,
    partition_spec,
    parts_of,
    show,
    stored_shape,
    viewed,
)

AXES = Axes(("replica", "data"), (2, 4))
SUM = Unreduced()


@pytest.mark.parametrize(
    "shape, sharding, local, stored, spec, text",
    [
        ((8, 16), (None, None), (8, 16), (8, 16), P(), "replicated"),
        ((8, 16), (None, Split(0)), (2, 16), (8, 16), P("data"), "data:0"),
        ((8, 16), (Split(1), None), (8, 8), (8, 16), P(None, "replica"), "replica:1"),
        (
            (8, 16),
            (Split(0), Split(0)),
            (1, 16),
            (8, 16),
            P(("replica", "data")),
            "replica:0 data:0",
        ),
        (
            (8, 16),
            (Split(1), Split(0)),
            (2, 8),
            (8, 16),
            P("data", "replica"),
            "replica:1 data:0",
        ),
        ((101, 3), (None, Split(0, True)), (26, 3), (104, 3), P("data"), "data:0"),
        ((3, 101), (None, Split(1)), (3, 26), (3, 104), P(None, "data"), "data:1"),
        ((5, 3), (None, Split(flat(0))), (4,), (16,), P("data"), "data:0*"),
        ((2, 5, 3), (None, Split(flat(1))), (2, 4), (2, 16), P(None, "data"), ""),
        (
            (2, 5, 3),
            (None, Split(flat(2))),
            (2, 5, 1),
            (2, 5, 4),
            P(None, None, "data"),
            "",
        ),
    ],
)
def test_shapes_and_spec(shape, sharding, local, stored, spec, text) -> None:
    assert local_shape(shape, sharding, AXES) == local
    assert stored_shape(shape, sharding, AXES) == stored
    assert partition_spec(sharding, AXES) == spec
    assert not text or show(sharding, AXES) == text


@pytest.mark.parametrize(
    "sharding, text",
    [
        ((None, SUM), "data:+"),
        ((Unreduced("max"), Split(1)), "replica:max data:1"),
        ((None, Split(flat(1))), "data:1*"),
    ],
)
def test_show_of_unreduced_and_flat(sharding, text) -> None:
    assert show(sharding, AXES) == text


def test_an_unreduced_value_has_no_spec() -> None:
    with pytest.raises(ValueError, match="an unreduced value has no PartitionSpec"):
        partition_spec((SUM, Split(0)), AXES)


@pytest.mark.parametrize("start", range(4))
def test_flat_is_a_dimension_of_its_own(start: int) -> None:
    assert flat_start(flat(start)) == start
    assert flat_start(start) is None
    assert is_flat((None, Split(flat(start))))
    assert not is_flat((Split(start), SUM))


@pytest.mark.parametrize(
    "dim, view, at",
    [
        (1, (2, 3, 5), 1),
        (flat(0), (30,), 0),
        (flat(1), (2, 15), 1),
        (flat(2), (2, 3, 5), 2),
    ],
)
def test_viewed(dim: int, view: tuple[int, ...], at: int) -> None:
    assert viewed((2, 3, 5), dim) == (view, at)


def test_axes() -> None:
    assert AXES.replicated == (None, None)
    assert AXES.stored == 1, "parameters are split over the last axis"
    assert AXES.devices == 8


def test_which_axes_split_a_dimension() -> None:
    both: Sharding = (Split(0), Split(0))
    assert axes_of(both, 0) == (0, 1) and axes_of(both, 1) == ()
    assert parts_of(both, 0, AXES) == 8 and parts_of(both, 1, AXES) == 1
    mixed = on_axis(both, 0, SUM)
    assert mixed == (SUM, Split(0))
    assert axes_of(mixed, 0) == (1,) and parts_of(mixed, 0, AXES) == 4


@pytest.mark.parametrize("value", [Split(0), Unreduced(), AXES])
def test_values_are_frozen(value) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError, match=name):
        setattr(value, name, 1)
    assert hash(value) == hash(dataclasses.replace(value))


def test_where_a_split_comes_from_is_part_of_it() -> None:
    assert Split(0) != Split(0, stored=True)


@pytest.mark.parametrize(
    "others, bound",
    [
        ((), ("data__0", "data__1")),
        (("data__0",), ("data___0", "data___1")),
        (("data__7", "data___x"), ("data____0", "data____1")),
    ],
)
def test_groups_have_names_that_no_mesh_axis_has(others, bound) -> None:
    mesh = tuple((name, 2) for name in (*others, "data"))
    axes = Axes(("data",), (4,), mesh, groups=(2,))
    assert axes.bound(0) == bound
    assert axes.bound(0, 2) == bound[1:]
