"""The sets of options that tuning has compiled, and the one that it chooses.

In: what each takes on the target. Out: `Tuning`, a frozen value that prints as a table,
writes itself as Python, and saves itself for `fully_shard(options=path)`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardfn._api.tuning.tuned_options import TunedOptions, write
from shardfn._core.tuning_limits import TUNED_SHARE
from shardfn.analysis._text import join_columns, seconds_text, size_text
from shardfn.analysis.advice import Advice
from shardfn.analysis.report import Report, compare


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set of options, compiled for the target.

    Attributes:
      title: what it changes, in words.
      options: names and values that `fully_shard` takes beside the step's own.
      seconds: predicted, of a step.
      peak: bytes of memory on each device.
      wire: bytes that each device sends.
      exposed: seconds that the device waits for transfers.
      as_planned: whether the compiled program moves what the plan says.
      error: why it could not be compiled, or "".
      compiling: seconds that planning and compiling took.
      report: all that is known of it; None if it could not be compiled.
    """

    title: str
    options: tuple[tuple[str, Any], ...]
    seconds: float = 0.0
    peak: int = 0
    wire: int = 0
    exposed: float = 0.0
    as_planned: bool = True
    error: str = ""
    compiling: float = field(default=0.0, compare=False)
    report: Report | None = field(default=None, compare=False, repr=False)

    def fits(self, memory: int) -> bool:
        """Whether it was compiled, and takes at most so many bytes."""
        return not self.error and self.peak <= memory


@dataclass(frozen=True, slots=True)
class Tuning:
    """What tuning found; see `print(tuning)`.

    Attributes:
      step: name of the plain step.
      target: the machine's name.
      memory: bytes that a step may take on each device.
      candidates: what was compiled, in that order; the step's own options first.
      untried: what might have helped, and was not compiled.
      tuned: what identifies the program, and the options chosen.
    """

    step: str
    target: str
    memory: int
    candidates: tuple[Candidate, ...]
    untried: tuple[Advice, ...]
    tuned: TunedOptions

    @property
    def chosen(self) -> Candidate:
        """The fastest that fits; where none does, the smallest."""
        return choose(self.candidates, self.memory)

    @property
    def options(self) -> Mapping[str, Any]:
        """What `fully_shard` is to be given beside the step's own options."""
        return dict(self.chosen.options)

    def python(self) -> str:
        """Lines to paste into a program."""
        lines = (f"    {name}={value!r},\n" for name, value in self.options.items())
        given = "".join(lines)
        return f"step = shardfn.fully_shard(\n    {self.step},\n    mesh,\n{given})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the options to a file that `fully_shard(options=path)` reads.

        Args:
          path: of the file; one that is there is replaced.

        Raises:
          ValueError: none of the candidates fits; nothing is written.
        """
        if not self.chosen.fits(self.memory):
            why = _praise(self.chosen, self)
            raise ValueError(f"'{os.fspath(path)}' is not written: {why}")
        write(Path(path), self.tuned)

    def html(self) -> str:
        """One page of all candidates: timelines, memory and bytes at one scale, and
        each of them whole; the chosen one first.

        Returns:
          HTML with its styles, script and data inside; write it to a file.
        """
        order = sorted(self.candidates, key=lambda c: c != self.chosen)
        return compare({c.title: c.report for c in order if c.report})

    def __str__(self) -> str:
        head = f"{self.step} on {self.target}, within {size_text(self.memory)}"
        names = ("", "options", "step", "peak", "sent", "exposed", "compiled in")
        rows = [self._row(c) for c in self.candidates]
        lines = [head, "", join_columns(names, rows, {2, 3, 4, 5, 6}), ""]
        lines += self._verdicts()
        if self.untried:
            lines.append("not tried:")
            first = self.candidates[0].seconds
            lines += [f"  {row.text(first)}" for row in self.untried]
        return "\n".join([*lines, "", self.python()])

    def _row(self, c: Candidate) -> list[str]:
        mark = "*" if c == self.chosen else ""
        if c.error:
            return [mark, c.title, "", "", "", "", f"{c.compiling:.0f} s"]
        figures = seconds_text(c.seconds), size_text(c.peak), size_text(c.wire)
        return [
            mark,
            c.title,
            *figures,
            seconds_text(c.exposed),
            f"{c.compiling:.0f} s",
        ]

    def _verdicts(self) -> list[str]:
        """Why each was or was not chosen."""
        best, lines = self.chosen, []
        for c in self.candidates:
            if c == best:
                lines.append(f"* {c.title}: {_praise(c, self)}")
            else:
                lines.append(f"  {c.title}: {_fault(c, self)}")
        if not self.candidates[0].as_planned:
            lines.append("The compiled programs are not as planned: see `plan`.")
        return lines


def choose(candidates: tuple[Candidate, ...], memory: int) -> Candidate:
    """The fastest that fits. Another than the first has to be faster by `TUNED_SHARE`,
    and as planned if that is. Where none fits, the smallest that was compiled."""
    sound = [c for c in candidates if not c.error and _is_sound(c, candidates[0])]
    able = [c for c in sound if c.fits(memory)]
    if not able:
        return min(sound, key=lambda c: c.peak)
    first, best = able[0], min(able, key=lambda c: (c.seconds, c.peak))
    enough = best.seconds <= first.seconds * (1 - TUNED_SHARE)
    return best if enough else first


def _is_sound(c: Candidate, first: Candidate) -> bool:
    """Whether the compiler did with the plan what it does with the step's own."""
    return c.as_planned or not first.as_planned


def _praise(c: Candidate, found: Tuning) -> str:
    first = found.candidates[0]
    if not c.fits(found.memory):
        arguments = first.report.memory.arguments if first.report else 0
        alone = f"state and batch alone take {size_text(arguments)} of each device"
        help = "Microbatches, jax.checkpoint, more devices or offload help"
        if arguments > found.memory:
            help = f"More devices or offload help: {alone}"
        return (
            f"nothing of what was tried fits {size_text(found.memory)}; this takes the "
            f"least of it. {help}; see Choosing options."
        )
    if c == first:
        return "nothing that was tried is faster by enough"
    if not first.fits(found.memory):
        return f"fits, where the step as it is takes {size_text(first.peak)}"
    return f"{seconds_text(first.seconds)} become {seconds_text(c.seconds)}"


def _fault(c: Candidate, found: Tuning) -> str:
    best = found.chosen
    if c.error:
        return c.error
    if not _is_sound(c, found.candidates[0]):
        return "the compiled program is not as planned"
    if c.peak > found.memory:
        return f"takes {size_text(c.peak)}"
    if c.seconds >= best.seconds:
        return f"slower by {seconds_text(c.seconds - best.seconds)}"
    gain = 1 - c.seconds / best.seconds
    return f"faster by {gain:.1%}, less than {TUNED_SHARE:.1%} that a prediction tells"
