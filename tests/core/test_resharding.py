"""In: every pair of shardings over a 2 x 4 mesh. Out: blocks of the same whole value,
moved inside `shard_map(check_vma=True)`, whose types prove which are replicated.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardfn._core.control import Control
from shardfn._core.moves import MOVES, AllToAll, move_of, moves_of
from shardfn._core.phases import FORWARD, Pass
from shardfn._core.plan import Ref, Reshard
from shardfn._core.resharding import can_split, reshard_path
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    axes_of,
    flat,
    local_shape,
    on_axis,
    parts_of,
    stored_shape,
    viewed,
)
from shardfn._lowering.collectives import run_move
from shardfn._lowering.move_lowerings import JOINED, LOWERINGS
from shardfn._lowering.reshards import move_together
from shardfn._schedule.bucket_kinds import BucketKind, kind_of

AXES = Axes(("replica", "data"), (2, 4))
THREE = Axes(("pod", "replica", "data"), (2, 2, 3))
SUM = Unreduced()
# Padding of what goes in; none of it may come out as a value.
GARBAGE = 1000.0
PAIRS = 48
SHAPES = [(8, 16), (16, 7), (5, 3), (2, 3, 5), (8, 4, 3), (1, 8), (9,)]


def shardings_of(shape: tuple[int, ...], axes: Axes = AXES) -> list[Sharding]:
    """Every sharding that `can_split` lets a value of `shape` have."""
    dims = [*range(len(shape)), *(flat(i) for i in range(len(shape)))]
    states = [None, SUM, *(Split(d, stored=True) for d in dims)]
    found = []
    for each in itertools.product(states, repeat=len(axes.names)):
        reached: Sharding = axes.replicated
        for axis, state in enumerate(each):
            if isinstance(state, Split):
                if not can_split(shape, reached, axis, state, axes):
                    break
            reached = on_axis(reached, axis, state)
        else:
            found.append(
                tuple(Split(s.dim) if isinstance(s, Split) else s for s in reached)
            )
    return found


def block(x: np.ndarray, sharding: Sharding, device: tuple[int, int]) -> np.ndarray:
    """The block of `x` that `device` holds, padding as NaN; sums are ignored."""
    for dim in {s.dim for s in sharding if isinstance(s, Split)}:
        view, at = viewed(x.shape, dim)
        x = x.reshape(view)
        parts, index = parts_of(sharding, dim, AXES), 0
        for axis in axes_of(sharding, dim):
            index = index * AXES.sizes[axis] + device[axis]
        size = -(-view[at] // parts)
        pad = [(0, parts * size - n if d == at else 0) for d, n in enumerate(view)]
        x = np.pad(x, pad, constant_values=np.nan)
        x = np.take(x, range(index * size, (index + 1) * size), axis=at)
    return x


def blocks(x: np.ndarray, sharding: Sharding) -> np.ndarray:
    """`[replica, data, *block]`; an axis that the value does not vary on has size 1."""
    counts = [
        n if isinstance(s, Split) else 1
        for n, s in zip(AXES.sizes, sharding, strict=True)
    ]
    rows = [
        [block(x, sharding, (r, d)) for d in range(counts[1])] for r in range(counts[0])
    ]
    return np.array(rows)


def terms(x: np.ndarray, sharding: Sharding, rng: np.random.Generator) -> np.ndarray:
    """`blocks`, as terms of a sum along the axes on which `sharding` is unreduced."""
    out = np.nan_to_num(blocks(x, sharding), nan=GARBAGE)
    for axis, state in enumerate(sharding):
        if isinstance(state, Unreduced):
            shape = list(out.shape)
            shape[axis] = AXES.sizes[axis] - 1
            others = rng.integers(-4, 5, shape).astype(x.dtype)
            last = out - others.sum(axis, keepdims=True)
            out = np.concatenate([others, last], axis)
    return out


def spec_of(sharding: Sharding) -> P:
    names = zip(AXES.names, sharding, strict=True)
    return P(*(None if s is None else name for name, s in names))


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(AXES.sizes, AXES.names, axis_types=auto)


def run_paths(mesh, shape, pairs, args):
    """Moves every argument from its first sharding to its second; one program."""

    def move(x, start, end):
        path = reshard_path(start, end, shape, AXES)
        assert path[0] == start and path[-1] == end
        x = x[0, 0]
        for step in moves_of(path):
            x = run_move(x, shape, step, AXES)
            assert x.shape == local_shape(shape, step.after, AXES), (start, end, step)
        return x[None, None]

    moved = jax.shard_map(
        lambda *xs: tuple(move(x, *pair) for x, pair in zip(xs, pairs, strict=True)),
        mesh=mesh,
        in_specs=tuple(spec_of(start) for start, _ in pairs),
        out_specs=tuple(spec_of(end) for _, end in pairs),
        check_vma=True,
    )
    return jax.jit(moved)(*args)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_shardings(mesh, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    pairs = list(itertools.product(shardings_of(shape), repeat=2))
    chosen = rng.permutation(len(pairs))[:PAIRS]
    pairs = [pairs[i] for i in chosen]
    x = rng.integers(-4, 5, shape).astype(np.float32)
    assert x.any()
    out = run_paths(mesh, shape, pairs, [terms(x, start, rng) for start, _ in pairs])
    for got, pair in zip(out, pairs, strict=True):
        assert_arrived(np.asarray(got), x, pair[1], f"{shape} {pair}")


def assert_arrived(got: np.ndarray, x: np.ndarray, end: Sharding, name: str) -> None:
    """All devices' blocks are those of `x`, padding aside."""
    for axis, state in enumerate(end):
        if isinstance(state, Unreduced):
            got = got.sum(axis, keepdims=True)
    expected = blocks(x, end)
    got = np.where(np.isnan(expected), np.nan, got)
    np.testing.assert_array_equal(got, expected, err_msg=name)


