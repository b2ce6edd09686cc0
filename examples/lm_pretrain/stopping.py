"""SIGTERM and Ctrl-C: a run under way saves first, any other ends at once, with 0."""

import os
import signal
import sys
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """While open, the signals that ask a process to end only take note, once the
    training loop runs; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.asked = self.training = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        # Of several processes JAX's own service takes SIGTERM, and tells all of them.
        for number in SIGNALS if jax.process_count() == 1 else ():
            self.before[number] = signal.signal(number, self.take_note)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def take_note(self, number: int, frame: FrameType | None) -> None:
        if not self.training:
            # Python's own way out runs while XLA's threads compile, and crashes.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def must_stop(self, step: int) -> bool:
        """Whether to save and end after this step; the same in all processes."""
        if jax.process_count() == 1:
            return self.asked
        return multihost_utils.reached_preemption_sync_point(step)
