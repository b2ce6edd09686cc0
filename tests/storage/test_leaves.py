"""In: arguments of a step and a `batch_spec`. Out: one sharding per batch leaf, paths
and avals as people and the trace need them, or an error that names the leaf.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from plan_helpers import cpu_mesh

import shardfn
from shardfn._core.leaves import path_name
from shardfn._core.sharding import Axes, Split
from shardfn.storage._leaves import (
    abstract,
    batch_shardings,
    leaves_of,
    refuse_unsure,
)
from shardfn.storage._stored_array import StoredArray

ONE = Axes(("data",), (8,))
TWO = Axes(("replica", "data"), (2, 4))
ROWS = np.zeros((8, 16), np.float32)
KEY = jax.random.key(0)


def split_dims(spec, *batch, axes: Axes = ONE):
    """Per leaf, the split dimension over each axis; in the structure of the batch."""
    leaves, treedef = leaves_of(batch, "batch")
    shardings = batch_shardings(batch, leaves, spec, axes)
    dims = [tuple(s.dim if s else None for s in sharding) for sharding in shardings]
    flat = [d[0] if len(d) == 1 else str(d) for d in dims]
    return jax.tree.unflatten(treedef, ["-" if d is None else d for d in flat])


@pytest.mark.parametrize(
    "spec, batch, expected",
    [
        (None, (ROWS,), (0,)),
        (P(), (ROWS,), ("-",)),
        (P("data"), (ROWS,), (0,)),
        (P(None, "data"), (ROWS,), (1,)),
        # A prefix holds for everything under it.
        (P(), ({"x": ROWS, "y": [ROWS, ROWS]},), ({"x": "-", "y": ["-", "-"]},)),
        ({"y": P()}, ({"x": ROWS, "y": [ROWS, ROWS]},), ({"x": 0, "y": ["-", "-"]},)),
        # Keys that are left out, and None, mean dimension 0.
        ({"y": P(None, "data")}, ({"x": ROWS, "y": ROWS},), ({"x": 0, "y": 1},)),
        ({"x": None, "y": P()}, ({"x": ROWS, "y": ROWS},), ({"x": 0, "y": "-"},)),
        ({}, ({"x": ROWS},), ({"x": 0},)),
        (
            {"a": {"b": P()}},
            ({"a": {"b": ROWS, "c": ROWS}, "d": ROWS},),
            ({"a": {"b": "-", "c": 0}, "d": 0},),
        ),
        # Several arguments, and a tuple of them.
        (None, (ROWS, {"y": ROWS}), (0, {"y": 0})),
        ((P(), None), (ROWS, {"y": ROWS}), ("-", {"y": 0})),
        ((None, {"y": P()}), (ROWS, {"y": ROWS, "z": ROWS}), (0, {"y": "-", "z": 0})),
        (P(), (ROWS, {"y": ROWS}), ("-", {"y": "-"})),
    ],
)
def test_batch_spec_prefixes(spec, batch, expected) -> None:
    assert split_dims(spec, *batch) == expected


def test_one_argument_that_is_a_tuple() -> None:
    """The spec is a prefix of the only batch argument, whatever its type."""
    assert split_dims((P(), None), (ROWS, ROWS)) == (("-", 0),)
    assert split_dims([P(), None], [ROWS, ROWS]) == (["-", 0],)


@pytest.mark.parametrize(
    "leaf, expected",
    [
        (np.float32(1), "-"),
        (3, "-"),
        (0.5, "-"),
        (True, "-"),
        (KEY, "-"),
        (jax.random.split(KEY, 8), "-"),
        (np.zeros(8, np.uint32), 0),
        (np.zeros((8, 2), np.uint32), 0),
        (np.zeros(8, np.int32), 0),
        (jnp.zeros((16, 3), jnp.bfloat16), 0),
    ],
    ids=str,
)
def test_scalars_and_typed_keys_are_replicated(leaf, expected) -> None:
    assert split_dims(None, {"leaf": leaf}) == ({"leaf": expected},)


@pytest.mark.parametrize("words", [jax.random.PRNGKey(0), np.zeros(4, np.uint32)])
def test_only_the_step_tells_raw_keys_from_rows(words) -> None:
    """Those that it calls keys are whole; a spec says what it says."""
    batch = {"rows": words, "key": words, "named": words}
    leaves, _ = leaves_of((batch,), "batch")
    asked = []
    two = Axes(("data",), (2,))
    key, named, rows = batch_shardings(
        (batch,), leaves, {"named": P("data")}, two,
        raw_keys=lambda unsure: (asked.extend(unsure), {0})[1],
    )  # fmt: skip
    assert asked == [0, 2]
    assert (key, named, rows) == (two.replicated, (Split(0),), (Split(0),))


def test_local_batch_refuses_what_may_be_a_raw_key() -> None:
    (leaf,), _ = leaves_of(({"key": jax.random.PRNGKey(0)},), "batch")
    with pytest.raises(shardfn.ShardingError) as error:
        refuse_unsure(leaf, ONE)
    what = "batch leaf 'key' is uint32[2]: a raw PRNG key, or rows of this process? "
    assert str(error.value).startswith(f"{what}local_batch cannot tell.")
    assert "jax.P() for a key, with jax.P('data') for rows" in str(error.value)


@pytest.mark.parametrize(
    "spec, expected",
    [
        (None, "(0, 0)"),
        (P("data"), "(None, 0)"),
        (P("replica", "data"), "(0, 1)"),
        (P(("replica", "data")), "(0, 0)"),
        (P(None, ("replica", "data")), "(1, 1)"),
        (P(None, "replica"), "(1, None)"),
    ],
)
def test_batch_spec_over_two_axes(spec, expected) -> None:
    assert split_dims(spec, ROWS, axes=TWO) == (expected,)


def test_splits_come_from_the_batch() -> None:
    leaves, _ = leaves_of((ROWS,), "batch")
    assert batch_shardings((ROWS,), leaves, None, ONE) == ((Split(0, stored=False),),)


def test_one_device_splits_nothing() -> None:
    assert split_dims(None, ROWS, axes=Axes(("data",), (1,))) == ("-",)


def refused(spec, *batch, axes: Axes = ONE) -> str:
    with pytest.raises(shardfn.ShardingError) as caught:
        split_dims(spec, *batch, axes=axes)
    return str(caught.value)


@pytest.mark.parametrize("spec", [P("data", "data"), P(("data", "data"))])
def test_an_axis_named_twice_is_an_error(spec) -> None:
    message = refused({"x": spec}, {"x": ROWS})
    assert "batch_spec of leaf 'x' is " in message
    assert "which names mesh axis 'data' twice." in message


def test_axes_of_a_dimension_have_to_be_in_order() -> None:
    """Else rows would lie on other devices than the spec says."""
    message = refused(P(("data", "replica")), ROWS, axes=TWO)
    assert "but the step's axes are ('replica', 'data'), major to minor." in message
    assert "Write ('replica', 'data') for the dimension." in message


def test_an_unknown_key_is_an_error_with_the_known_ones() -> None:
    message = refused({"z": P()}, {"x": ROWS, "y": ROWS})
    assert "batch_spec names ['z'], but the batch has ['x', 'y']." in message
    assert re.search(r"called at test_leaves\.py:\d+ \(split_dims\)", message)


def test_an_unknown_nested_key_is_an_error() -> None:
    message = refused({"a": {"z": P()}}, {"a": {"x": ROWS}})
    assert "batch_spec names ['z'], but the batch has ['x']." in message


@pytest.mark.parametrize(
    "spec, shape, parts",
    [
        (None, (30, 4), ["has 30 rows, which 8 devices", "Pad the batch to 32 rows"]),
        (None, (3,), ["has 3 rows, which 8 devices", "Pad the batch to 8 rows"]),
        (P(None, "data"), (8, 12), ["has 12 elements in dimension 1", "16 elements"]),
    ],
)
def test_rows_that_do_not_divide(spec, shape, parts) -> None:
    message = refused(spec, {"tokens": np.zeros(shape, np.float32)})
    assert "batch leaf 'tokens' " in message
    assert "on mesh axis 'data' cannot split evenly." in message
    assert "batch_spec={'tokens': jax.P()} to replicate it." in message
    for part in parts:
        assert part in message


OTHER = np.zeros((30, 2), np.float32)
Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    "batch, spec",
    [
        ((OTHER,), "batch_spec=jax.P()"),
        (
            ({1: OTHER, 2: {"b": OTHER}},),
            "batch_spec={1: jax.P(), 2: {'b': jax.P()}} to replicate them.",
        ),
        (([ROWS, (OTHER,)],), "batch_spec=(None, (jax.P(),))"),
        ((ROWS, {"a": OTHER}), "batch_spec=(None, {'a': jax.P()})"),
        ((Pair(OTHER, ROWS),), "jax.P() for each such leaf in batch_spec"),
    ],
)
def test_the_advice_can_be_pasted(batch, spec: str) -> None:
    message = refused(None, *batch)
    assert f"or pass {spec}" in message
    if spec.startswith("batch_spec="):
        typed = spec.removeprefix("batch_spec=").partition(" to ")[0]
        split_dims(eval(typed, {"jax": jax}), *batch)  # is no longer refused


def test_every_leaf_that_cannot_be_split_is_named() -> None:
    batch = {f"leaf{i}": OTHER for i in range(9)} | {"a": np.zeros(12), "z": ROWS}
    lines = refused(None, batch).splitlines()
    assert lines[0].startswith("batch leaf 'a' has 12 rows, which 8 devices")
    assert lines[1].startswith("  also uneven: 'leaf0' with 30 rows, 'leaf1' with ")
    assert lines[1].endswith("'leaf6' with 30 rows and 2 more")
    assert lines[-1].endswith("'leaf8': jax.P()} to replicate them.")


def test_messages_call_arguments_as_the_step_does() -> None:
    """They were numbered among those that are not state."""

    def step(params, teacher, x, *, y):
        first = teacher["a"][0] + teacher["b"][0, 0]
        return params * 2, jnp.sum(x) + jnp.sum(y) + first

    sharded = shardfn.fully_shard(step, cpu_mesh(4))
    teacher = {"a": jnp.ones(6), "b": jnp.ones((6, 2))}
    with pytest.raises(shardfn.ShardingError) as error:
        sharded(jnp.ones(3), teacher, jnp.ones((5, 2)), y=jnp.ones(7))
    lines = str(error.value).splitlines()
    assert lines[0].startswith("batch leaf 'teacher/a' has 6 rows, which 4 devices")
    others = "'teacher/b' with 6 rows, 'x' with 5 rows, 'keywords/y' with 7 rows"
    assert lines[1] == f"  also uneven: {others}"
    assert lines[2].startswith(
        "  the leaves of argument 'teacher' have 6 rows, those of others 5, 7. It is "
    )


@pytest.mark.parametrize("spec", ["data", {"x": "data"}, {"x": {"y": P()}}, 0])
def test_what_is_no_spec_is_refused(spec) -> None:
    assert "batch_spec" in refused(spec, {"x": ROWS})


def test_a_spec_with_more_dimensions_than_the_leaf() -> None:
    assert "batch leaf 'x'" in refused(P(None, None, "data"), {"x": ROWS})


def test_paths_of_one_and_of_several_arguments() -> None:
    tree = {"params": {"kernel": ROWS}, "steps": [1, 2]}
    leaves, _ = leaves_of((tree,), "state")
    assert [x.name for x in leaves] == ["params/kernel", "steps/0", "steps/1"]
    leaves, _ = leaves_of((tree, ROWS), "state")
    assert [x.name for x in leaves][0::3] == ["0/params/kernel", "1"]
    assert path_name(()) == ""


@pytest.mark.parametrize(
    "leaf, shape, dtype, weak",
    [
        (1, (), "int32", True),
        (1.0, (), "float32", True),
        (1j, (), "complex64", True),
        (True, (), "bool", False),
        (np.float32(1), (), "float32", False),
        (np.zeros((2, 3), np.float16), (2, 3), "float16", False),
        (np.zeros(2), (2,), "float32", False),
        (jnp.asarray(1.0), (), "float32", True),
        (jnp.zeros(3, jnp.bfloat16), (3,), "bfloat16", False),
        (jax.ShapeDtypeStruct((4,), jnp.int8), (4,), "int8", False),
        (jax.ShapeDtypeStruct((), jnp.int32, weak_type=True), (), "int32", True),
        (KEY, (), "key<fry>", False),
    ],
)
def test_avals_are_those_that_jit_would_trace_with(leaf, shape, dtype, weak) -> None:
    aval = abstract(leaf, (), "batch")
    assert (aval.shape, str(aval.dtype), aval.weak_type) == (shape, dtype, weak)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        traced = jax.make_jaxpr(lambda x: x)(leaf).in_avals[0]
        assert getattr(traced, "weak_type", False) == weak
        assert (traced.shape, str(traced.dtype)) == (shape, dtype)


def test_a_stored_array_has_its_logical_aval() -> None:
    x = StoredArray(jnp.zeros(16), (5, 3))
    assert abstract(x, (), "state").shape == (5, 3)


@pytest.mark.parametrize("leaf", [jnp.sin, "adam", object()], ids=["fn", "str", "obj"])
def test_other_leaves_are_named_and_refused(leaf) -> None:
    kind = type(leaf).__name__
    article = "an" if kind == "object" else "a"
    expected = f"state leaf 'tx/init' is {article} {kind}, not an array."
    with pytest.raises(shardfn.ShardingError, match=re.escape(expected)):
        leaves_of(({"tx": {"init": leaf}},), "state")
