"""Runs what of a loop's body goes ahead of the loop.

In: a plan of such a part, being run, and the arguments that are known. Out: what it
exports; or what its gathers move, so that it may wait for something before they are
made: behind the casts, which a compiler then makes in one kernel with the slices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from shardfn._core.plan import (
    Apply,
    BodyPlan,
    HostStep,
    Ref,
    Reshard,
    Site,
    Step,
    Transfer,
    reads,
)
from shardfn._core.program import Node, Program
from shardfn._core.step_order import made_by


@dataclass(frozen=True, slots=True)
class Sources:
    """What the gathers of a part move, by where they are.

    Attributes:
      found: as it is found, while nothing is gathered; None where the part is made.
      given: what is gathered in place of what the part makes for it.
    """

    found: dict[Site, Any] | None = None
    given: Mapping[Site, Any] = field(default_factory=dict)


class Run(Protocol):
    """A plan while it is followed, with the arguments and constants in place."""

    program: Program
    plan: BodyPlan
    env: dict[Ref, Any]

    def reshard(self, index: int) -> None: ...
    def follow(self, step: Apply | Transfer) -> None: ...
    def read(self, ref: Ref | None, atom: Any) -> jax.Array: ...
    def part_of_call(
        self,
        step: Apply,
        node: Node,
        args: Sequence[Any],
        sources: Sources,
        within: tuple[int, ...],
    ) -> list[Any]: ...


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
    own = {s.result: s for s in steps if isinstance(s, Reshard)}
    given = {ref: sources.given.get((within, ref)) for ref in own}
    env |= {own[ref].source: x for ref, x in given.items() if x is not None}
    waits = [own[ref].source for ref, x in given.items() if x is not None]
    needed = _needed(run.program, run.plan, frozenset(waits))
    for index, step in enumerate(steps):
        if index not in needed:
            continue
        if isinstance(step, Reshard):
            if sources.found is None or not any(move.op for move in step.moves):
                run.reshard(index)
            elif step.gathers_state and step.source in env:
                sources.found[within, step.result] = env[step.source]
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
    made = run.part_of_call(step, node, known, sources, (*within, step.node))
    for ref, x in zip(step.exports, made, strict=True):
        if x is not None:
            yield ref, x


def _needed(program: Program, plan: BodyPlan, known: frozenset[Ref]) -> set[int]:
    """Indices of the steps that are to run: all but those that only make what is known
    already."""
    found: set[int] = set()
    read: set[Ref] = set(plan.exports)
    for index, step in reversed([*enumerate(plan.run[0])]):
        if known and _only_computes(program, step):
            made = {*made_by(program, step)}
            if made.isdisjoint(read) or made <= known:
                continue
        found.add(index)
        read |= {*reads(step)} - known
    return found


def _only_computes(program: Program, step: Step | HostStep) -> bool:
    return isinstance(step, Apply) and program.nodes[step.node].kind == "op"
