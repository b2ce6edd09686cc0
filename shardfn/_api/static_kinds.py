"""Calls that differ in leaves that are no arrays: each value is compiled for.

In: the arguments of calls, closed. Out: a warning, once, where there are many.
"""

import reprlib
from dataclasses import dataclass, field
from typing import Any

import jax

from shardfn._core.errors import StaticArgumentWarning, called, step_name, warn
from shardfn._core.limits import STATIC_KINDS
from shardfn._core.static_leaves import statics_of


@dataclass(slots=True)
class StaticKinds:
    """The static leaves of the calls of a step.

    Attributes:
      seen: structures of the arguments, each with its static leaves by path.
    """

    seen: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def check(self, closed: Any) -> None:
        """Warns, once, where the calls of a step have many static leaves."""
        form = jax.tree.structure(closed)
        if form in self.seen or len(self.seen) > STATIC_KINDS:
            return
        statics = statics_of(closed)
        last = next(reversed(self.seen.values()), {})
        self.seen[form] = statics
        if len(self.seen) <= STATIC_KINDS:
            return
        changed = (p for p, x in statics.items() if p in last and last[p] != x)
        path = next(changed, next(iter(statics)))
        name = path.partition("/")[2].partition("/")[2] or path
        warn(
            f"{step_name()} is compiled for each value of argument leaf '{name}', "
            f"which is no array, and this is value {len(self.seen)}: "
            f"{reprlib.repr(statics[path])}.\n"
            f"{called()}Leave it out of the batch, or pass an array.",
            StaticArgumentWarning,
        )
