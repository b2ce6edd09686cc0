"""In: a plain program and a mesh. Out: nothing, or an AssertionError that names the
first leaf, step and value where the sharded step differs from the plain one.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import AxisType, Mesh

import shardfn

STEPS = 5
# Nearly every leaf of these small programs has more elements, and so is sharded.
MIN_SIZE = 8
# Below this norm a leaf counts as zero, and the difference is compared as it is.
SMALLEST_NORM = 1e-6

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], AxisType]] = {
    "1": ((1,), ("data",), AxisType.Explicit),
    "2": ((2,), ("data",), AxisType.Explicit),
    "4": ((4,), ("data",), AxisType.Explicit),
    "8": ((8,), ("data",), AxisType.Explicit),
    "8-auto": ((8,), ("data",), AxisType.Auto),
    "2x4": ((2, 4), ("replica", "data"), AxisType.Explicit),
    "2x4-auto": ((2, 4), ("replica", "data"), AxisType.Auto),
}


def make_mesh(name: str) -> Mesh:
    """The mesh called `name` in `MESHES`, over the first devices."""
    sizes, axes, axis_type = MESHES[name]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, axes, (axis_type,) * len(axes), devices=devices)


@pytest.fixture(autouse=True)
def quick_compiles() -> Iterator[None]:
    """Asks LLVM for little: these programs compile longer than they run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf on the host, and the aval that JAX gave it."""

    value: np.ndarray
    aval: str


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A pytree on the host."""

    structure: Any
    leaves: tuple[tuple[str, Leaf], ...]


