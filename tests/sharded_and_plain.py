"""In: a plain program and a mesh. Out: nothing, or an AssertionError that names the
first leaf, step and value where the sharded step differs from the plain one.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import numpy as np
import programs
from jax.sharding import AxisType, Mesh
from programs._data import ROWS

import shardfn
from shardfn.storage._stored_array import stored_array
from shardfn.testing import assert_same
from shardfn.testing._compare import Snapshot, snapshot

STEPS = 5
# Nearly every leaf of these small programs has more elements, and so is sharded.
MIN_SIZE = 8

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


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """What a plain step did: the first state, then the state and metrics per step."""

    init: Snapshot
    states: tuple[Snapshot, ...]
    metrics: tuple[Snapshot, ...]


def plain_init(name: str) -> Any:
    """The state that the program called `name` begins with, on one device."""
    return jax.jit(programs.get(name).init)(jax.random.key(0))


@functools.cache
def plain_trajectory(name: str, steps: int = STEPS) -> Trajectory:
    """Runs the program called `name` under plain `jax.jit`; once per process."""
    program, state = programs.get(name), plain_init(name)
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
    losses = [dict(m.leaves)["loss"].value for m in plain.metrics]
    assert len({float(loss) for loss in losses}) == len(losses), losses
    for state, metrics in zip(plain.states, plain.metrics, strict=True):
        assert state.structure == plain.init.structure
        for (path, new), (_, old) in zip(state.leaves, plain.init.leaves, strict=True):
            assert new.aval.split(" weak")[0] == old.aval.split(" weak")[0], path
        for path, leaf in state.leaves + metrics.leaves:
            assert np.isfinite(leaf.value.astype(np.complex128)).all(), path


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
        born = functools.partial(init_as_plain, program, step, mesh)
        state = born() if born_sharded else plain_init(program.name)
        for k in range(steps):
            state, metrics = step(state, program.batch(k))
            at = f"{where}, step {k + 1}"
            assert_same(plain.metrics[k], metrics, f"{at}, metrics", tol=tol)
            assert_same(
                plain.states[k],
                step.unshard(state),
                f"{at}, state",
                tol=tol,
                ignore=[n.pattern for n in program.noisy],
                weak_types=False,
            )
            _assert_weak_types(plain.states[k], state, f"{at}, state")
        assert_is_sharded(state, mesh, where)
        if mesh.size > 1:
            assert_moves_what_it_may(step.plan(state, program.batch(0)), program, where)


def init_as_plain(
    program: programs.Program, step: shardfn.ShardedStep, mesh: Mesh
) -> Any:
    """The state that `step.init` makes: that of the plain program, and split."""
    where = f"{program.name} over {dict(mesh.shape)}, init"
    state = step.init(program.init, jax.random.key(0))
    plain, made = snapshot(plain_init(program.name)), snapshot(step.unshard(state))
    assert_same(plain, made, where, tol=1e-6, weak_types=False)
    assert_is_sharded(state, mesh, where)
    return state


def assert_moves_what_it_may(
    plan: shardfn.Plan, program: programs.Program, where: str
) -> None:
    """Asserts that the plan moves values as large as the batch, or anything for want of
    a rule, only if the program says so; over eight devices, that it then does. Fewer
    may divide what eight do not."""
    rows = [
        c
        for c in plan.collectives
        if c.op in ("all_gather", "all_to_all", "ppermute")
        and not c.path
        and any(size and size % ROWS == 0 for size in c.shape)
    ]
    moves = bool(rows or plan.fallbacks)
    expected = program.gathers if plan.axes.sizes == (8,) else program.gathers and moves
    assert moves == expected, (
        f"{where}: gathers={program.gathers}, but the plan moves {rows}"
    )


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
    assert not stored_array(largest).sharding.is_fully_replicated, (
        f"{where}: {jax.tree_util.keystr(path)} {largest.shape}, the largest leaf of "
        f"the state, is whole on every device: {largest.sharding}"
    )