SIZES = [(8, 16), (16, 8), (6, 8, 4)]
JOINED_AT_MOST = 4


def test_moves_of_one_kind_are_one_collective(mesh) -> None:
    """All paths of equal kinds, over either axis: joined, each value arrives as if it
    went alone."""
    rng = np.random.default_rng(0)
    kinds: dict[BucketKind, list[Reshard]] = {}
    for shape in SIZES:
        for pair in itertools.product(shardings_of(shape), repeat=2):
            path = tuple(reshard_path(*pair, shape, AXES))
            ref = Ref(len(kinds))
            step = Reshard(ref, ref, path, shape, "float32", 4, Pass(FORWARD))
            kind = kind_of(step, (), Control(), stays=True)
            if kind is not None:
                kinds.setdefault(kind, []).append(step)
    groups = [list(rng.permutation(len(steps))) for steps in kinds.values()]
    groups = [
        [steps[i] for i in chosen[:JOINED_AT_MOST]]
        for steps, chosen in zip(kinds.values(), groups, strict=True)
        if len(steps) > 1
    ]
    every = [step for steps in groups for step in steps]
    values = [rng.integers(-4, 5, step.shape).astype(np.float32) for step in every]

    def moved(*blocks):
        left, made = [x[0, 0] for x in blocks], []
        for steps in groups:
            given, left = left[: len(steps)], left[len(steps) :]
            made += move_together(steps, given, (), AXES)
        return tuple(x[None, None] for x in made)

    run = jax.shard_map(
        moved,
        mesh=mesh,
        in_specs=tuple(spec_of(step.path[0]) for step in every),
        out_specs=tuple(spec_of(step.path[-1]) for step in every),
        check_vma=True,
    )
    given = zip(values, every, strict=True)
    out = jax.jit(run)(*(terms(x, step.path[0], rng) for x, step in given))
    for got, x, step in zip(out, values, every, strict=True):
        assert_arrived(np.asarray(got), x, step.path[-1], str(step.path))


@pytest.mark.parametrize(
    "axes, shape",
    [
        *((AXES, shape) for shape in SHAPES),
        *((THREE, shape) for shape in [(12, 24), (12, 7), (4, 3), (12,)]),
    ],
    ids=lambda case: str(getattr(case, "sizes", case)),
)
def test_every_path_ends_and_moves_one_axis_at_a_time(axes, shape) -> None:
    """Or all axes that exchange one dimension for another together."""
    for start, end in itertools.product(shardings_of(shape, axes), repeat=2):
        path = reshard_path(start, end, shape, axes)
        assert path[0] == start and path[-1] == end
        assert len(set(path)) == len(path) <= 2 * len(axes.names) + 1, path
        for before, after in itertools.pairwise(path):
            move = move_of(before, after)
            assert len(move.over) == 1 or isinstance(move, AllToAll)


