"""In: a plain program and a mesh. Out: what its plan, the program that JAX is given and
the compiled program move, each counted in the same terms, so that they compare.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import programs
from jax.sharding import Mesh
from programs import gpt
from programs._data import ROWS

import shardfn
from shardfn.analysis._hlo import HloCollective, read_collectives
from shardfn.testing import assert_same

# Collectives and sizes do not depend on LLVM: ask it for little.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# In straight-line code the CPU backend of jax 0.10 drops optimization barriers before
# it merges equal operations, and with them a repeated gather. GPU and TPU keep it.
CPU_MERGES_GATHERS = jax.__version_info__ < (0, 11)

Moves = Counter[tuple[str, str, int, int]]
"""Runs per step by `(op, dtype, elements, group size)`, ops in JAX's words."""


# Batches in tests are so small that leaves would stay and activations move.
GATHERS = {"stationary": False}


def cpu_mesh(*sizes: int) -> Mesh:
    """`data`, or `replica` x `data`, over the first CPU devices."""
    names = ("replica", "data")[-len(sizes) :]
    return jax.make_mesh(sizes, names, devices=jax.devices()[: math.prod(sizes)])


@dataclass(frozen=True)
class Sharded:
    """A sharded step and abstract arguments for it."""

    plain: Callable
    step: shardfn.ShardedStep
    mesh: Mesh
    state: Any
    batch: Any

    @functools.cached_property
    def plan(self) -> shardfn.Plan:
        return self.step.plan(self.state, self.batch)

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The program that JAX is given: one `shard_map` on the whole arrays."""
        return jax.make_jaxpr(self.step)(self.state, self.batch).jaxpr

    @property
    def local(self) -> Any:
        """The jaxpr that each device runs."""
        (found,) = (e for e, *_ in walk(self.jaxpr) if e.primitive.name == "shard_map")
        (body,) = jax.extend.core.jaxprs_in_params(found.params)
        return getattr(body, "jaxpr", body)

    def compile(self, **options: Any) -> jax.stages.Compiled:
        lowered = self.step.lower(self.state, self.batch)
        return lowered.compile(compiler_options=options or None)


def shard(program: programs.Program, mesh: Mesh, *, rows: int = ROWS, **options):
    """`fully_shard` of a program, on a batch of `rows` rows, with leaves gathered."""
    axes, options = mesh.axis_names, GATHERS | options
    step = shardfn.fully_shard(
        program.step, mesh, axis=axes if len(axes) > 1 else axes[0], **options
    )
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (rows, *x.shape[1:]) if x.shape[:1] == (ROWS,) else x.shape, x.dtype
        ),
        program.batch(0),
    )
    state = jax.eval_shape(program.init, jax.random.key(0))
    return Sharded(program.step, step, mesh, state, batch)


def shard_gpt(config: gpt.Config, mesh: Mesh, **options: Any) -> Sharded:
    return shard(gpt.build("gpt", config), mesh, **options)


def shard_fn(fn: Callable, mesh: Mesh, *shapes: Any, **options: Any) -> Sharded:
    """`fully_shard` of `fn(state, batch)` on float32 arrays of these two shapes, with
    leaves gathered."""
    state, batch = (
        jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            tree,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        for tree in shapes
    )
    options = {"min_size": 8} | GATHERS | options
    return Sharded(fn, shardfn.fully_shard(fn, mesh, **options), mesh, state, batch)


def walk(
    jaxpr: Any, times: int = 1, inside: tuple[str, ...] = ()
) -> Iterator[tuple[Any, int, tuple[str, ...]]]:
    """Every equation, how often a step runs it, and the primitives that it is in."""
    for eqn in jaxpr.eqns:
        yield eqn, times, inside
        name = eqn.primitive.name
        rounds = times * (eqn.params["length"] if name == "scan" else 1)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from walk(getattr(inner, "jaxpr", inner), rounds, (*inside, name))


def local_avals(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """Every value that the jaxpr takes or makes: its aval, and who made it."""
    for eqn, *_ in walk(jaxpr):
        for atom in (*eqn.invars, *eqn.outvars):
            yield atom.aval, eqn


@dataclass(frozen=True, slots=True)
class Emitted:
    """One collective of the program that JAX is given."""

    op: str
    dtype: str
    elements: int
    devices: int
    times: int
    inside: tuple[str, ...] = field(compare=False)


_OPS = {
    "all_gather_invariant": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "psum_scatter",
    **dict.fromkeys(("psum_invariant", "psum", "pmax", "pmin"), "all_reduce"),
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
}


def emitted(sharded: Sharded) -> list[Emitted]:
    """The collectives of the program that JAX is given."""
    found, axes = [], sharded.plan.axes
    sizes = dict(sharded.mesh.shape)
    sizes.update(zip(axes.bound(axes.stored), axes.parts, strict=True))
    for eqn, times, inside in walk(sharded.jaxpr):
        op = _OPS.get(eqn.primitive.name)
        if op is None:
            continue
        names = eqn.params.get("axes") or eqn.params["axis_name"]
        names = (names,) if isinstance(names, str) else names
        devices = math.prod(sizes[n] for n in names)
        whole = eqn.outvars if op == "all_gather" else eqn.invars
        for aval in (atom.aval for atom in whole):
            found.append(
                Emitted(op, str(aval.dtype), aval.size, devices, times, inside)
            )
    return found


def emitted_moves(sharded: Sharded) -> Moves:
    moves: Moves = Counter()
    for c in emitted(sharded):
        moves[c.op, c.dtype, c.elements, _group(c.op, c.devices)] += c.times
    return moves


def _group(op: str, devices: int) -> int:
    """How many devices talk to each other; of a permute, whose cycles differ, one."""
    return 1 if op == "ppermute" else devices


def planned_moves(plan: shardfn.Plan) -> Moves:
    """The plan's collectives, their sizes recovered from the bytes on the wire."""
    moves: Moves = Counter()
    for c in plan.collectives:
        assert c.times is not None
        if c.op == "ppermute":  # all of it goes to another device
            moves[c.op, c.dtype, c.elements, 1] += c.times
            continue
        n = c.devices
        rounds = 2 if c.op == "all_reduce" else 1
        bytes_, rest = divmod(c.wire_bytes * n, (n - 1) * rounds)
        assert not rest, f"{c} does not send a whole number of elements"
        moves[c.op, c.dtype, bytes_ // jnp.dtype(c.dtype).itemsize, n] += c.times
    return moves


def compiled_moves(compiled: jax.stages.Compiled) -> Moves:
    return hlo_moves(read_collectives(compiled.as_text()))


def hlo_moves(found: Iterable[HloCollective]) -> Moves:
    moves: Moves = Counter()
    for c in found:
        assert c.exact, f"{c} is in a loop without a known trip count"
        moves[c.op, c.dtype, c.elements, _group(c.op, c.group_size)] += c.times
    return moves


def any_dtype(moves: Moves) -> Moves:
    """The CPU backend moves bfloat16 as float32: counts without dtypes."""
    found: Moves = Counter()
    for (op, _, elements, devices), times in moves.items():
        found[op, "", elements, devices] += times
    return found


def combined_sums(moves: Moves) -> Moves:
    """All-reduces of one dtype and group as one: a compiler may concatenate them."""
    found: Moves = Counter()
    for (op, dtype, elements, devices), times in moves.items():
        if op == "all_reduce":
            found[op, dtype, 0, devices] += times * elements
        else:
            found[op, dtype, elements, devices] += times
    return found


def gathers(plan: shardfn.Plan) -> dict[str, Counter[str]]:
    """Per leaf and phase, how often it is gathered in a step."""
    found: dict[str, Counter[str]] = {}
    for line in plan.collectives:
        if line.op == "all_gather":
            counts = found.setdefault(line.path.rpartition("/")[2], Counter())
            counts[line.phase] += line.times or 0
    return found


def assert_moves_hold(case: Sharded, *, merged: bool = False) -> None:
    """What is planned is what JAX is given, and what is compiled.

    Small sums may be compiled as one. What is compiled is not counted if gathers of the
    two passes may be `merged` outside of loops and the CPU backend does that.
    """
    planned = planned_moves(case.plan)
    assert emitted_moves(case) == planned
    if merged and CPU_MERGES_GATHERS:
        return
    compiled = case.compile()
    found, expected = (any_dtype(m) for m in (compiled_moves(compiled), planned))
    assert combined_sums(found) == combined_sums(expected)
    assert case.plan.verify(compiled).extra == ()


def run(case: Sharded, steps: int = 2) -> list[Any]:
    """The state and the loss after each step from random float32 values."""
    rng = np.random.default_rng(0)
    make = lambda s: rng.standard_normal(s.shape).astype(np.float32) / 4  # noqa: E731
    state, out = case.step.shard(jax.tree.map(make, case.state)), []
    for _ in range(steps):
        state, loss = case.step(state, make(case.batch))
        out.append(jax.device_get((state, loss)))
    return out


def assert_steps_alike(
    train_step: Callable,
    step: shardfn.ShardedStep,
    plain: Any,
    batch: Any,
    state: Any = None,
    steps: int = 2,
    tol: float = 1e-4,
) -> Any:
    """The sharded state after some steps from `plain`, or from `state` if that is it
    stored: each step's loss and state are those of the plain step."""
    state = step.shard(plain) if state is None else state
    run = jax.jit(train_step)
    for k in range(steps):
        plain, loss = run(plain, batch)
        state, sharded_loss = step(state, batch)
        assert_same(loss, sharded_loss, f"step {k + 1}, loss", tol=tol)
        assert_same(plain, step.unshard(state), f"step {k + 1}, state", tol=tol)
    return state
