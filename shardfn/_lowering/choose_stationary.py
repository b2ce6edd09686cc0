"""Which leaves of the state stay where they are: those around which less moves.

In: a plan that gathers them, and a function that plans with some of them stationary.
Out: the plan that sends least, judged as a whole: forward, backward and update, times
the iterations of loops. The cost model is that of Pope et al., Efficiently Scaling
Transformer Inference, arXiv:2211.05102, section 3. A step in which what leaves meet is
not much smaller than they are, as in most training, is not planned twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardfn._core.errors import listed
from shardfn._core.limits import (
    LATENCY_BYTES,
    STATIONARY_BYTES,
    STATIONARY_GROUPS,
    STATIONARY_LIVE,
    STATIONARY_PART,
    STATIONARY_SHARE,
)
from shardfn._core.sent_bytes import Made, Sent, sent
from shardfn._core.sharding import Axes
from shardfn._core.shown_limits import SHOWN_LEAVES
from shardfn._lowering.leaf_uses import (
    Use,
    exchanged_bytes,
    leaves_met,
    scatters_sums,
    updated_together,
    uses_of,
)
from shardfn._lowering.live_bytes import live_bytes
from shardfn.analysis._text import size_text

COUNTS = f"a collective counts as {size_text(LATENCY_BYTES)} (limits.LATENCY_BYTES)"
WHOLE = (
    "small sums behind stationary leaves are all-reduced: what is made of scattered "
    f"ones is gathered again, and {COUNTS}"
)
UNABLE = "it is stored padded or flattened, and of such leaves only rows stay"


NONE = Sent()


@dataclass(frozen=True, slots=True)
class StationaryChoice:
    """What was found of the leaves that may stay where they are.

    Attributes:
      stays: the names of those that do.
      gathers: of those that might have, but are gathered.
      gathering: what each device sends per step if all are gathered.
      staying: what it sends in the best plan in which some stay; nothing if no other
        plan was made.
      others: the names of leaves that are updated with those, and that no plan gathers.
      is_bound: whether `staying` is a bound, and no plan has been made.
      unable: the names of those that are asked to stay, and are gathered even so.
      more: bytes of values at once that this plan takes more than one that gathers, if
        it takes too many.
      for_memory: the names of those that stay in a plan that sends less, and takes too
        many, and how many that are.
      whole: whether small sums behind those that stay are all-reduced.
    """

    stays: frozenset[str] = frozenset()
    gathers: frozenset[str] = frozenset()
    gathering: Sent = NONE
    staying: Sent = NONE
    others: frozenset[str] = frozenset()
    is_bound: bool = False
    more: int = 0
    for_memory: tuple[frozenset[str], int] = frozenset(), 0
    unable: frozenset[str] = frozenset()
    whole: bool = False

    @property
    def all(self) -> frozenset[str]:
        """The leaves that are planned as stationary."""
        return self.stays | self.others if self.stays else frozenset()

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's lines about the leaves that stay, or would but for memory."""
        lines = []
        if self.stays - self.unable:
            names = listed(sorted(self.stays - self.unable), SHOWN_LEAVES)
            sent = f": {self.sent}" if self.is_chosen else ""
            lines.append(f"stationary, so that what meets them moves: {names}{sent}")
        if self.whole:
            lines.append(WHOLE)
        if self.more:
            names = listed(sorted(self.gathers), SHOWN_LEAVES)
            lines.append(f"not stationary, for memory: {names}: {self.too_much}")
        return tuple(lines)

    @property
    def is_chosen(self) -> bool:
        return self.staying != NONE and not self.more

    @property
    def sent(self) -> str:
        staying, gathering = (
            size_text(x.bytes) for x in (self.staying, self.gathering)
        )
        if self.is_bound:
            return f"at least {staying} sent per step instead of {gathering}"
        return (
            f"{staying} sent per step, in {self.staying.collectives} collectives, "
            f"instead of {gathering} in {self.gathering.collectives}"
        )

    @property
    def too_much(self) -> str:
        return f"{self.sent}, but {_too_many(self.more)}"

    def why(self, leaf: str) -> str:
        """What to say of a leaf; "" if it was not considered."""
        if leaf in self.unable:
            return f"not stationary: {UNABLE}"
        if leaf in self.stays:
            return f"stationary: {self.sent if self.is_chosen else 'asked for'}"
        others, more = self.for_memory
        if leaf in others:
            less = "if it stayed, too, less would be sent"
            return f"not stationary: {less}, but {_too_many(more)}"
        if leaf not in self.gathers:
            return ""
        if self.more:
            return f"not stationary: {self.too_much}"
        if self.stays and self.is_chosen:
            return "not stationary: if it stayed, too, no less would be sent"
        saved = self.gathering.price - self.staying.price
        if saved <= 0:
            fewer = self.staying.bytes < self.gathering.bytes
            return f"not stationary: {self.sent}{f', and {COUNTS}' if fewer else ''}"
        if saved < STATIONARY_BYTES:
            least = f"{size_text(STATIONARY_BYTES)} (limits.STATIONARY_BYTES)"
        else:
            least = f"{STATIONARY_SHARE:.0%} (limits.STATIONARY_SHARE)"
        return f"not stationary: {self.sent}, which saves less than {least}"


def _too_many(more: int) -> str:
    most = f"{size_text(STATIONARY_LIVE)} (limits.STATIONARY_LIVE)"
    return f"{size_text(more)} more of values at once on each device, more than {most}"