def snapshot(tree: Any) -> Snapshot:
    """Copies `tree` to the host; typed keys become their words."""

    def leaf(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return Leaf(np.array(jax.random.key_data(x)), f"{x.dtype}{x.shape}")
        weak = " weak" if getattr(x, "weak_type", False) else ""
        return Leaf(np.array(x), f"{x.dtype}{x.shape}{weak}")

    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = tuple((jax.tree_util.keystr(path), leaf(x)) for path, x in flat)
    return Snapshot(structure, leaves)


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """What a plain step did: the first state, then the state and metrics per step."""

    init: Snapshot
    states: tuple[Snapshot, ...]
    metrics: tuple[Snapshot, ...]


@functools.cache
def plain_trajectory(name: str, steps: int = STEPS) -> Trajectory:
    """Runs the program called `name` under plain `jax.jit`; once per process."""
    program = programs.get(name)
    state = jax.jit(program.init)(jax.random.key(0))
    init, states, metrics = snapshot(state), [], []
    step = jax.jit(program.step)
    for seed in range(steps):
        state, measured = step(state, program.batch(seed))
        states.append(snapshot(state))
        metrics.append(snapshot(measured))
    plain = Trajectory(init, tuple(states), tuple(metrics))
    _assert_trains(plain)
    return plain


def _assert_trains(plain: Trajectory) -> None:
    """Guards against programs that prove nothing: all NaN, or standing still."""
    losses = [dict(m.leaves)["['loss']"].value for m in plain.metrics]
    assert len({float(loss) for loss in losses}) == len(losses), losses
    for state, metrics in zip(plain.states, plain.metrics, strict=True):
        assert state.structure == plain.init.structure
        for (path, new), (_, old) in zip(state.leaves, plain.init.leaves, strict=True):
            assert new.aval.split(" weak")[0] == old.aval.split(" weak")[0], path
        for path, leaf in state.leaves + metrics.leaves:
            assert np.isfinite(leaf.value.astype(np.float64)).all(), path


def assert_same(
    plain: Snapshot,
    sharded: Snapshot,
    where: str,
    tol: float,
    noisy: Sequence[programs.Noisy] = (),
    weak_types: bool = True,
) -> None:
    """Asserts equal structure, avals and values, floating-point ones within `tol`."""
    assert plain.structure == sharded.structure, (
        f"{where}: other pytree structure\n"
        f"  plain:   {plain.structure}\n  sharded: {sharded.structure}"
    )
    for (path, a), (_, b) in zip(plain.leaves, sharded.leaves, strict=True):
        at = f"{where}, leaf {path or 'itself'}"
        avals = [x.aval if weak_types else x.aval.split(" weak")[0] for x in (a, b)]
        assert avals[0] == avals[1], f"{at}: plain is {avals[0]}, sharded is {avals[1]}"
        assert a.value.shape == b.value.shape, f"{at}: {a.value.shape}, {b.value.shape}"
        if not any(re.search(n.pattern, path) for n in noisy):
            difference = describe_difference(a.value, b.value, tol)
            assert difference is None, f"{at} ({a.aval}): {difference}"


def describe_difference(a: np.ndarray, b: np.ndarray, tol: float) -> str | None:
    """None if `b` is `a`; otherwise how far off it is, and the worst element."""
    exact = not jnp.issubdtype(a.dtype, jnp.inexact)
    x, y = a.astype(np.float64), b.astype(np.float64)
    if not exact and not np.array_equal(np.isfinite(x), np.isfinite(y)):
        wrong = np.flatnonzero(np.isfinite(x) != np.isfinite(y))
        return f"not finite in {len(wrong)} other places, first {_element(a, b, wrong)}"
    gap = np.abs(np.where(x == y, 0.0, x - y))
    gap = np.where(np.isnan(x) & np.isnan(y), 0.0, gap)
    if exact:
        wrong = np.flatnonzero(gap)
        if not len(wrong):
            return None
        return f"{len(wrong)} of {a.size} values differ, first {_element(a, b, wrong)}"
    norm = np.linalg.norm(x[np.isfinite(x)])
    error = np.linalg.norm(gap) / max(norm, SMALLEST_NORM)
    if error <= tol:
        return None
    worst = np.argsort(-gap, axis=None)
    off = int((gap > tol * max(norm, SMALLEST_NORM) / a.size**0.5).sum())
    return (
        f"relative error {error:.2e} > {tol:.0e}, {off} of {a.size} values off, "
        f"worst {_element(a, b, worst)}"
    )


def _element(a: np.ndarray, b: np.ndarray, flat: np.ndarray) -> str:
    index = tuple(int(i) for i in np.unravel_index(flat[0], a.shape))
    return f"[{', '.join(map(str, index))}]: plain {a[index]}, sharded {b[index]}"


def shard_program(
    program: programs.Program, mesh: Mesh, *, min_size: int = MIN_SIZE, **kwargs: Any
):
    """`fully_shard` of the program's step, over all axes of the mesh."""
    axes = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
    if program.batch_spec is not None:
        kwargs["batch_spec"] = program.batch_spec
    return shardfn.fully_shard(
        program.step, mesh, axis=axes, min_size=min_size, **kwargs
    )


def assert_parity(
    program: programs.Program,
    mesh: Mesh,
    *,
    steps: int = STEPS,
    min_size: int = MIN_SIZE,
    tol: float | None = None,
    born_sharded: bool = True,
    **kwargs: Any,
) -> None:
    """Asserts that the sharded step computes what the plain one does, step by step.

    Args:
      program: the plain program; its trajectory is computed once per process.
      mesh: a mesh; parameters are sharded over its last axis.
      steps: number of steps, each compared.
      min_size: as in `fully_shard`.
      tol: largest relative norm of a difference; the program's own by default.
      born_sharded: start from `.init`, which is compared too; otherwise from the
        plain state, whole on one device.
      **kwargs: further arguments of `fully_shard`.
    """
    plain = plain_trajectory(program.name, steps)
    tol = program.tol if tol is None else tol
    where = f"{program.name} over {dict(mesh.shape)}"
    with warnings.catch_warnings():
        if program.gathers:
            warnings.simplefilter("ignore", UserWarning)
        step = shard_program(program, mesh, min_size=min_size, **kwargs)
        if born_sharded:
            state = step.init(program.init, jax.random.key(0))
            born = snapshot(step.unshard(state))
            assert_same(plain.init, born, f"{where}, init", 1e-6, weak_types=False)
            assert_is_sharded(state, mesh, where)
        else:
            state = jax.jit(program.init)(jax.random.key(0))
        for k in range(steps):
            state, metrics = step(state, program.batch(k))
            at = f"{where}, step {k + 1}"
            assert_same(plain.metrics[k], snapshot(metrics), f"{at}, metrics", tol)
            whole = snapshot(step.unshard(state))
            assert_same(
                plain.states[k], whole, f"{at}, state", tol, program.noisy, False
            )
            _assert_weak_types(plain.states[k], state, f"{at}, state")
        assert_is_sharded(state, mesh, where)


def _assert_weak_types(plain: Snapshot, state: Any, where: str) -> None:
    for (path, leaf), x in zip(plain.leaves, jax.tree.leaves(state), strict=True):
        weak = leaf.aval.endswith(" weak")
        assert weak == getattr(x, "weak_type", False), (
            f"{where}, leaf {path}: plain is {leaf.aval}, sharded is {x.aval}"
        )


def assert_is_sharded(state: Any, mesh: Mesh, where: str) -> None:
    """Asserts that the largest floating-point leaf is split over the last axis."""
    if mesh.shape[mesh.axis_names[-1]] == 1:
        return
    flat = jax.tree_util.tree_leaves_with_path(state)
    path, largest = max(flat, key=lambda item: item[1].size)
    assert not largest.sharding.is_fully_replicated, (
        f"{where}: {jax.tree_util.keystr(path)} {largest.shape}, the largest leaf of "
        f"the state, is whole on every device: {largest.sharding}"
    )
