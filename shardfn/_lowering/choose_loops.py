"""How much of what their iterations share loops hold whole, if that is not small.

In: a plan in which loops gather weights and scatter sums in every iteration, and a
function that plans with more allowed. Out: the plan in which a device has a little more
at once, and sends much less: weights of a recurrent network, which every time step
uses, or of an MLP that goes over parts of the tokens. Microbatches of a large model
gather its weights again, as all of them together would not be a little.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardfn._core.limits import (
    LOOP_BYTES,
    LOOP_LIVE,
    LOOP_MOST,
    LOOP_SAVED,
    LOOP_SUMS,
    LOOP_UNKNOWN,
    LOOP_WORTH,
)
from shardfn._core.plan import BodyPlan, Reshard
from shardfn._core.sent_bytes import Made, Sent, sent
from shardfn._core.sharding import Axes
from shardfn._lowering.live_bytes import live_bytes
from shardfn._schedule.loop_invariants import LARGE, SMALL, STACKS
from shardfn.analysis._text import size_text


@dataclass(frozen=True, slots=True)
class LoopsChoice:
    """What was found of loops that share more than is small.

    Attributes:
      allowed: bytes that loops may hold whole; 0 for what they may in any plan.
      before: what each device sends per step if they hold no more than that.
      after: what it sends if they do.
      more: bytes that it then has more at once.
      in_while: whether that depends on iterations that nobody knows.
    """

    allowed: int = 0
    before: Sent = Sent()
    after: Sent = Sent()
    more: int = 0
    in_while: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's line about them."""
        if not self.allowed:
            return ()
        before, after = (size_text(x.bytes) for x in (self.before, self.after))
        allowed, more = size_text(self.allowed), size_text(max(self.more, 0))
        why = f"at most {size_text(LOOP_LIVE)} (limits.LOOP_LIVE)"
        if self.more > LOOP_LIVE:
            most = f"at most {size_text(LOOP_MOST)} (limits.LOOP_MOST)"
            why = f"each byte of which saves {LOOP_WORTH} (limits.LOOP_WORTH), {most}"
        return (
            f"loops hold what their iterations share, up to {allowed} of weights or "
            f"sums: {after} sent per step instead of {before} (limits.LOOP_SAVED), and "
            f"{more} more at once, {why}" + self.assumed,
        )

    @property
    def assumed(self) -> str:
        """What was assumed of while loops, if there are any."""
        if not self.in_while:
            return ""
        each = f"{LOOP_UNKNOWN} iterations of each while loop"
        return f"; for {each}, which nobody knows (limits.LOOP_UNKNOWN)"


def choose_loops(
    made: Made, axes: Axes, plan: Callable[[int], Made]
) -> tuple[Made, LoopsChoice]:
    """The plan in which loops hold more, if that is worth it.

    Args:
      made: the program and its plan so far.
      axes: the mesh axes.
      plan: plans it with so many bytes that loops may hold.

    Returns:
      The plan, and what was found.
    """
    sizes = sorted(set(_shared(made[1])))
    if not sizes:
        return made, LoopsChoice()
    first, live = _sent(made, axes), live_bytes(*made, axes)
    best, choice = made, LoopsChoice(after=first)
    for size in sizes:
        allowed = LOOP_SUMS * size
        if size > LOOP_MOST:
            break
        if allowed <= LOOP_BYTES:
            continue
        tried = plan(allowed)
        more, after = live_bytes(*tried, axes) - live, _sent(tried, axes)
        saves = first.bytes - after.bytes
        if more > (LOOP_MOST if saves >= LOOP_WORTH * more else LOOP_LIVE):
            break
        if after.price <= (1 - LOOP_SAVED) * choice.after.price:
            in_while = sent(*made, axes) != first
            best, choice = tried, LoopsChoice(allowed, first, after, more, in_while)
    return best, choice


def _sent(made: Made, axes: Axes) -> Sent:
    return sent(*made, axes, unknown=LOOP_UNKNOWN)


def _shared(body: BodyPlan) -> Iterator[int]:
    """Bytes of the weights, but for the largest, that the iterations of each loop
    share, and of those in stacks that loops inside go through."""
    for step in body.steps:
        if isinstance(step, Reshard):
            for note in step.notes:
                if note.text in (SMALL, LARGE):
                    yield note.sizes[1]
                elif note.text == STACKS:
                    yield note.sizes[0]
        else:
            for inner in step.bodies:
                yield from _shared(inner)
