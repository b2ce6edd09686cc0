"""What is known of a step that is planned, and what is found.

In: nothing. Out: `StepFacts` and `PlannedJaxpr`, frozen values: `plan_jaxpr` is given
the one, and makes the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardfn._core.automatic_axes import AutoSplit
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program
from shardfn._lowering.choose_generated import GeneratedChoice
from shardfn._lowering.choose_lookups import LookupsChoice
from shardfn._lowering.choose_loops import LoopsChoice
from shardfn._lowering.choose_narrow_gathers import NarrowChoice
from shardfn._lowering.choose_owners import OwnersChoice
from shardfn._lowering.choose_stationary import StationaryChoice
from shardfn._trace.passes import Argument


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of a training step beyond its jaxpr.

    Attributes:
      arguments: what its arguments are, in the jaxpr's order.
      arrange: makes its program one of the arguments and results that are asked for.
      auto_inputs: how automatic mesh axes split each argument of that.
      auto_outputs: how they split each result.
      program: the jaxpr as a program, if it was made before.
      on_host: arguments that arrive in the host's memory, and the results of the same
        positions, which leave there.
      aliased: results that are written over arguments, if those are donated.
    """

    arguments: Sequence[Argument]
    arrange: Callable[[Program], Program]
    auto_inputs: Sequence[AutoSplit]
    auto_outputs: Sequence[AutoSplit]
    program: Program | None = None
    on_host: frozenset[int] = frozenset()
    aliased: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PlannedJaxpr:
    """A planned function.

    Attributes:
      program: the function.
      body: its plan.
      base: the function, if lookups were exchanged without that.
      stationary: which leaves of the state stay where they are, and why.
      owners: which updates of whole matrices are divided among their owners, and why.
      generated: which rows that the step makes by itself are split, and why.
      loops: how much loops hold whole, and why.
      narrow: which weights are made of what is gathered, and why.
      lookups: which rows are asked of the devices that own them, and why.
    """

    program: Program
    body: BodyPlan
    base: Program
    stationary: StationaryChoice
    owners: OwnersChoice = OwnersChoice()
    generated: GeneratedChoice = GeneratedChoice()
    loops: LoopsChoice = LoopsChoice()
    narrow: NarrowChoice = NarrowChoice()
    lookups: LookupsChoice = LookupsChoice()

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's lines about these choices."""
        choices = (
            *(self.stationary, self.lookups, self.narrow, self.loops),
            *(self.generated, self.owners),
        )
        return tuple(note for choice in choices for note in choice.notes)
