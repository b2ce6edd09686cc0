"""One node of control flow while it is decided, and what solving a body gives.

In: the node, how its operands are sharded, what is preferred of its results. Out: the
shardings in which operands can enter its bodies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardfn._core.control import Control
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note
from shardfn._core.sharding import (
    Axes,
    Sharding,
)
from shardfn._propagation.preferences import Preferences, reduced


@dataclass(frozen=True, slots=True)
class Solved:
    """A body's plan and what the body prefers its arguments in."""

    plan: BodyPlan
    preferences: tuple[Preferences, ...]


class Solve(Protocol):
    """Solves one body; see `propagate.Solver.solve`."""

    def __call__(
        self,
        program: Program,
        inputs: Sequence[Sharding],
        required: Sequence[Sharding | None],
        preferences: Sequence[Preferences],
        may_stay_unreduced: Sequence[frozenset[int]],
        shared: Sequence[int],
    ) -> Solved: ...


@dataclass(slots=True)
class FlowSite:
    """One control-flow node while it is decided.

    Attributes:
      node: the node.
      operand_avals: avals of its operands.
      result_avals: avals of its results.
      states: shardings of its operands now.
      preferences: those of its results' consumers.
      operand_preferences: those of its operands' consumers so far.
      may_stay_unreduced: per result, the mesh axes along which it may.
      shared: per operand, in how many iterations of loops around the node it is the
        same.
      axes: the mesh axes.
      small: values with fewer elements may stay unreduced across iterations.
      solve: solves a body.
      control: which sums of loops to leave unreduced until after them.
      whole: whether small sums behind stationary leaves are all-reduced.
    """

    node: Node
    operand_avals: Sequence[Any]
    result_avals: Sequence[Any]
    states: Sequence[Sharding]
    preferences: Sequence[Preferences]
    operand_preferences: Sequence[Preferences]
    may_stay_unreduced: Sequence[frozenset[int]]
    shared: Sequence[int]
    axes: Axes
    small: int
    solve: Solve
    control: Control
    whole: bool = False
    notes: list[Note] = field(default_factory=list)

    def entering(self, i: int) -> Sharding:
        """Operand `i` with unreduced terms summed, towards what is preferred."""
        return reduced(
            self.states[i],
            self.operand_preferences[i],
            self.operand_avals[i],
            self.axes,
        )

    def shared_in(self, at: int) -> tuple[int, ...]:
        """Per argument of body `at`, in how many iterations it is the same."""
        region, times = self.node.regions[at], self.node.times or 1
        return tuple(
            times * self.shared[operand] if k in region.constants else 1
            for k, operand in enumerate(region.operands)
        )

    @property
    def no_preferences(self) -> Preferences:
        return (frozenset(),) * len(self.axes.names)
