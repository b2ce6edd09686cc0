"""An option that may make a step faster, or smaller, before it is tried.

In: nothing. Out: `Advice`, a frozen value, which reports print and tuning compiles.
"""

from dataclasses import dataclass
from typing import Any

from shardfn.analysis._text import seconds_text, size_text


@dataclass(frozen=True, slots=True)
class Advice:
    """One change of a step's options.

    Attributes:
      title: what it does, in a few words.
      options: names and values as `fully_shard` takes them.
      saves: seconds of a step that it may save at most.
      takes: bytes of memory on each device that it takes at most; fewer than zero if it
        frees them.
      why: what the figures of the step say for it.
      mesh: sizes of the mesh that it needs, of the axes in `options`; empty for any.
    """

    title: str
    options: tuple[tuple[str, Any], ...]
    saves: float
    takes: int
    why: str
    mesh: tuple[int, ...] = ()

    @property
    def asked(self) -> str:
        """The options as users write them."""
        texts = ", ".join(f"{name}={value!r}" for name, value in self.options)
        if not self.mesh:
            return texts
        names = dict(self.options)["axis"]
        return f"{texts} and jax.make_mesh({self.mesh}, {names!r})"

    def text(self, step_seconds: float) -> str:
        """One line for a report on a step that takes so long."""
        parts = []
        if self.saves:
            of = f"of {seconds_text(step_seconds)}"
            parts.append(f"saves at most {seconds_text(self.saves)} {of}")
        if self.takes:
            verb = "takes" if self.takes > 0 else "frees"
            parts.append(f"{verb} at most {size_text(abs(self.takes))}")
        return f"{self.asked} {', '.join(parts)}: {self.why}"
