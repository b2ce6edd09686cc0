"""Follows a plan on one device's blocks, inside `shard_map`.

In: a program, its plan, local arguments. Out: local results. Everything decided is in
the plan; emit only evaluates equations and makes the moves. Types stay truthful: a
value is invarying along a mesh axis exactly if the plan says that it is replicated
there.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardfn._core import compat
from shardfn._core.barrier import barrier, undelayed_on_gpus
from shardfn._core.line_names import REPEATED, phase_name
from shardfn._core.memories import HOST
from shardfn._core.plan import (
    Apply,
    BlockLoop,
    BodyPlan,
    Place,
    Ref,
    Reshard,
    Transfer,
)
from shardfn._core.program import Node, Program, aval_of
from shardfn._core.quantized_leaf import bits_of, dequantize_p, written_as
from shardfn._core.sharding import Axes, Sharding, local_shape
from shardfn._core.step_order import last_uses, made_by, together
from shardfn._lowering.bits import Bits, whole
from shardfn._lowering.block_loop import run_blocks, transfer
from shardfn._lowering.control_flow import ControlFlow, typed
from shardfn._lowering.duplicates import Duplicates
from shardfn._lowering.extremum_jvp import Extreme
from shardfn._lowering.literals import Literals
from shardfn._lowering.operations import Cut, is_picked, run_op
from shardfn._lowering.reshards import move_along, move_together, reads_of
from shardfn._lowering.residual_sums import move_leaving
from shardfn._lowering.run_ahead import Sources, run_ahead

Arrays = Sequence[jax.Array]


def emit(
    program: Program,
    plan: BodyPlan,
    args: Arrays,
    axes: Axes,
    place: Place = (),
    apart: frozenset[str] = frozenset(),
    differentiated: bool = False,
) -> list[jax.Array]:
    """Runs `program` by `plan` on one device's blocks.

    Args:
      program: the traced step.
      plan: its plan.
      args: local blocks, sharded as `plan.inputs` says, then what the plan imports.
      axes: the mesh axes, bound by the surrounding `shard_map`.
      place: where the plan stands in the plan that it is part of.
      apart: mesh axes along which devices run it on different rows of the batch.
      differentiated: whether it is a rule of a derivative: all that it does to tangents
        is then linear, also the sum of elements of which each lies on one device.

    Returns:
      Local blocks, as `plan.output_shardings` says, exports and what is handed on.
    """
    with compat.broadcasts_ranks():
        return _Run(program, plan, axes, place, apart, differentiated).run(args)


def _emit_part(
    program: Program,
    plan: BodyPlan,
    args: Sequence[jax.Array | None],
    axes: Axes,
    place: Place,
    apart: frozenset[str],
    sources: Sources,
    within: tuple[int, ...],
    differentiated: bool = False,
) -> list[Any]:
    """What a plan that runs ahead of a loop exports, from the arguments that are
    known."""
    run = _Run(program, plan, axes, place, apart, differentiated)
    run.constants()
    given = zip((*map(Ref, program.inputs), *plan.imports), args, strict=True)
    run.env.update((ref, arg) for ref, arg in given if arg is not None)
    return run_ahead(run, sources, within)


@dataclass(slots=True)
class _Run:
    program: Program
    plan: BodyPlan
    axes: Axes
    place: Place
    apart: frozenset[str]
    differentiated: bool = False
    env: dict[Ref, Any] = field(default_factory=dict)
    literals: Literals = field(default_factory=Literals)
    decoded: dict[Any, jax.Array] = field(default_factory=dict)
    extremes: dict[Ref, Extreme] = field(default_factory=dict)
    picked: set[Ref] = field(default_factory=set)
    cut: Cut | None = None
    copies: dict[Ref, list[jax.Array]] = field(default_factory=dict)
    bits: dict[Ref, Bits] = field(default_factory=dict)
    duplicates: Duplicates = field(default_factory=Duplicates)

    def run(self, args: Arrays) -> list[jax.Array]:
        program = self.program
        self.constants()
        inputs = (*map(Ref, program.inputs), *self.plan.imports)
        self.env.update(zip(inputs, args, strict=True))
        steps, _ = self.plan.run
        last_use = last_uses(steps, tuple(self.plan.leaving))
        self.duplicates.prepare(program, self.plan, self.axes)
        for index, step in enumerate(steps):
            if isinstance(step, Reshard):
                self.reshard(index)
            elif isinstance(step, BlockLoop):
                self.loop(step)
            else:
                self.follow(step)
            for ref in last_use.get(index, ()):
                self.env.pop(ref, None)
                self.copies.pop(ref, None)
        others = [self.env[ref] for ref in (*self.plan.exports, *self.plan.handed)]
        return [*map(self.output, range(len(program.outputs))), *others]

    def output(self, j: int) -> jax.Array:
        """What is returned in place `j`, of the type that the program gives it. What
        lives on the host has it: nothing but copies may touch it there."""
        atom = self.program.outputs[j]
        x = self.read(self.plan.run[1][j], atom)
        weak = getattr(aval_of(self.program, atom), "weak_type", None)
        if weak is None or j in self.plan.to_host:
            return x
        return self.typed(x, self.plan.output_shardings[j], weak)

    def constants(self) -> None:
        self.env.update((Ref(v), jnp.asarray(c)) for v, c in self.program.constants)

    def read(self, ref: Ref | None, atom: Any, backward: bool = False) -> jax.Array:
        if ref is not None:
            x = self.copies[ref].pop() if self.copies.get(ref) else self.env[ref]
            made = {} if self.axes.reads_apart else self.decoded
            return whole(x, made, (ref, backward))
        return self.literals.array(atom)

    def typed(self, x: Any, sharding: Sharding, weak: bool | None = None) -> jax.Array:
        return typed(x, sharding, self.axes, self.apart, weak)

    # Moves

    def reshard(self, index: int) -> None:
        """The move of step `index`, or all that are one with it."""
        steps = together(self.plan.run[0], index)
        blocks = [self.tied(step) for step in steps]
        if len(steps) > 1:
            moved = move_together(steps, blocks, self.place, self.axes)
            self.env.update(zip((s.result for s in steps), moved, strict=True))
        elif steps:
            (step,) = steps
            first, *rest = self.moved(step, blocks[0])
            self.env[step.result], self.copies[step.result] = first, rest
            if step.leaves_part:
                self.cut_off(step)
        for ref in [s.result for s in steps if s.undelayed]:
            self.env[ref] = undelayed_on_gpus(self.env[ref])

    def cut_off(self, step: Reshard) -> None:
        """Lets nothing use a whole value before the part of it that stays is cut off:
        a compiler that cuts late keeps the whole until then."""
        refs = step.source, step.result
        leaves, tree = jax.tree.flatten([self.env[ref] for ref in refs])
        both = jax.tree.unflatten(tree, barrier(*leaves))
        self.env.update(zip(refs, both, strict=True))

    def tied(self, step: Reshard) -> Any:
        """What a move moves, no earlier than what it waits for."""
        x, only_waits = self.env[step.source], len(step.path) == 1
        bits = self.bits.get(step.source, x)
        if isinstance(bits, Bits) and step.takes_bits:
            x = bits
        elif not only_waits:
            x = whole(x, {}, None)
        if step.after is None:
            return x
        if only_waits or step.in_turn:
            return self.waiting(x, step.after)
        if isinstance(x, Bits):
            return x.behind(self.env[step.after])
        return barrier(x, self.env[step.after])[0]

    def waiting(self, x: Any, after: Ref) -> Any:
        """`x`, made no earlier than `after`, which goes on as what the barrier makes of
        it: a compiler drops from a barrier what nothing reads behind it."""
        leaves, tree = jax.tree.flatten(x)
        *leaves, self.env[after] = barrier(*leaves, self.env[after])
        return jax.tree.unflatten(tree, leaves)

    def moved(self, step: Reshard, x: jax.Array) -> list[jax.Array]:
        """What a move makes: one array, or one for each use."""
        if len(step.path) == 1:
            return [x]
        if step.residual is not None:
            rows = self.program.avals[step.residual.value].shape[0]
            made = move_leaving(step, rows, x, self.place, self.axes)
            self.env[step.residual] = made.pop()
            return made
        # What JAX keeps of a derivative must not refer to this run and its tracers.
        picked = step.source in self.picked
        run = functools.partial(
            move_along, step, place=self.place, axes=self.axes, picked=picked
        )
        reduces, count = 0, len(step.path) - 1
        if extreme := self.extremes.get(step.source):
            reduces = min(extreme.moves, count)
            x = extreme.reduced(x, lambda x: run(0, reduces, x)[0])
        return run(reduces, count, x, copies=reads_of(step, self.plan, self.axes))

    # Memories

    def follow(self, step: Apply | Transfer) -> None:
        if isinstance(step, Apply):
            return self.apply(step, self.program.nodes[step.node])
        x = self.env[step.source]
        if step.after is not None:
            x = self.waiting(x, step.after)
        if step.memory == HOST:
            x = compat.with_weak_type(
                x, self.program.avals[step.source.value].weak_type
            )
        with jax.named_scope(phase_name(step.during.phase)):
            self.env[step.result] = transfer(step, x, self.axes)

    def loop(self, loop: BlockLoop) -> None:
        """The steps of a loop, on blocks."""
        cut = Cut(loop.dim, loop.blocks)

        def run(blocks: Mapping[Ref, jax.Array]) -> Mapping[Ref, jax.Array]:
            own = {"env": dict(blocks), "literals": Literals(), "decoded": {}}
            inner = replace(self, **own, cut=cut, copies={})
            for step in loop.steps:
                inner.follow(step)
            return inner.env

        def empty(ref: Ref) -> jax.Array:
            shape = local_shape(loop.shape, loop.sharding, self.axes)
            zeros = jnp.zeros(shape, self.program.avals[ref.value].dtype)
            return self.typed(zeros, loop.sharding)

        given = {ref: self.env[ref] for ref in loop.reads}
        made = run_blocks(loop, given, empty, run)
        self.env.update(zip(loop.made, made, strict=True))

    # Equations

    def apply(self, step: Apply, node: Node) -> None:
        pairs = zip(step.operands, node.inputs, strict=True)
        operands = [self.read(*pair, node.backward) for pair in pairs]
        if step.after is not None:
            operands[0] = self.waiting(operands[0], step.after)
        self.env.update(self.made(step, node, operands))
        other = functools.partial(self.made, step, node)
        self.copies.update(self.duplicates.follow(step, operands, other))

    def made(self, step: Apply, node: Node, operands: Arrays) -> dict[Ref, Any]:
        """What a node makes of these operands, and what its bodies export."""
        repeated = compat.is_repeated(node.eqn)
        phase = phase_name(REPEATED if repeated else node.during.phase)
        with compat.as_user_code(node.eqn), jax.named_scope(phase):
            if node.kind == "op":
                results = self.op(step, node, operands)
            elif node.kind == "barrier":
                results = barrier(*operands)
            elif node.kind == "constrain":
                results = operands  # moved already
            else:
                imports = [self.env[ref] for ref in step.imports]
                results = self.flow(step, node, imports).run(operands)
        made = dict(zip(made_by(self.program, step), results, strict=True))
        for value, sharding in zip(node.outputs, step.result_shardings, strict=True):
            made[Ref(value)] = self.typed(made[Ref(value)], sharding)
        return made

    def op(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        operands = self.literals.alike(node.inputs, operands)
        given = self.program, step, node, operands
        results, extreme = run_op(*given, self.axes, self.cut)
        if extreme is not None:
            self.extremes[Ref(node.outputs[0])] = extreme
        if is_picked(step, node) and not self.differentiated:
            self.picked.add(Ref(node.outputs[0]))
        if node.eqn.primitive is dequantize_p:
            how, dtype = written_as(node.eqn), results[0].dtype
            self.bits[Ref(node.outputs[0])] = Bits(*bits_of(*operands), how, dtype)
        return results

    def flow(self, step: Apply, node: Node, imports: Arrays) -> ControlFlow:
        around, also = (self.axes, self.place, self.apart), self.differentiated
        runs = (functools.partial(f, differentiated=also) for f in (emit, _emit_part))
        return ControlFlow(node, step, imports, *around, *runs)