Trial = Callable[..., Made]
"""Plans with these leaves staying and, if so asked, small sums behind them whole."""


def choose_stationary(
    made: Made,
    asked: frozenset[str],
    may_stay: frozenset[str],
    axes: Axes,
    plan: Trial,
) -> tuple[Made, StationaryChoice]:
    """The plan that sends least.

    Args:
      made: the plan that gathers all leaves.
      asked: the leaves that are asked to stay, by name.
      may_stay: those that may.
      axes: the mesh axes.
      plan: plans with these leaves staying and, if the second argument is true, small
        sums behind them all-reduced.

    Returns:
      The plan, and what was found.
    """
    program, _ = made
    gathered = {leaf for use in uses_of(*made, axes) for leaf in use.leaf}
    # What nothing gathers, such as moments, is not to move because of what stays.
    still = (asked | may_stay) - gathered
    if not (asked or still or may_stay):
        return made, StationaryChoice()

    together = updated_together(program)

    def updated(stays: frozenset[str]) -> frozenset[str]:
        met = {together.get(name, frozenset({name})) for name in stays}
        return still & frozenset().union(*met)

    whole = False
    if asked:
        made, whole = with_sums(asked | updated(asked), axes, plan)
    groups, most = _alike(uses_of(*made, axes), may_stay)
    met = (still & may_stay).intersection(leaves_met(*made))
    none = StationaryChoice(asked, others=updated(asked), whole=whole)
    if not groups and not met:
        return made, none
    gathering = sent(*made, axes)
    worth = max(STATIONARY_BYTES, STATIONARY_SHARE * gathering.bytes)
    if met and (exchanged := exchanged_bytes(*made, axes)) >= worth:
        groups, most = [*groups, met], most + exchanged
    if not groups:
        return made, none
    considered = frozenset().union(*groups)
    if most < worth:  # such as of a table that other leaves dwarf
        bytes_ = max(gathering.bytes - round(most), 0)
        least = Sent(bytes_, gathering.collectives)
        return made, replace(
            none, gathers=considered, gathering=gathering, staying=least, is_bound=True
        )
    live = live_bytes(*made, axes)
    stays, best, least, sums = considered, made, gathering, whole
    refused, seen, for_memory = none, None, (frozenset[str](), 0)
    trials = [(may_stay - still) | (met & considered), considered]
    trials += [considered - group for group in groups]
    for trial in dict.fromkeys(trials[: 2 + STATIONARY_GROUPS]):
        if not trial:
            continue
        named = trial | asked
        tried = plan(named | updated(named), whole)
        if trial == considered:
            tried, whole = with_sums(named | updated(named), axes, plan, tried)
        sends = sent(*tried, axes)
        seen = min(seen or sends, sends, key=lambda each: each.price)
        if sends.price >= least.price:
            continue
        more = live_bytes(*tried, axes) - live
        if more > STATIONARY_LIVE:
            if not refused.more or sends.price < refused.staying.price:
                refused = replace(none, gathers=considered, staying=sends, more=more)
                for_memory = trial, more
        else:
            stays, best, least, sums = trial, tried, sends, whole
    if gathering.price - least.price < max(worth, 1):
        if not refused.more:
            refused = replace(none, gathers=considered, staying=seen or gathering)
        return made, replace(refused, gathering=gathering)
    tried_sums = stays == considered
    stays |= asked
    others = updated(stays)
    if not (sums or tried_sums):
        best, sums = with_sums(stays | others, axes, plan, best)
        least = sent(*best, axes)
    if refused.staying.price >= least.price:
        for_memory = frozenset[str](), 0
    return best, StationaryChoice(
        stays,
        considered - stays,
        gathering,
        least,
        others,
        whole=sums,
        for_memory=for_memory,
    )


def with_sums(
    stays: frozenset[str], axes: Axes, plan: Trial, made: Made | None = None
) -> tuple[Made, bool]:
    """The plan with these leaves staying, and whether small sums behind them are
    all-reduced in it: that sends as much as to scatter them and to gather what is made
    of the parts, in half as many collectives."""
    made = made or plan(stays)
    if not scatters_sums(*made):
        return made, False
    tried = plan(stays, True)
    whole = sent(*tried, axes).price < sent(*made, axes).price
    more = live_bytes(*tried, axes) - live_bytes(*made, axes) if whole else 0
    return (tried, True) if whole and more <= STATIONARY_LIVE else (made, False)


def _alike(
    uses: Iterator[Use], may_stay: frozenset[str]
) -> tuple[list[frozenset[str]], float]:
    """The leaves for which less is moved if they stay, in groups of those for which as
    much is; and the most bytes that can be saved by them, if a gradient as large as
    each is summed besides."""
    gathered: dict[str, int] = {}
    moved: dict[str, float] = {}
    for use in uses:
        for leaf in may_stay.intersection(use.leaf):
            gathered[leaf] = gathered.get(leaf, 0) + use.times * use.gathered
            moved[leaf] = moved.get(leaf, 0) + use.times * use.moved
    groups: dict[tuple[float, float], set[str]] = {}
    most = 0.0
    for leaf, size in gathered.items():
        if moved[leaf] <= STATIONARY_PART * size:
            groups.setdefault((size, moved[leaf]), set()).add(leaf)
            most += 2 * size - moved[leaf]
    alike = [frozenset(group) for _, group in sorted(groups.items(), reverse=True)]
    return alike, most
