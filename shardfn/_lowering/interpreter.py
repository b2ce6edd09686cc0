"""Follows a plan on one device's blocks, inside `shard_map`.

In: a program, its plan, local arguments. Out: local results. Everything decided is in
the plan; emit only evaluates equations and makes the moves. Types stay truthful: a
value is invarying along a mesh axis exactly if the plan says that it is replicated
there.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn._core import compat
from shardfn._core.barrier import barrier
from shardfn._core.plan import (
    Ahead,
    Apply,
    BodyPlan,
    Place,
    Ref,
    Reshard,
    reads,
    together,
)
from shardfn._core.program import Node, Program, aval_of
from shardfn._core.regions import span
from shardfn._core.resharding import reshard_path
from shardfn._core.sharding import Axes, Sharding, axes_of
from shardfn._lowering.collectives import run_move, varying
from shardfn._lowering.custom_derivatives import run_custom
from shardfn._lowering.extremum_jvp import Extreme
from shardfn._lowering.operations import is_picked, run_op
from shardfn._lowering.prefetching_scan import Part, scan_ahead
from shardfn._lowering.reshards import move_along, move_together

Arrays = Sequence[jax.Array]


def emit(
    program: Program,
    plan: BodyPlan,
    args: Arrays,
    axes: Axes,
    place: Place = (),
    apart: frozenset[str] = frozenset(),
) -> list[jax.Array]:
    """Runs `program` by `plan` on one device's blocks.

    Args:
      program: the traced step.
      plan: its plan.
      args: local blocks, sharded as `plan.inputs` says, then what the plan imports.
      axes: the mesh axes, bound by the surrounding `shard_map`.
      place: where the plan stands in the plan that it is part of.
      apart: mesh axes along which devices run it on different rows of the batch.

    Returns:
      Local blocks, sharded as `plan.output_shardings` says, then what it exports.
    """
    with compat.broadcasts_ranks():
        return _Run(program, plan, axes, place, apart).run(args)


@dataclass(slots=True)
class _Run:
    program: Program
    plan: BodyPlan
    axes: Axes
    place: Place
    apart: frozenset[str]
    env: dict[Ref, jax.Array] = field(default_factory=dict)
    literals: dict[Any, jax.Array] = field(default_factory=dict)
    extremes: dict[Ref, Extreme] = field(default_factory=dict)
    picked: set[Ref] = field(default_factory=set)

    def run(self, args: Arrays) -> list[jax.Array]:
        program = self.program
        self.constants()
        inputs = (*map(Ref, program.inputs), *self.plan.imports)
        self.env.update(zip(inputs, args, strict=True))
        last_use = _last_uses(self.plan)
        for index, step in enumerate(self.plan.steps):
            if isinstance(step, Reshard):
                self.reshard(index)
            else:
                self.apply(step, program.nodes[step.node])
            for ref in last_use.get(index, ()):
                self.env.pop(ref, None)
        outputs = [
            self.typed(self.read(ref, atom), sharding, aval_of(program, atom).weak_type)
            if hasattr(aval_of(program, atom), "weak_type")
            else self.read(ref, atom)
            for ref, atom, sharding in zip(
                self.plan.outputs,
                program.outputs,
                self.plan.output_shardings,
                strict=True,
            )
        ]
        return [*outputs, *(self.env[ref] for ref in self.plan.exports)]

    def constants(self) -> None:
        self.env.update((Ref(v), jnp.asarray(c)) for v, c in self.program.constants)

    def run_part(self, args: Sequence[jax.Array | None]) -> list[jax.Array]:
        """What a plan that runs ahead exports, from the arguments that are known."""
        self.constants()
        inputs = (*map(Ref, self.program.inputs), *self.plan.imports)
        for ref, arg in zip(inputs, args, strict=True):
            if arg is not None:
                self.env[ref] = arg
        for index, step in enumerate(self.plan.steps):
            if isinstance(step, Reshard):
                self.reshard(index)
                continue
            node = self.program.nodes[step.node]
            if node.kind == "op":
                self.apply(step, node)
                continue
            known = [
                self.read(ref, atom) if ref is None or ref in self.env else None
                for ref, atom in zip(step.operands, node.inputs, strict=True)
            ]
            known += [self.env.get(ref) for ref in step.imports]
            made = self.part(step, node, step.bodies[0]).run_part(known)
            self.env.update(zip(step.exports, made, strict=True))
        return [self.env[ref] for ref in self.plan.exports]

    def part(self, step: Apply, node: Node, plan: BodyPlan) -> "_Run":
        place = (*self.place, step.node, 0)
        return _Run(node.bodies[0], plan, self.axes, place, self.apart)

    def read(self, ref: Ref | None, atom: Any) -> jax.Array:
        if ref is not None:
            return self.env[ref]
        key = (str(atom.aval), np.asarray(atom.val).tobytes())
        if key not in self.literals:
            value = jnp.asarray(np.asarray(atom.val), atom.aval.dtype)
            self.literals[key] = compat.with_weak_type(value, atom.aval.weak_type)
        return self.literals[key]

    def varies(self, sharding: Sharding) -> tuple[str, ...]:
        return tuple(
            bound
            for axis, state in enumerate(sharding)
            if state is not None or self.axes.names[axis] in self.apart
            for bound in self.axes.bound(axis)
        )

    def typed(
        self, x: jax.Array, sharding: Sharding, weak: bool | None = None
    ) -> jax.Array:
        """`x` varying along the axes that `sharding` is not replicated on."""
        x = varying(x, *self.varies(sharding))
        return x if weak is None else compat.with_weak_type(x, weak)

    # Moves

    def reshard(self, index: int) -> None:
        """The move of step `index`, or all that are one with it."""
        steps = together(self.plan.steps, index)
        blocks = [self.tied(step) for step in steps]
        if len(steps) > 1:
            moved = move_together(steps, blocks, self.place, self.axes)
            self.env.update(zip((s.result for s in steps), moved, strict=True))
        elif steps:
            (step,) = steps
            self.env[step.result] = self.moved(step, blocks[0])
            if step.keeps_part:
                self.cut(step)

    def cut(self, step: Reshard) -> None:
        """Lets nothing use a whole value before the part of it that stays is cut off:
        a compiler that cuts late keeps the whole until then."""
        both = self.env[step.source], self.env[step.result]
        both = lax.optimization_barrier(both)
        self.env[step.source], self.env[step.result] = both

    def tied(self, step: Reshard) -> jax.Array:
        """What a move moves, no earlier than what it waits for."""
        x = self.env[step.source]
        if step.after is None:
            return x
        if len(step.path) == 1:
            return self.waiting(x, step.after)
        x, _ = barrier(x, self.env[step.after])
        return x

    def waiting(self, x: jax.Array, after: Ref) -> jax.Array:
        """`x`, made no earlier than `after`, which goes on as what the barrier makes of
        it: a compiler drops from a barrier what nothing reads behind it."""
        x, self.env[after] = barrier(x, self.env[after])
        return x

    def moved(self, step: Reshard, x: jax.Array) -> jax.Array:
        # What JAX keeps of a derivative must not refer to this run and its tracers.
        run = functools.partial(
            move_along,
            step,
            place=self.place,
            axes=self.axes,
            picked=step.source in self.picked,
        )
        extreme, reduces, count = self.extremes.get(step.source), 0, len(step.path) - 1
        if extreme is not None:
            reduces = min(extreme.moves, count)
            x = extreme.reduced(x, functools.partial(run, 0, reduces))
        return run(reduces, count, x)

    # Equations

    def apply(self, step: Apply, node: Node) -> None:
        operands = [
            self.read(ref, atom)
            for ref, atom in zip(step.operands, node.inputs, strict=True)
        ]
        if step.after is not None:
            operands[0] = self.waiting(operands[0], step.after)
        with compat.as_user_code(node.eqn):
            results = {
                "op": self.op,
                "scan": self.scan,
                "while": self.loop,
                "cond": self.branch,
                "remat": self.remat,
                "custom": self.custom,
                "barrier": self.barrier,
                "constrain": self.constrain,
            }[node.kind](step, node, operands)
        count = len(node.outputs)
        for value, result, sharding in zip(
            node.outputs, results[:count], step.result_shardings, strict=True
        ):
            self.env[Ref(value)] = self.typed(result, sharding)
        self.env.update(zip(step.exports, results[count:], strict=True))

    def op(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        results, extreme = run_op(self.program, step, node, operands, self.axes)
        if extreme is not None:
            self.extremes[Ref(node.outputs[0])] = extreme
        if is_picked(step, node):
            self.picked.add(Ref(node.outputs[0]))
        return results

    def constrain(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        """The operand has been moved already."""
        return operands

    def barrier(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        return barrier(*operands)

    # Control flow

    def body(self, step: Apply, node: Node, i: int) -> Callable[..., list[jax.Array]]:
        place, apart, axes = (*self.place, step.node, i), self.apart, self.axes
        apart |= {axes.names[a] for a in rows_apart(node, step)}

        def run(*args: jax.Array) -> list[jax.Array]:
            return emit(node.bodies[i], step.bodies[i], args, axes, place, apart)

        return run

    def entering(self, plan: BodyPlan, body: Program, args: Arrays) -> list[jax.Array]:
        """Arguments of a body with the types that its plan gives them."""
        return [
            self.typed(x, sharding, getattr(body.avals[v], "weak_type", None))
            for x, sharding, v in zip(args, plan.inputs, body.inputs, strict=True)
        ]

    def remat(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        args = self.entering(step.bodies[0], node.bodies[0], operands)
        imports = [self.env[ref] for ref in step.imports]
        body, run = node.bodies[0], self.body(step, node, 0)
        weights = [bool(body.leaf(v)) for v in body.inputs]
        early = [i in step.early for i in range(len(args))]
        return compat.bind_remat(node.eqn, run, args, weights, early, imports)

    def custom(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        args = self.entering(step.bodies[0], node.bodies[0], operands)
        run = self.body(step, node, 0)
        return run_custom(node, step.bodies[0], run, args, self.axes, emit)

    def scan(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        (region,), carries = node.regions, node.regions[0].carries
        run, plan, body = self.body(step, node, 0), step.bodies[0], node.bodies[0]
        consts = span(operands, region.constants)
        xs = [*node.sliced(operands), *(self.env[ref] for ref in step.imports)]
        init = [
            self.typed(x, s, getattr(body.avals[v], "weak_type", None))
            for x, s, v in zip(
                self.started(step, operands, span(region.operands, carries)),
                span(plan.inputs, carries),
                span(body.inputs, carries),
                strict=True,
            )
        ]
        n_carry = len(carries)

        def iteration(carry: Any, x: Any, made: Any = ()) -> tuple[Any, Any]:
            if node.backward and node.is_unrolled:
                x = barrier(*x, *carry)[: len(x)]  # or it shares the forward's gathers
            out = run(*consts, *carry, *x, *made)
            return tuple(out[:n_carry]), tuple(out[n_carry:])

        def taken_ahead(ahead: Ahead) -> Part:
            used = {ref for s in ahead.part.steps for ref in reads(s)}
            slices = span(body.inputs, region.slices)
            scanned = (*map(Ref, slices), *ahead.part.imports)
            return Part(
                ahead.lead,
                lambda slices: self.part(step, node, ahead.part).run_part(
                    [*consts, *[None] * n_carry, *slices]
                ),
                frozenset(i for i, ref in enumerate(scanned) if ref in used),
            )

        run_scan = lax.scan
        if step.ahead:
            parts = list(map(taken_ahead, step.ahead))
            run_scan = functools.partial(scan_ahead, parts=parts)
        apart = rows_apart(node, step)
        names = tuple(name for i in apart for name in self.axes.bound(i))
        init = [varying(x, *names) for x in init]
        keys = "length", "reverse", "unroll"
        params = {key: node.eqn.params[key] for key in keys}
        params["length"] //= math.prod(self.axes.sizes[i] for i in apart)
        if step.ahead:  # outside of the loop it would drop what is gathered too much
            params["unroll"] = math.gcd(params["length"], params["unroll"])
        carry, ys = run_scan(iteration, init=tuple(init), xs=tuple(xs), **params)
        if apart:  # what an iteration does not change is no row's own
            carry = [
                x if sharding[apart[0]] is None else c
                for c, x, sharding in zip(
                    carry,
                    span(operands, carries),
                    span(step.operand_shardings, carries),
                    strict=True,
                )
            ]
        return [*carry, *ys]

    def started(self, step: Apply, operands: Arrays, carries: Sequence[int]) -> Arrays:
        """What a loop starts from. A literal that it sums up from is one term alone."""
        out = []
        for i in carries:
            x, end = operands[i], step.operand_shardings[i]
            if step.operands[i] is None:
                path = reshard_path(self.axes.replicated, end, x.shape, self.axes)
                for before, after in itertools.pairwise(path):
                    x = run_move(x, x.shape, before, after, self.axes)
            out.append(x)
        return out

    def loop(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        test, run = self.body(step, node, 0), self.body(step, node, 1)
        tested, looped = node.regions
        given = looped.entering(operands)
        tests = span(tested.entering(operands), tested.constants)
        consts = span(given, looped.constants)
        args = self.entering(step.bodies[1], node.bodies[1], given)
        out = lax.while_loop(
            lambda carry: test(*tests, *carry)[0],
            lambda carry: tuple(run(*consts, *carry)),
            tuple(span(args, looped.carries)),
        )
        return list(out)

    def branch(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        given = node.regions[0].entering(operands)
        args = self.entering(step.bodies[0], node.bodies[0], given)
        branches = [self.body(step, node, i) for i in range(len(node.bodies))]
        return lax.switch(operands[0], branches, *args)


def rows_apart(node: Node, step: Apply) -> tuple[int, ...]:
    """Indices of the mesh axes along which devices scan different rows."""
    scanned = node.sliced(step.operand_shardings)
    return axes_of(scanned[0], 0) if scanned else ()


def _last_uses(plan: BodyPlan) -> dict[int, list[Ref]]:
    """Per step, the versions that nothing after it reads."""
    last: dict[Ref, int] = {}
    for index, step in enumerate(plan.steps):
        last.update((ref, index) for ref in reads(step))
    for ref in (*plan.outputs, *plan.exports):
        if ref is not None:
            last.pop(ref, None)
    out: dict[int, list[Ref]] = {}
    for ref, index in last.items():
        out.setdefault(index, []).append(ref)
    return out
