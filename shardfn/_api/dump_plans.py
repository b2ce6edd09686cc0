"""Plans written to files, one after each stage of planning.

In: a folder, named by the environment, and plans as stages make them. Out: files that
show each plan step by step, and what its stage changed.
"""

import difflib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program
from shardfn._core.sharding import Axes
from shardfn._core.stages import Observer, unobserved
from shardfn.analysis._plan_text import plan_lines

FOLDER = "SHARDFN_DUMP_TO"
"""The variable that names the folder."""

_counts: Callable[[], int] = itertools.count().__next__


def dumping(axes: Axes) -> Observer:
    """What writes the stages of one plan, if the environment asks for it.

    Args:
      axes: the mesh axes.

    Returns:
      A function of a stage's name and what it made. Writes `2-prefetch.txt` and the
      like in a folder of the plan's own: every step of the plan; before those that the
      stage added stands `+`, before those that it removed `-`.
    """
    if not os.environ.get(FOLDER):
        return unobserved
    folder = Path(os.environ[FOLDER]) / f"{step_name()}-{_counts()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShardingError(
            f"{FOLDER} is '{os.environ[FOLDER]}', where plans cannot be written: "
            f"{error.strerror}.\n{called()}"
            "Name a folder that can be written to, or one that is not there yet; or "
            f"unset {FOLDER}."
        ) from None
    before: list[str] = []
    stages = itertools.count()

    def observe(stage: str, program: Program, body: BodyPlan) -> None:
        lines = list(plan_lines(program, body, axes))
        number = next(stages)
        text = changes(before if number else lines, lines)
        path = folder / f"{number:02}-{stage}.txt"
        path.write_text(f"{step_name()} after {stage}: {text}\n", encoding="utf-8")
        before[:] = lines

    return observe


def changes(before: list[str], after: list[str]) -> str:
    """All lines, those that are new or gone marked, below how many these are."""
    shown: list[str] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if kind == "equal":
            shown += (f"  {line}" for line in after[c:d])
        else:
            shown += (f"- {line}" for line in before[a:b])
            shown += (f"+ {line}" for line in after[c:d])
    new, gone = (sum(line[0] == mark for line in shown) for mark in "+-")
    return "\n".join([f"{new} lines added, {gone} removed", "", *shown])
