"""How what a step returns becomes the arguments of the next one.

In: what the arguments of a step mean, and what it returned. Out: its states, the other
results, and the arguments of the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import SequenceKey

from shardfn._core.call_arguments import Path, StateArguments, part
from shardfn._core.new_leaves import new_leaves


@dataclass(frozen=True, slots=True)
class NextArguments:
    """What comes back where.

    Attributes:
      meaning: what the arguments are.
      names: what the step calls its state arguments.
    """

    meaning: StateArguments
    names: tuple[str, ...]

    def given(self, args: Sequence[Any]) -> Any:
        """The states among the arguments: one as it is, several by their names."""
        positions = self.meaning.arguments
        return self._together([args[i] for i in positions if isinstance(i, int)])

    def with_states(self, args: Sequence[Any], states: Any) -> list[Any]:
        """The arguments with these states, as `given` has them."""
        each = [states] if len(self.names) == 1 else [states[n] for n in self.names]
        positions = self.meaning.arguments
        new = dict(zip(positions, each, strict=True))
        return [new.get(i, x) for i, x in enumerate(args)]

    def states(self, out: Any) -> Any:
        """The new states among results."""
        return self._together([part(out, path) for path in self.meaning.places])

    @property
    def returned(self) -> tuple[str, ...] | None:
        """The names of the states that `states` has; None of one alone."""
        names = self.names[: len(self.meaning.places)]
        return (names or None) if len(self.names) > 1 else None

    def others(self, out: Any) -> Any:
        """The results that are no new states: one as it is."""
        count = len(self.meaning.places)
        if not count:
            return out
        if self.meaning.places == tuple((SequenceKey(i),) for i in range(count)):
            rest = list(out[count:])
            return rest[0] if len(rest) == 1 else rest
        leaves, tree = jax.tree.flatten(out)
        new = set(new_leaves(tree, self.meaning))
        return jax.tree.unflatten(
            tree, [None if i in new else x for i, x in enumerate(leaves)]
        )

    def after(self, args: Sequence[Any], out: Any) -> list[Any]:
        """The arguments of the next step: what comes back is put where it came from."""
        places = dict(zip(self.meaning.arguments, self.meaning.places, strict=False))
        back: dict[Any, Path] = {**places, **dict(self.meaning.caches)}
        return [part(out, back[i]) if i in back else x for i, x in enumerate(args)]

    def _together(self, states: Sequence[Any]) -> Any:
        if len(self.names) == len(states) == 1:
            return states[0]
        return dict(zip(self.names, states, strict=False))
