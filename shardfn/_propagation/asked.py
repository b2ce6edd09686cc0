"""What is asked of the values that a program returns.

In: the shardings that results must have, and what their consumers prefer. Out: `Asked`,
from which the backward half of propagation starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardfn._core.program import Program
from shardfn._core.sharding import Axes, Sharding, Split, Unreduced
from shardfn._propagation.preferences import Preferences, either

ValueAxis = tuple[int, int]
"""A value and a mesh axis."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of what a program returns.

    Attributes:
      preferences: per value, what is preferred.
      blocked: values that are not returned as terms of a sum, per mesh axis.
    """

    preferences: Mapping[int, Preferences]
    blocked: frozenset[ValueAxis]

    @classmethod
    def of(
        cls,
        program: Program,
        required: Sequence[Sharding | None],
        preferences: Sequence[Preferences],
        may_stay_unreduced: Sequence[frozenset[int]],
        axes: Axes,
    ) -> "Asked":
        """Arguments as of `propagate.Solver.solve`."""
        asked: dict[int, Preferences] = {}
        blocked: set[ValueAxis] = set()
        outputs = zip(
            program.outputs, required, preferences, may_stay_unreduced, strict=True
        )
        for atom, fixed, opinions, stays in outputs:
            if not isinstance(atom, int):
                continue
            states = fixed if fixed is not None else axes.replicated
            given = tuple(
                frozenset({s}) if isinstance(s, Split) else each
                for s, each in zip(states, opinions, strict=True)
            )
            asked[atom] = either(asked.get(atom, given), given)
            for axis, state in enumerate(states):
                unreduced = fixed is None or isinstance(state, Unreduced)
                if not (axis in stays and unreduced):
                    blocked.add((atom, axis))
        return cls(asked, frozenset(blocked))
