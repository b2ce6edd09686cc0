"""Runs control flow by its plan, inside `shard_map`.

In: a scan, while, cond, remat or custom node, its step of the plan, local operands.
Out: local results. The bodies are run by the interpreter that is given.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from shardfn._core import compat
from shardfn._core.barrier import barrier
from shardfn._core.moves import moves_of
from shardfn._core.plan import Ahead, Apply, BodyPlan, Place, Ref, Site, reads
from shardfn._core.program import Node, Program, aval_of
from shardfn._core.regions import span
from shardfn._core.resharding import reshard_path
from shardfn._core.sharding import Axes, Sharding, axes_of
from shardfn._lowering.collectives import run_move
from shardfn._lowering.custom_derivatives import run_custom
from shardfn._lowering.move_lowerings import varying
from shardfn._lowering.prefetching_scan import AheadPart, scan_ahead
from shardfn._lowering.run_ahead import Sources
from shardfn._schedule.moved_ahead import moved_ahead
from shardfn._schedule.stacked_casts import cast_all, narrow_dtypes

Arrays = Sequence[jax.Array]
Emit = Callable[..., list[jax.Array]]
"""`(program, plan, args, axes, place, apart)` to what the plan returns and exports."""


def typed(
    x: jax.Array,
    sharding: Sharding,
    axes: Axes,
    apart: frozenset[str],
    weak: bool | None = None,
) -> jax.Array:
    """`x` varying along the axes that `sharding` is not replicated on, and along those
    that devices run it on other rows of."""
    names = (
        bound
        for axis, state in enumerate(sharding)
        if state is not None or axes.names[axis] in apart
        for bound in axes.bound(axis)
    )
    x = varying(x, *names)
    return x if weak is None else compat.with_weak_type(x, weak)


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """One control-flow node while it is run.

    Attributes:
      node: the node.
      step: what the plan says of it.
      imports: what its bodies import.
      axes: the mesh axes.
      place: where the plan that the step is part of stands.
      apart: mesh axes along which devices run that plan on different rows of the batch.
      emit: runs a body by its plan.
      emit_part: runs what of a body goes ahead, from the arguments that are known.
    """

    node: Node
    step: Apply
    imports: Arrays
    axes: Axes
    place: Place
    apart: frozenset[str]
    emit: Emit
    emit_part: Emit

    def run(self, operands: Arrays) -> Arrays:
        """Local results, then what the bodies export."""
        return {
            "scan": self.scan,
            "while": self.loop,
            "cond": self.branch,
            "remat": self.remat,
            "custom": self.custom,
        }[self.node.kind](operands)

    def part(
        self,
        plan: BodyPlan,
        args: Sequence[jax.Array | None],
        sources: Sources,
        within: tuple[int, ...] = (),
    ) -> list[Any]:
        """What a plan of the body that runs ahead exports."""
        around = self.axes, (*self.place, self.step.node, 0), self.apart
        program = self.node.bodies[0]
        return self.emit_part(program, plan, args, *around, sources, within)

    def typed(
        self, x: jax.Array, sharding: Sharding, weak: bool | None = None
    ) -> jax.Array:
        return typed(x, sharding, self.axes, self.apart, weak)

    def body(self, i: int) -> Callable[..., list[jax.Array]]:
        node, step = self.node, self.step
        # What JAX keeps of a derivative must not refer to `self` and its tracers.
        place, apart, axes = (*self.place, step.node, i), self.apart, self.axes
        emit = self.emit
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

    def remat(self, operands: Arrays) -> Arrays:
        node, step = self.node, self.step
        args = self.entering(step.bodies[0], node.bodies[0], operands)
        body, run, trees = node.bodies[0], self.body(0), []
        imports, treedef = jax.tree.flatten(self.imports)
        weights = [bool(body.leaf(v)) for v in body.inputs]
        early = [i in step.early for i in range(len(args))]

        count = len(args)

        def on_arrays(*flat: jax.Array) -> list[jax.Array]:
            inside = jax.tree.unflatten(treedef, flat[count:])
            made, tree = jax.tree.flatten(run(*flat[:count], *inside))
            trees.append(tree)
            return made

        made = compat.bind_remat(node.eqn, on_arrays, args, weights, early, imports)
        return jax.tree.unflatten(trees[-1], made)

    def custom(self, operands: Arrays) -> Arrays:
        node, step = self.node, self.step
        args = self.entering(step.bodies[0], node.bodies[0], operands)
        run = self.body(0)
        return run_custom(node, step.bodies[0], run, args, self.axes, self.emit)

    def scan(self, operands: Arrays) -> Arrays:
        node, step = self.node, self.step
        (region,), carries = node.regions, node.regions[0].carries
        run, plan, body = self.body(0), step.bodies[0], node.bodies[0]
        consts = span(operands, region.constants)
        xs = [*node.sliced(operands), *self.imports]
        init = [
            self.typed(x, s, getattr(body.avals[v], "weak_type", None))
            for x, s, v in zip(
                self.started(operands, span(region.operands, carries)),
                span(plan.inputs, carries),
                span(body.inputs, carries),
                strict=True,
            )
        ]
        n_carry = len(carries)
        narrow = narrow_dtypes(node, step)
        stacked = [narrow.get(j) for j in region.stacks]
        wide = [
            aval_of(body, body.outputs[j]).dtype if j in narrow else None
            for j in region.stacks
        ]

        def iteration(carry: Any, x: Any, made: Any = ()) -> tuple[Any, ...]:
            if node.backward and node.is_unrolled:
                leaves, tree = jax.tree.flatten(x)  # or it shares the forward's gathers
                x = tree.unflatten(barrier(*leaves, *carry)[: len(leaves)])
            out = run(*consts, *carry, *x, *made)
            end = len(node.outputs) + len(step.exports)
            carry = out[:n_carry]
            made = cast_all(out[n_carry : len(node.outputs)], stacked)
            if step.stacks_last:
                tied = barrier(*carry, *made)
                carry, made = tied[:n_carry], tied[n_carry:]
            ys = (*made, *out[len(node.outputs) : end])
            handed = (out[end:],) if step.ahead else ()
            return tuple(carry), ys, *handed

        def taken_ahead(ahead: Ahead) -> AheadPart:
            used = {ref for s in ahead.part.run[0] for ref in reads(s)}
            slices = span(body.inputs, region.slices)
            scanned = (*map(Ref, slices), *ahead.part.imports)
            asked = {each.site for each in moved_ahead(body, ahead.part)}

            def make(slices: Arrays, sources: Sources) -> list[Any]:
                args = [*consts, *[None] * n_carry, *slices]
                return self.part(ahead.part, args, sources)

            def moved(slices: Arrays) -> tuple[dict[Site, Any], bool]:
                found = dict[Site, Any]()
                made = make(slices, Sources(found, asked))
                return found, all(x is None for x in made)

            return AheadPart(
                ahead.lead,
                frozenset(i for i, ref in enumerate(scanned) if ref in used),
                moved,
                lambda slices, given: make(slices, Sources(None, given=given)),
                ahead.tied,
                ahead.handed,
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
        made = cast_all(ys[: len(wide)], wide)
        return [*carry, *made, *ys[len(wide) :]]

    def started(self, operands: Arrays, carries: Sequence[int]) -> Arrays:
        """What a loop starts from. A literal that it sums up from is one term alone."""
        out, step = [], self.step
        for i in carries:
            x, end = operands[i], step.operand_shardings[i]
            if step.operands[i] is None:
                path = reshard_path(self.axes.replicated, end, x.shape, self.axes)
                for move in moves_of(path):
                    x = run_move(x, x.shape, move, self.axes)
            out.append(x)
        return out

    def loop(self, operands: Arrays) -> Arrays:
        node, step = self.node, self.step
        test, run = self.body(0), self.body(1)
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

    def branch(self, operands: Arrays) -> Arrays:
        node, step = self.node, self.step
        given = node.regions[0].entering(operands)
        args = self.entering(step.bodies[0], node.bodies[0], given)
        branches = [self.body(i) for i in range(len(node.bodies))]
        return lax.switch(operands[0], branches, *args)


def rows_apart(node: Node, step: Apply) -> tuple[int, ...]:
    """Indices of the mesh axes along which devices scan different rows."""
    scanned = node.sliced(step.operand_shardings)
    return axes_of(scanned[0], 0) if scanned else ()
