"""How one node of a program runs, as propagation decides it.

In: nothing. Out: `Decision`, a frozen value from which moves are inserted.
"""

from dataclasses import dataclass, field

from shardfn._core.plan import BodyPlan
from shardfn._core.reasons import Note
from shardfn._core.sharding import (
    Sharding,
)
from shardfn._propagation.preferences import Preferences


@dataclass(frozen=True, slots=True)
class Decision:
    """How one node runs.

    Attributes:
      operands: shardings it needs its operands in.
      made: shardings of the results as the op makes them.
      results: the same after unreduced results that must not stay so are reduced.
      parts: `(factor, mesh axis index)` for every factor that is split.
      bodies: plans of the bodies of control flow.
      preferences: what control flow prefers its operands in; empty for an op.
      fallback: whether operands are gathered because there is no rule.
      notes: the thresholds that decided, for people; two decisions that differ in
        nothing else are equal.
    """

    operands: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    parts: tuple[tuple[str, int], ...] = ()
    bodies: tuple[BodyPlan, ...] = ()
    preferences: tuple[Preferences, ...] = ()
    fallback: bool = False
    notes: tuple[Note, ...] = field(default=(), compare=False)
