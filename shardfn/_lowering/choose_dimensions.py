"""Which dimensions leaves of the state are best stored on, by their use.

In: a step that can be planned with its state stored in one way or another. Out: the
dimensions with which it sends least. Only leaves are moved that something smaller
meets, group by group of alike ones, and what is updated with them; of two ways that
send as much, the one in which they are stored now.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardfn._core.limits import (
    DIMENSION_SWEEPS,
    STATIONARY_BYTES,
    STATIONARY_GROUPS,
    STATIONARY_SHARE,
)
from shardfn._core.sent_bytes import Made, Sent, sent
from shardfn._core.sharding import Sharding, Split, on_axis
from shardfn._lowering.choose_stationary import with_sums
from shardfn._lowering.leaf_uses import leaves_met, updated_together, uses_of
from shardfn._lowering.plan_jaxpr import Planner
from shardfn.analysis._text import size_text

Dimensions = Mapping[str, int]
"""By the names of leaves, the dimension that is split over the stored axis."""


@dataclass(frozen=True, slots=True)
class StoredByUse:
    """The dimensions on which leaves are best stored.

    Attributes:
      dimensions: by the name of each leaf that is best stored otherwise than now; empty
        if no fifth of what is sent is saved.
      now: what each device sends per step as leaves are stored now.
      then: what it sends if they are stored so.
    """

    dimensions: Dimensions
    now: Sent
    then: Sent

    @property
    def text(self) -> str:
        """What is sent then, and now."""
        sends = [
            f"{size_text(x.bytes)} in {x.collectives} collectives"
            for x in (self.then, self.now)
        ]
        return f"{sends[0]} instead of {sends[1]}"


def choose_dimensions(
    planner: Planner, made: Made, fixed: frozenset[str]
) -> StoredByUse:
    """The dimensions with which a step sends least.

    Args:
      planner: of the step, its state stored as it is now.
      made: the step's plan.
      fixed: leaves that stay as they are.

    Returns:
      The dimensions, and what they save.
    """
    now = sent(*made, planner.axes)
    search = _Search.of(planner, fixed)
    found = search.best()
    if not found:
        return StoredByUse({}, now, now)
    _, best, _ = search.stored(found).choose()
    then = sent(*best, planner.axes)
    worth = max(STATIONARY_BYTES, STATIONARY_SHARE * now.bytes)
    if now.price - then.price < worth:
        return StoredByUse({}, now, now)
    return StoredByUse(dict(sorted(found.items())), now, then)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for dimensions.

    Attributes:
      planner: of the step, as it is stored now.
      groups: leaves that are moved together, with what is updated with them.
      stays: all of them.
      tried: what is sent, by dimensions.
    """

    planner: Planner
    groups: tuple[frozenset[str], ...]
    stays: frozenset[str]
    tried: dict[tuple[tuple[str, int], ...], Sent] = field(default_factory=dict)

    @classmethod
    def of(cls, planner: Planner, fixed: frozenset[str]) -> "_Search":
        """Of the leaves that may stay, and that something smaller meets."""
        may = planner.asked("auto") | planner.asked(True)
        program, body = planner.plan(frozenset())
        gathered: dict[str, tuple[int, float]] = {}
        for use in uses_of(program, body, planner.axes):
            for leaf in may.intersection(use.leaf):
                size, least = gathered.get(leaf, (0, 0.0))
                gathered[leaf] = (
                    size + use.times * use.gathered,
                    least + (use.times * use.least),
                )
        small = {k for k, (size, least) in gathered.items() if least < size}
        met = may.intersection(leaves_met(program, body)) - gathered.keys()
        shapes = _shapes(planner)
        alike: dict[object, set[str]] = {}
        together = updated_together(program)
        uses = dict.fromkeys(
            (shapes[x], gathered.get(x), together.get(x, frozenset({x})))
            for x in sorted((small | met) - fixed)
        )
        for shape, use, linked in uses:
            same = {x for x in linked & may if shapes[x] == shape}
            alike.setdefault((shape, use), set()).update(same - fixed)
        groups = sorted(
            map(frozenset, alike.values()),
            key=lambda names: (-sum(math.prod(shapes[x]) for x in names), min(names)),
        )
        kept = tuple(groups[:STATIONARY_GROUPS])
        return cls(planner, kept, frozenset().union(*kept))

    def best(self) -> Dimensions:
        """The dimensions with which least is sent while all these leaves stay."""
        found: dict[str, int] = {}
        for _ in range(DIMENSION_SWEEPS if self.groups else 0):
            before = dict(found)
            for moves in (self.alike(), *map(self.moved, self.groups)):
                for move in moves:
                    options = found, {**found, **move}
                    found = min(options, key=lambda dims: self.sent(dims).price)
            if found == before:
                break
        return self.changed(found)

    def changed(self, dims: Dimensions) -> dict[str, int]:
        """Those of the dimensions that leaves are not stored on now."""
        now = self.now()
        return {name: dim for name, dim in dims.items() if now[name] != dim}

    def alike(self) -> Iterator[dict[str, int]]:
        """All groups on a dimension of one size, such as heads, or an MLP's units: what
        meets one of them may then meet the others."""
        each = [move for group in self.groups for move in self.moved(group)]
        shapes = _shapes(self.planner)
        sizes = [
            shapes[name][dim] for move in each for name, dim in [min(move.items())]
        ]
        for size in dict.fromkeys(s for s in sizes if sizes.count(s) > 1):
            joined: dict[str, int] = {}
            for move, found in zip(each, sizes, strict=True):
                joined |= move if found == size else {}
            yield joined

    def moved(self, group: frozenset[str]) -> Iterator[dict[str, int]]:
        """A group on each dimension that can be split evenly and is not split yet."""
        axes, now = self.planner.axes, self.now()
        name = min(group)
        shape = _shapes(self.planner)[name]
        taken = {
            split.dim
            for a, split in enumerate(_shardings(self.planner)[name])
            if isinstance(split, Split) and a != axes.stored
        }
        count = axes.sizes[axes.stored]
        for dim, size in enumerate(shape):
            if (
                size
                and size % count == 0
                and dim not in taken
                and now[name] is not None
            ):
                yield dict.fromkeys(sorted(group), dim)

    def now(self) -> dict[str, int | None]:
        """The dimension of each leaf that is split now."""
        axis = self.planner.axes.stored
        states = {k: each[axis] for k, each in _shardings(self.planner).items()}
        return {k: s.dim if isinstance(s, Split) else None for k, s in states.items()}

    def sent(self, dims: Dimensions) -> Sent:
        """What is sent if leaves are stored so, and all of them stay."""
        dims = self.changed(dims)
        key = tuple(sorted(dims.items()))
        if key not in self.tried:
            plan = self.stored(dims).plan
            made, _ = with_sums(self.stays, self.planner.axes, plan)
            self.tried[key] = sent(*made, self.planner.axes)
        return self.tried[key]

    def stored(self, dims: Dimensions) -> Planner:
        """The planner of the step with leaves stored so."""
        planner, axes = self.planner, self.planner.axes
        inputs, required = list(planner.inputs), list(planner.required)
        for i, value in enumerate(planner.program.inputs):
            names = [n for n in planner.program.leaf(value) if n in dims]
            if names and isinstance(inputs[i][axes.stored], Split):
                split = Split(dims[names[0]], stored=True)
                moved = on_axis(inputs[i], axes.stored, split)
                if i < len(required) and required[i] == inputs[i]:
                    required[i] = moved
                inputs[i] = moved
        return replace(planner, inputs=inputs, required=required)


def _shardings(planner: Planner) -> dict[str, Sharding]:
    """How each leaf is stored."""
    pairs = zip(planner.program.inputs, planner.inputs, strict=True)
    return {name: s for value, s in pairs for name in planner.program.leaf(value)}


def _shapes(planner: Planner) -> dict[str, tuple[int, ...]]:
    program = planner.program
    return {
        name: tuple(program.avals[value].shape)
        for value in program.inputs
        for name in program.leaf(value)
    }
