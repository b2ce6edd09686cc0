"""Says which sums of a loop over layers end in the iteration that they are made in.

In: a plan. Out: the plan, in which a compiler may not delay sums that end before their
iteration does, because enough is computed behind them. XLA for GPUs delays every
reduce-scatter whose result a loop stacks. This hides the last ones of an iteration, and
costs memory, copies and compile time for the first ones, which are hidden anyway where
its scheduler knows how long they take. Where an iteration computes much more than it
sends, all of its sums end in it, one after the other. So do those of one that computes
about as long as it sends, of which `order_gathers` orders the gathers. Between hosts,
sums that go on over other mesh axes, such as replicas, are left to the compiler: it
hides their reduce-scatters, and delays what is left, if nothing waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from shardfn._core.limits import BALANCED_FLOPS, SUMS_FLOPS, SUMS_PART, SUMS_TIME
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Site
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Axes
from shardfn._schedule.balanced_loops import is_balanced, scattered_sums
from shardfn._schedule.bodies import inside, rewritten, with_nodes
from shardfn._schedule.chain_reduce_scatters import chain_reduce_scatters
from shardfn._schedule.delayed_sums import StackedSum, are_left_to_compiler
from shardfn._schedule.loop_events import events

ENDS = Note(
    "undelayed_sums",
    "ends in its iteration, of which enough is computed behind it "
    f"(limits.SUMS_TIME: {SUMS_TIME})",
)


def undelay_sums(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Marks the sums of loops that the compiler may not delay.

    Args:
      program: the program.
      body: its plan.
      axes: the mesh axes.

    Returns:
      The plan; the same where the compiler delays nothing, or does not know how long
      transfers take, as it may not hide what ends in its iteration then: on A100s
      GPT-175B takes 2.5% longer.
    """
    if not axes.times_transfers:
        return body
    body = inside(program, body, lambda p, b: undelay_sums(p, b, axes))
    return with_nodes(program, body, lambda node, loop: _undelayed(node, loop, axes))


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum, or several that are one collective.

    Attributes:
      flops: what a device computes of its iteration in front of it.
      size: bytes of a device's terms.
      part: bytes of the sum that stay on a device.
      sites: where the sums are.
    """

    flops: Fraction
    size: int
    part: int
    sites: tuple[Site, ...]


def _undelayed(node: Node, loop: Apply, axes: Axes) -> Apply:
    """A node, in whose iterations those sums end that can."""
    scattered = scattered_sums(node, loop)
    if not scattered or are_left_to_compiler(scattered.values(), axes):
        return loop
    (program,), (body,) = node.bodies, loop.bodies
    total, sums = _in_order(program, body, axes, scattered)
    size = sum(each.size for each in sums)
    parts = sum(each.size for each in sums if each.part >= SUMS_PART)
    computes_more = total >= SUMS_FLOPS * size and 2 * parts >= size
    if not computes_more and not is_balanced(node, loop, axes, bool(loop.ahead)):
        body = _marked(body, _ending(total, sums, size), ENDS)
        return replace(loop, bodies=(body,))
    body = _marked(body, set(scattered), _hidden(int(total / size), computes_more))
    if computes_more:
        body = chain_reduce_scatters(program, body)
    return replace(loop, bodies=(body,))


def _hidden(flops: int, computes_more: bool) -> Note:
    least = f"(limits.SUMS_FLOPS: {SUMS_FLOPS:,} or more)"
    if not computes_more:
        least = f"(limits.BALANCED_FLOPS: {BALANCED_FLOPS:,} or more)"
    text = (
        f"ends in its iteration, which computes {flops:,} FLOPs for each byte of its "
        f"sums {least}, most of which are of {{}} or more per device "
        "(limits.SUMS_PART)"
    )
    return Note("undelayed_sums", text, (SUMS_PART,))


def _ending(total: Fraction, sums: Sequence[_Sum], size: int) -> set[Site]:
    """The sums of an iteration that end before it does, if they are sent one after the
    other, from when they are made, and all take `SUMS_TIME` of its matrix products."""
    ends, found = Fraction(), set[Site]()
    for each in sums:
        made = each.flops / total if total else Fraction(1)
        ends = max(ends, made) + Fraction(SUMS_TIME * each.size) / size
        if ends > 1:
            break
        found.update(each.sites)
    return found


def _in_order(
    program: Program, body: BodyPlan, axes: Axes, scattered: dict[Site, StackedSum]
) -> tuple[Fraction, list[_Sum]]:
    """What an iteration computes, and its sums in their order."""
    total, sums = Fraction(), list[_Sum]()
    joined: dict[tuple[tuple[int, ...], Ref | None], int] = {}
    for within, flops, step in events(program, body, axes, ()):
        total += flops
        if step is None or (within, step.result) not in scattered:
            continue
        site = within, step.result
        size, part = scattered[site].term_bytes(axes), scattered[site].part_bytes(axes)
        first = joined.setdefault((within, step.together or step.result), len(sums))
        if first == len(sums):
            sums.append(_Sum(total, size, part, (site,)))
        else:
            whole = sums[first]
            sums[first] = _Sum(
                whole.flops, whole.size + size, whole.part + part, (*whole.sites, site)
            )
    return total, sums


def _marked(body: BodyPlan, ending: set[Site], note: Note) -> BodyPlan:
    """A body in which sums that end, and those of calls in it, may not be delayed."""

    def marked(step: Reshard) -> Reshard:
        return replace(step, undelayed=True, notes=noted(step, note))

    return rewritten(body, ending, marked)
