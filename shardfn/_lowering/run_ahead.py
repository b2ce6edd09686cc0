"""Runs what of a loop's body goes ahead of the loop.

In: a plan of such a part, being run, and the arguments that are known. Out: what it
exports; or what its gathers move, so that it may wait for something before they are
made: behind the step's casts, which a compiler then makes in one kernel with slices.
What is cast for the wire alone (`gather_dtype`) is cast by the gather, behind the wait.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from shardfn._core.plan import (
    Apply,
    BodyPlan,
    Ref,
    Reshard,
    Site,
    Transfer,
    reads,
)
from shardfn._core.program import Node, Program
from shardfn._core.step_order import made_by
from shardfn._lowering.bits import Bits


@dataclass(frozen=True, slots=True)
class Sources:
    """What the gathers of a part move, by where they are.

    Attributes:
      found: where it is written, while nothing is gathered; None if the part is made.
      asked: the gathers whose operands are written there.
      given: what is moved in place of what the part makes for it.
    """

    found: dict[Site, Any] | None
    asked: Set[Site] = frozenset()
    given: Mapping[Site, Any] = field(default_factory=dict)


class Run(Protocol):
    """A plan while it is followed, with the arguments and constants in place."""

    program: Program
    plan: BodyPlan
    env: dict[Ref, Any]
    bits: dict[Ref, Bits]

    def reshard(self, index: int) -> None: ...
    def follow(self, step: Apply | Transfer) -> None: ...
    def read(self, ref: Ref | None, atom: Any) -> jax.Array: ...
    def flow(self, step: Apply, node: Node, imports: Sequence[Any]) -> Any: ...


def run_ahead(run: Run, sources: Sources, within: tuple[int, ...]) -> list[Any]:
    """Follows the plan of a part.

    Args:
      run: the plan, and the arguments that are known.
      sources: what its gathers move; filled, or used.
      within: in which calls of the part this is.

    Returns:
      What the plan exports, None for what is not known before gathers are made.
    """
    steps, env = run.plan.run[0], run.env
    moves = [step for step in steps if isinstance(step, Reshard)]
    given = {
        step.source: sources.given[within, step.result]
        for step in moves
        if (within, step.result) in sources.given
    }
    needed, _ = _needed(run.program, run.plan, sources.given.keys(), within)
    for index, step in enumerate(steps):
        env |= given  # also where a step makes it again, beside something else
        if index not in needed:
            continue
        if isinstance(step, Reshard):
            if sources.found is None or step.is_local:
                if env.keys() >= {*reads(step)}:
                    run.reshard(index)
            elif (within, step.result) in sources.asked:
                own = run.bits.get(step.source, env[step.source])
                sources.found[within, step.result] = own
            continue
        assert isinstance(step, Apply | Transfer)
        if isinstance(step, Apply) and run.program.nodes[step.node].kind != "op":
            env |= dict(_exported(run, step, sources, within))
        elif env.keys() >= {*reads(step)}:
            run.follow(step)
    if sources.found is None:
        return [env[ref] for ref in run.plan.exports]
    return [env.get(ref) for ref in run.plan.exports]


def _exported(
    run: Run, step: Apply, sources: Sources, within: tuple[int, ...]
) -> Iterator[tuple[Ref, Any]]:
    """What a call in a part exports, of what is known."""
    node = run.program.nodes[step.node]
    known = [
        run.read(ref, atom) if ref is None or ref in run.env else None
        for ref, atom in zip(step.operands, node.inputs, strict=True)
    ]
    known += [run.env.get(ref) for ref in step.imports]
    call, inside = run.flow(step, node, ()), (*within, step.node)
    made = call.part(step.bodies[0], known, sources, inside)
    for ref, x in zip(step.exports, made, strict=True):
        if x is not None:
            yield ref, x


def _needed(
    program: Program, plan: BodyPlan, given: Set[Site], within: tuple[int, ...]
) -> tuple[set[int], set[Ref]]:
    """Indices of the steps that are to run, and the versions that they read: all but
    those that compute or copy only what nothing reads, or what is given."""
    found: set[int] = set()
    read: set[Ref] = set(plan.exports)
    moves = (step for step in plan.run[0] if isinstance(step, Reshard))
    known = {step.source for step in moves if (within, step.result) in given}
    for index, step in reversed([*enumerate(plan.run[0])]):
        node = program.nodes[step.node] if isinstance(step, Apply) else None
        made = {*made_by(program, step)}
        if node is not None and isinstance(step, Apply) and node.bodies:
            (called, *_), (inner, *_) = node.bodies, step.bodies
            _, inside = _needed(called, inner, given, (*within, step.node))
            names = (*map(Ref, called.inputs), *inner.imports)
            operands = zip(names, (*step.operands, *step.imports), strict=True)
            read |= {ref for name, ref in operands if ref and name in inside}
        elif isinstance(step, Reshard) or made & read - known:
            read |= {*reads(step)}
        else:
            continue
        found.add(index)
    return found, read - known
