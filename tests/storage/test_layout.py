"""In: shapes of a state. Out: which dimension of each leaf is stored split, and
how many bytes that leaves on a device.
"""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import example, given, settings, strategies as st

from shardfn._core.sharding import Axes, Split, flat, local_shape
from shardfn.storage._layout import choose_dim, layouts
from shardfn.storage._related_leaves import stacked_leaves, with_moments

MIN_SIZE = 2**14


def split_dims(tree, count: int, min_size: int = 0, names=("data",)):
    """The stored dimension of every leaf, None if replicated, in the tree's shape."""
    axes = Axes(names, (2,) * (len(names) - 1) + (count,))
    found, treedef = jax.tree_util.tree_flatten_with_path(tree)
    out = [x.sharding for x in layouts(*zip(*found, strict=True), axes, min_size)]
    dims = []
    for sharding in out:
        assert all(s is None for s in sharding[:-1]), "split over the last axis alone"
        assert sharding[-1] is None or sharding[-1].stored
        dims.append(sharding[-1].dim if isinstance(sharding[-1], Split) else None)
    return jax.tree.unflatten(treedef, [str(d) for d in dims])


def arrays(tree):
    """A pytree of shapes as one of abstract float32 arrays."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize(
    "shape, count, stacked, dim",
    [
        # Divisible beats padded; without tiles to fill the largest wins.
        ((64, 32), 8, False, 0),
        ((32, 64), 8, False, 1),
        ((7, 64), 8, False, 1),
        ((64,), 8, False, 0),
        # Of those that fill (8, 128) tiles the first: the most major in memory.
        ((1024, 4096), 8, False, 0),
        ((24, 1024, 65536), 8, True, 1),
        ((24, 128, 128, 1024), 8, True, 1),
        # But none that may count layers or heads.
        ((8, 1024, 4096), 8, False, 1),
        ((64, 4096), 8, False, 1),
        ((768, 50304), 8, False, 0),
        ((768, 262144), 8, False, 0),
        ((8, 16, 1024, 4096), 8, True, 2),
        ((32, 128, 4096), 8, False, 1),
        ((24, 16, 128, 2048), 8, True, 2),
        # A shard that fills tiles beats a larger one that does not.
        ((50280, 4096), 8, False, 1),
        ((1024, 1000), 8, False, 0),
        ((512, 1032), 8, False, 0),
        ((64, 512, 1032), 8, False, 1),
        # The layer dimension of a stack is the last choice.
        ((64, 16, 24), 8, True, 2),
        ((64, 16, 24), 8, False, 0),
        ((64, 7, 5), 8, True, 0),
        ((64, 7), 8, True, 0),
        # A dimension that wastes at most 1% is padded.
        ((50257, 3), 8, False, 0),
        ((50257, 801), 8, False, 0),
        ((801, 807), 8, False, 1),
        # Everything else is flattened, a stack layer by layer unless that wastes more.
        ((101, 3), 8, False, flat(0)),
        ((7, 5, 3), 8, False, flat(0)),
        ((3, 101, 101), 8, True, flat(1)),
        ((3, 5, 7), 8, True, flat(0)),
        # A dimension smaller than the devices is never split.
        ((4, 12), 8, False, flat(0)),
        ((64, 32), 1, False, 0),
    ],
)
def test_choose_dim(shape, count, stacked, dim) -> None:
    assert choose_dim(shape, count, stacked) == dim


dims = st.one_of(st.integers(1, 40), st.integers(1, 60_000))
shapes = st.lists(dims, min_size=1, max_size=4).map(tuple)
large = shapes.filter(lambda s: MIN_SIZE <= math.prod(s) < 2**40)
trees = st.dictionaries(st.sampled_from("abcdef"), large, min_size=1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tree=trees, count=st.integers(2, 64))
@example(tree={"a": (50257, 768), "b": (101, 163)}, count=8)
@example(tree={"a": (MIN_SIZE + 1,)}, count=64)
@example(tree={"a": (12, 101, 163), "b": (12, 16384 // 12 + 1)}, count=63)
@example(tree={"a": (2, 3, 5, 1021), "b": (2, 8219)}, count=64)
def test_stored_bytes_are_within_a_hundredth_of_a_fair_share(tree, count) -> None:
    axes = Axes(("data",), (count,))
    found, _ = jax.tree_util.tree_flatten_with_path(arrays(tree))
    paths, leaves = zip(*found, strict=True)
    stored = [x.sharding for x in layouts(paths, leaves, axes, MIN_SIZE)]
    for leaf, sharding in zip(leaves, stored, strict=True):
        held = math.prod(local_shape(leaf.shape, sharding, axes))
        total = math.prod(leaf.shape)
        assert total <= held * count <= 1.01 * total, (leaf.shape, sharding)


def test_scalars_keys_empty_and_small_leaves_are_replicated() -> None:
    state = {
        "scalar": jnp.float32(1),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 64),
        "empty": jnp.zeros((0, 64)),
        "small": jnp.zeros((4, 63)),
        "fewer": jnp.zeros(7),
        "enough": jnp.zeros((4, 64)),
    }
    dims = split_dims(state, 8, min_size=256)
    assert {k for k, d in dims.items() if d != "None"} == {"enough"}
    assert split_dims(state, 8)["fewer"] == "None", "fewer elements than devices"
    assert split_dims(state, 8)["key"] == "None"


def test_over_several_axes_only_the_last_splits_the_state() -> None:
    tree = arrays({"w": (16, 64), "b": (5, 3)})
    dims = split_dims(tree, 4, names=("replica", "data"))
    assert dims == {"b": str(flat(0)), "w": "1"}


TRANSFORMER = {
    "embed": {"embedding": (101, 24)},
    "layers": {
        "attention": {"kernel": (8, 24, 4, 6), "bias": (8, 4, 6)},
        "mlp": {"wi": {"kernel": (8, 24, 96), "bias": (8, 96)}},
        "norm": {"scale": (8, 24)},
    },
    "last_norm": {"scale": (24,)},
    "head": {"kernel": (24, 101)},
}


def test_layers_are_not_split_if_another_dimension_will_do() -> None:
    dims = split_dims(arrays(TRANSFORMER), 8)["layers"]
    assert dims["norm"]["scale"] == "1"
    assert dims["mlp"]["wi"] == {"kernel": "2", "bias": "1"}
    assert dims["attention"]["kernel"] == "1", "24 and not the 8 layers"
    assert dims["attention"]["bias"] == "0", "only the layers divide"


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adamw(1e-3),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
        lambda: optax.MultiSteps(optax.adam(1e-3), 4),
        lambda: optax.chain(optax.trace(0.9), optax.ema(0.9)),
    ],
    ids=["adamw", "lion", "multisteps", "trace_ema"],
)
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.standard_promotion
def test_moments_are_split_like_their_parameter(make, count: int) -> None:
    params, tx = arrays(TRANSFORMER), make()
    opt_state = jax.eval_shape(tx.init, params)
    dims = split_dims({"params": params, "opt": opt_state, "step": jnp.int32(0)}, count)
    expected = optax.tree_utils.tree_map_params(
        tx, lambda _, dim: dim, dims["opt"], dims["params"]
    )
    assert dims["opt"] == expected
    assert dims["opt"] != jax.tree.map(lambda _: "None", opt_state)


@pytest.mark.parametrize("split", [["a"], ["b/a"], ["a", "b/a"]], ids="+".join)
@pytest.mark.parametrize("says", [(), None], ids=["whole", "untold"])
@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 4),
    ],
    ids=["adam", "multisteps"],
)
@pytest.mark.standard_promotion
def test_moments_are_split_over_automatic_axes_like_their_parameter(
    tx, says, split
) -> None:
    """Optax says whose moment is which; two parameters end alike."""
    params = arrays({"a": {"w": (8, 8)}, "b": {"a": {"w": (8, 8)}, "c": {"w": (8,)}}})
    names = ["a", "b/a", "b/c"]
    autos = {n: (("model",), ()) if n in split else () for n in names}
    own = jax.tree.unflatten(
        jax.tree.structure(params), [repr(autos[name]) for name in names]
    )
    state = {"opt": jax.eval_shape(tx.init, params), "params": params}
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    given = [says] * (len(flat) - len(names)) + list(autos.values())
    made = with_moments([p for p, _ in flat], [x.shape for _, x in flat], given)
    found = jax.tree.unflatten(treedef, list(map(repr, made)))
    expected = optax.tree_utils.tree_map_params(
        tx, lambda _, auto: auto, found["opt"], own
    )
    assert found["opt"] == expected and found["params"] == own


@pytest.mark.parametrize(
    "tree, stacked",
    [
        (TRANSFORMER["layers"], True),
        ({"kernel": (6, 8, 8), "scale": (6, 8)}, True),
        # One rank only: two matrices side by side are no stack.
        ({"a": (8, 4), "b": (8, 16)}, False),
        # Not the same leading size.
        ({"kernel": (6, 8, 8), "scale": (5, 8)}, False),
        # An ordinary layer: its bias has no second dimension.
        ({"kernel": (8, 16), "bias": (16,)}, False),
        ({"kernel": (3, 3, 8, 16), "bias": (16,)}, False),
        # A scalar among the leaves: this subtree has no layers, one inside may.
        ({"kernel": (6, 8, 8), "scale": (6, 8), "count": ()}, False),
    ],
)
def test_stacks_by_shape(tree, stacked: bool) -> None:
    found, _ = jax.tree_util.tree_flatten_with_path(arrays(tree))
    paths, leaves = zip(*found, strict=True)
    assert stacked_leaves(paths, [x.shape for x in leaves]) == [stacked] * len(paths)


def test_only_the_scanned_subtree_is_a_stack() -> None:
    found, _ = jax.tree_util.tree_flatten_with_path(arrays(TRANSFORMER))
    paths, leaves = zip(*found, strict=True)
    stacked = stacked_leaves(paths, [x.shape for x in leaves])
    for path, is_stack in zip(paths, stacked, strict=True):
        assert is_stack == (path[0].key == "layers"), path