@pytest.mark.parametrize(
    "op, reduce",
    [("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_reductions_of_other_kinds(mesh, op, reduce, dtype) -> None:
    shape = (8, 4)
    x = np.random.default_rng(1).integers(-3, 4, (2, 4, *shape)).astype(dtype)
    pair = ((Unreduced(op), Unreduced(op)), (None, Split(0)))
    (out,) = run_paths(mesh, shape, [pair], [x])
    expected = blocks(reduce(x, axis=(0, 1)).astype(np.float64), pair[1])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("op", ["max", "min", "and", "or"])
def test_reductions_of_booleans(mesh, op: str) -> None:
    x = np.random.default_rng(2).integers(0, 2, (1, 4, 16)).astype(bool)
    reduce = np.all if op in ("min", "and") else np.any
    pair = ((None, Unreduced(op)), (None, None))
    (out,) = run_paths(mesh, (16,), [pair], [x])
    np.testing.assert_array_equal(out, reduce(x, axis=(0, 1))[None, None])


def moves(start: Sharding, end: Sharding, shape: tuple[int, ...]) -> str:
    path = reshard_path(start, end, shape, AXES)
    return ", ".join(f"{m.name}({AXES.names[m.axis]})" for m in moves_of(path))


SUMMED_AND_SHIFTED = "psum_scatter(data), ppermute(data), ppermute(data)"


@pytest.mark.parametrize(
    "start, end, expected",
    [
        ((SUM, SUM), (None, Split(0)), "psum_scatter(data), all_reduce(replica)"),
        ((SUM, SUM), (None, Split(flat(0))), "psum_scatter(data), all_reduce(replica)"),
        ((None, SUM), (None, None), "all_reduce(data)"),
        ((Split(0), Split(0)), (None, None), "all_gather(data), all_gather(replica)"),
        ((None, Split(0)), (None, Split(1)), "all_to_all(data)"),
        ((None, Split(0)), (None, Split(0, True)), "relabel(data)"),
        ((None, Split(1)), (None, Split(1, shift=2)), "ppermute(data)"),
        ((None, SUM), (None, Split(1, shift=5)), SUMMED_AND_SHIFTED),
        ((None, None), (Split(0), Split(0)), "slice(replica), slice(data)"),
        ((None, Split(0)), (SUM, Split(0)), "mask(replica)"),
        ((None, Unreduced("max")), (None, Split(0)), "all_reduce(data), slice(data)"),
        (
            (None, Split(0)),
            (Split(0), Split(0)),
            "all_gather(data), slice(replica), slice(data)",
        ),
        ((Split(1), Split(0)), (Split(1), Split(1)), "all_to_all(data)"),
        ((None, None), (None, None), ""),
    ],
)
def test_moves_of_a_path(start, end, expected) -> None:
    assert moves(start, end, (8, 16)) == expected


@pytest.mark.parametrize(
    "start, end, shape, elements, wire",
    [
        # A ring of n devices sends (n-1)/n of the whole, and an all-reduce twice that.
        ((None, Split(0)), (None, None), (8, 16), 128, 128 * 3 / 4),
        ((None, SUM), (None, Split(0)), (8, 16), 128, 128 * 3 / 4),
        ((None, SUM), (None, None), (8, 16), 128, 2 * 128 * 3 / 4),
        ((SUM, None), (None, None), (8, 16), 128, 2 * 128 * 1 / 2),
        # Along an axis on which a block is left, only that block moves.
        ((SUM, Split(0)), (None, Split(0)), (8, 16), 32, 2 * 32 * 1 / 2),
        ((Split(0), Split(0)), (Split(0), None), (8, 16), 64, 64 * 3 / 4),
        ((Split(1), SUM), (Split(1), Split(0)), (8, 16), 64, 64 * 3 / 4),
        ((None, Split(0)), (None, Split(1)), (8, 16), 32, 32 * 3 / 4),
        # Padding is sent too.
        ((None, Split(0)), (None, None), (101, 3), 104 * 3, 104 * 3 * 3 / 4),
        ((None, SUM), (None, Split(0)), (101, 3), 104 * 3, 104 * 3 * 3 / 4),
        ((None, Split(flat(0))), (None, None), (5, 3), 16, 16 * 3 / 4),
        ((None, SUM), (None, Split(flat(1))), (2, 5, 3), 32, 32 * 3 / 4),
        # What stays on the device is free.
        ((None, None), (None, Split(0)), (8, 16), 128, 0),
        ((None, None), (None, SUM), (8, 16), 128, 0),
    ],
)
def test_wire_elements(start, end, shape, elements, wire) -> None:
    move = move_of(start, end)
    assert move.elements(shape, AXES) == elements
    assert move.wire_elements(shape, AXES) == wire


def test_a_scatter_is_never_dearer_than_reducing_and_slicing() -> None:
    scatter = move_of((None, SUM), (None, Split(0)))
    reduce = move_of((None, SUM), (None, None))
    shape = (101, 7)
    assert scatter.wire_elements(shape, AXES) < reduce.wire_elements(shape, AXES)


def test_every_move_has_a_lowering() -> None:
    assert set(LOWERINGS) == set(MOVES)
    assert set(JOINED) == {kind for kind in MOVES if kind.joins}
    for kind in MOVES:
        said = {bool(x) for x in (kind.op, kind.hlo_ops, kind.trips, kind.outcome)}
        assert len(said) == 1, kind


@pytest.mark.parametrize(
    "shape, sharding, axis, split, expected",
    [
        ((8, 16), (None, None), 1, Split(0), True),
        ((7, 16), (None, None), 1, Split(0), False),
        ((7, 16), (None, None), 1, Split(0, stored=True), True),
        ((3, 16), (None, None), 1, Split(0, stored=True), True),
        ((0, 16), (None, None), 1, Split(0, stored=True), False),
        ((8, 16), (Split(0), None), 1, Split(0), True),
        ((12, 16), (Split(0), None), 1, Split(0), False),
        ((12, 16), (Split(0), None), 1, Split(0, stored=True), False),
        ((8, 16), (None, None), 1, Split(2), False),
        ((0, 16), (None, None), 1, Split(0), False),
        ((5, 3), (None, None), 1, Split(flat(0)), True),
        ((5, 3), (None, None), 1, Split(flat(2)), False),
        ((5, 0), (None, None), 1, Split(flat(0)), False),
        ((8, 16), (Split(0), None), 1, Split(flat(1)), False),
        ((8, 16), (None, Split(flat(0))), 0, Split(0), False),
    ],
)
def test_can_split(shape, sharding, axis, split, expected) -> None:
    assert can_split(shape, sharding, axis, split, AXES) is expected


def test_blocks_make_up_the_stored_array() -> None:
    """The helper of this file agrees with `stored_shape`."""
    for shape in SHAPES:
        for sharding in shardings_of(shape):
            if SUM not in sharding:
                count = blocks(np.zeros(shape), sharding).size
                assert count == np.prod(stored_shape(shape, sharding, AXES))


NAN, INF = np.nan, np.inf
# Rows of terms, one per device along "data".
FLOATS = [
    [1, NAN, -INF, -0.0, -5, INF],
    [-2, 3, -INF, 0.0, -6, NAN],
    [7, 3, -INF, -0.0, -7, 2],
    [4, -INF, -INF, -0.0, -5.5, -1],
]
REDUCED = {
    **{
        (op, dtype): FLOATS
        for op in ("max", "min")
        for dtype in ("float32", "bfloat16", "float16")
    },
    **{(op, "int8"): [[3, -2], [2, 5], [-3, 2], [2, 1]] for op in ("max", "prod")},
    **{(op, "bool"): [[1, 0, 1], [1, 0, 0]] * 2 for op in ("and", "or", "max", "min")},
}


def test_every_reducer_over_devices(mesh) -> None:
    """As numpy reduces: a maximum is NaN if any device has NaN, dtypes stay."""
    args = {key: jnp.asarray(rows).astype(key[1]) for key, rows in REDUCED.items()}

    def reduced(key, x):
        before, after = (None, Unreduced(key[0])), AXES.replicated
        return run_move(x[0], x.shape[1:], move_of(before, after), AXES)

    out = jax.jit(
        jax.shard_map(
            lambda xs: {key: reduced(key, x) for key, x in xs.items()},
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
    )(args)
    ufuncs = {
        "max": np.maximum,
        "min": np.minimum,
        "prod": np.multiply,
        "and": np.logical_and,
        "or": np.logical_or,
    }
    for (op, dtype), got in out.items():
        terms = np.asarray(args[op, dtype])
        assert got.dtype == terms.dtype
        wide = np.float32 if terms.dtype.kind not in "bi" else terms.dtype
        expected = ufuncs[op].reduce(terms.astype(wide), axis=0, dtype=wide)
        got = np.asarray(got).astype(wide)
        np.testing.assert_array_equal(got, expected, err_msg=f"{op} {dtype}")
