"""Takes a pass into the plans inside a plan.

In: a program, its plan, and a pass over one body. Out: the plan, the bodies of its
control flow rewritten by that pass; all moves in them; where versions are in calls of a
body, moves rewritten there, and what is known of what a call is given.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from typing import TypeVar

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Site, Step
from shardfn._core.program import Node, Program

T = TypeVar("T")


def given_to(program: Program, call: Apply, known: Mapping[Ref, T]) -> dict[Ref, T]:
    """What is known of the inputs and imports of a call's body.

    Args:
      program: the body's program.
      call: runs it once.
      known: by version, where the call is.

    Returns:
      The same by version of the body.
    """
    inputs = (*map(Ref, program.inputs), *call.bodies[0].imports)
    operands = zip(inputs, (*call.operands, *call.imports), strict=True)
    return {i: known[ref] for i, ref in operands if ref and ref in known}


def literals_of(program: Program, call: Apply) -> set[Ref]:
    """The inputs of a call's body that are literals: known, wherever the call is."""
    operands = zip(program.inputs, call.operands, strict=True)
    return {Ref(value) for value, ref in operands if ref is None}


def all_moves(body: BodyPlan) -> Iterator[Reshard]:
    """The moves of a plan and of the plans in it."""
    for step in body.steps:
        if isinstance(step, Reshard):
            yield step
        else:
            for inner in step.bodies:
                yield from all_moves(inner)


def inside(
    program: Program, body: BodyPlan, rewrite: Callable[[Program, BodyPlan], BodyPlan]
) -> BodyPlan:
    """`body` with every plan in it rewritten; its own steps stay as they are.

    Args:
      program: the program.
      body: its plan.
      rewrite: makes a plan of a program's plan; it goes deeper itself.

    Returns:
      The plan.
    """
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Apply) and step.bodies:
            inner = zip(program.nodes[step.node].bodies, step.bodies, strict=True)
            step = replace(step, bodies=tuple(rewrite(p, b) for p, b in inner))
        steps.append(step)
    return replace(body, steps=tuple(steps))


def with_nodes(
    program: Program, body: BodyPlan, rewrite: Callable[[Node, Apply], Apply]
) -> BodyPlan:
    """`body` with what runs its nodes rewritten.

    Args:
      program: the program.
      body: its plan.
      rewrite: makes the plan of a node of it.

    Returns:
      The plan.
    """
    return replace(
        body,
        steps=tuple(
            rewrite(program.nodes[step.node], step) if isinstance(step, Apply) else step
            for step in body.steps
        ),
    )


def rewritten(
    body: BodyPlan,
    sites: Set[Site],
    rewrite: Callable[[Reshard], Reshard],
    within: tuple[int, ...] = (),
) -> BodyPlan:
    """`body` with the moves at some sites rewritten, also those in what it calls.

    Args:
      body: a plan.
      sites: where the moves are, from `body` inwards.
      rewrite: from a move to the one in its place.
      within: the calls that this body is in, where the function calls itself.

    Returns:
      The plan.
    """
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Reshard) and (within, step.result) in sites:
            step = rewrite(step)
        elif isinstance(step, Apply) and len(step.bodies) == 1:
            inner = rewritten(step.bodies[0], sites, rewrite, (*within, step.node))
            step = replace(step, bodies=(inner,))
        steps.append(step)
    return replace(body, steps=tuple(steps))
