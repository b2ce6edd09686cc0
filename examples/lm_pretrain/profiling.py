"""Traces of chosen steps, for XProf. In: their numbers. Out: files in `profile`.

What a plan's line became carries its name, `shardfn.` and numbers, and every operation
its phase, such as `shardfn_backward`.
"""

import contextlib
from pathlib import Path
from typing import Any

import jax

FOLDER = "profile"


class Profile:
    """Traces a run while it takes its chosen steps; a context manager."""

    def __init__(self, steps: range, run: Path):
        self.steps, self.folder = steps, run / FOLDER
        self.is_on = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.end()

    def step(self, number: int, state: Any) -> Any:
        """What to take a step in. The trace begins when the devices have nothing else
        to do, and its steps are whole."""
        if self.is_on and number not in self.steps:
            jax.block_until_ready(state)
            self.end()
        if number not in self.steps:
            return contextlib.nullcontext()
        if not self.is_on:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
            self.is_on = True
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def end(self) -> None:
        if self.is_on:
            self.is_on = False
            jax.profiler.stop_trace()
            print(f"traced: {self.folder}", flush=True)
