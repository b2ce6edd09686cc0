"""In: leaves that the devices do not divide. Out: their stored arrays, which hold the
same values and zeros, and back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    flat,
    partition_spec,
    stored_shape,
)
from shardfn.storage._padding import (
    is_inside,
    to_stored,
    to_whole,
    zero_padding,
)

AXES = Axes(("replica", "data"), (2, 4))

CASES = [
    ((101,), Split(0)),
    ((3, 5), Split(1)),
    ((5, 3), Split(flat(0))),
    ((7, 5, 3), Split(flat(0))),
    ((2, 5, 3), Split(flat(1))),
    ((2, 3, 5), Split(flat(2))),
    ((1, 1), Split(flat(0))),
    ((9, 4), Split(0)),
    ((8, 4), Split(0)),
    ((2, 4, 3), Split(flat(1))),
]


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(AXES.sizes, AXES.names, axis_types=auto)


def stored_over_data(split: Split) -> Sharding:
    return None, split


@pytest.mark.parametrize("shape, split", CASES)
def test_there_and_back(shape, split, integers) -> None:
    sharding, x = stored_over_data(split), integers(shape)
    stored = to_stored(x, sharding, AXES)
    assert stored.shape == stored_shape(shape, sharding, AXES)
    assert np.abs(stored).sum() == np.abs(x).sum(), "the padding is zeros"
    np.testing.assert_array_equal(to_whole(stored, shape), x)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_flat_leaf_keeps_its_order(start: int, integers) -> None:
    x = integers((2, 5, 3))
    stored = to_stored(x, stored_over_data(Split(flat(start))), AXES)
    rows = np.asarray(x).reshape(*x.shape[:start], -1)
    np.testing.assert_array_equal(stored[..., : rows.shape[-1]], rows)


def test_what_divides_is_stored_as_it_is(integers) -> None:
    x = integers((8, 4))
    assert to_stored(x, stored_over_data(Split(0)), AXES) is x
    assert to_whole(x, (8, 4)) is x


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.bfloat16])
def test_other_dtypes(dtype) -> None:
    sharding = stored_over_data(Split(flat(0)))
    x = jnp.ones((5, 3), dtype)
    stored = to_stored(x, sharding, AXES)
    assert stored.dtype == dtype and stored.shape == (16,)
    assert not stored[15:].any()
    np.testing.assert_array_equal(to_whole(stored, (5, 3)), x)


def on_devices(mesh, function: Any, *args: jax.Array, sharding: Sharding) -> np.ndarray:
    spec = partition_spec(sharding, AXES)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    return np.asarray(jax.jit(mapped)(*args))


@pytest.mark.parametrize("shape, split", CASES)
def test_zero_padding_clears_padding_alone(mesh, shape, split) -> None:
    sharding = stored_over_data(split)
    dirty = jnp.full(stored_shape(shape, sharding, AXES), jnp.nan)
    whole = jnp.ones(shape)
    inside = np.asarray(to_stored(whole, sharding, AXES)) == 1
    x = jnp.where(inside, 1.0, dirty)
    out = on_devices(
        mesh, lambda x: zero_padding(x, shape, sharding, AXES), x, sharding=sharding
    )
    np.testing.assert_array_equal(out, inside.astype(np.float32))


@pytest.mark.parametrize("weak", [True, False])
def test_zero_padding_keeps_the_weak_type(mesh, weak: bool) -> None:
    sharding, seen = stored_over_data(Split(0)), []

    def clear(x):
        x = x * 2 if weak else x * jnp.float32(2)
        out = zero_padding(x, (5,), sharding, AXES)
        seen.append((x.weak_type, out.weak_type))
        return out

    x = jnp.broadcast_to(1.0, (8,)) if weak else jnp.ones(8)
    on_devices(mesh, clear, x, sharding=sharding)
    assert set(seen) == {(weak, weak)}


@pytest.mark.parametrize("size", [1, 4, 5, 7, 8])
def test_is_inside(mesh, size: int) -> None:
    sharding = (Split(0), None)

    def mask(x):
        return is_inside(x.shape, 0, size, ("replica",))

    out = on_devices(mesh, mask, jnp.zeros((8, 2)), sharding=sharding)
    np.testing.assert_array_equal(out, np.arange(8)[:, None].repeat(2, 1) < size)


def test_is_inside_over_two_axes(mesh) -> None:
    def mask(x):
        return is_inside(x.shape, 0, 11, ("replica", "data"))

    out = on_devices(mesh, mask, jnp.zeros(16), sharding=(Split(0), Split(0)))
    np.testing.assert_array_equal(out, np.arange(16) < 11)
