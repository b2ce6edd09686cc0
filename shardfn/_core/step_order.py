"""What follows from the order of a plan's steps.

In: steps in the order in which they run. Out: which of them are one collective, what
each makes, and how long each version is needed.
"""

from collections.abc import Sequence

from shardfn._core.plan import Apply, BlockLoop, HostStep, Ref, Reshard, Step, reads
from shardfn._core.program import Program


def together(steps: Sequence[Step | HostStep], index: int) -> tuple[Reshard, ...]:
    """The moves that are one with the move at `index`, the first of them; none if an
    earlier one is the first."""
    first = steps[index]
    assert isinstance(first, Reshard)
    if first.together is None:
        return (first,)
    found = [first]
    for step in steps[index + 1 :]:
        if not isinstance(step, Reshard) or step.together != first.result:
            break
        found.append(step)
    return tuple(found) if first.together == first.result else ()


def last_uses(
    steps: Sequence[Step | HostStep], leaving: Sequence[Ref | None]
) -> dict[int, list[Ref]]:
    """Per step, the versions that nothing after it reads, and that do not leave."""
    last: dict[Ref, int] = {}
    for index, step in enumerate(steps):
        last.update(dict.fromkeys(reads(step), index))
    out, stays = dict[int, list[Ref]](), frozenset(leaving)
    for ref, index in last.items():
        if ref not in stays:
            out.setdefault(index, []).append(ref)
    return out


def made_by(program: Program, step: Step | HostStep) -> tuple[Ref, ...]:
    """The versions that a step makes."""
    if isinstance(step, Apply):
        return (*map(Ref, program.nodes[step.node].outputs), *step.exports)
    if isinstance(step, Reshard):
        return step.makes
    return step.made if isinstance(step, BlockLoop) else (step.result,)
