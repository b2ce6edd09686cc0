"""SIGTERM and Ctrl-C: a run under way saves first, any other ends at once, with 0.

JAX is imported late: this has to work while JAX is imported, which takes seconds.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """While open, the signals that ask a process to end only take note once a step was
    taken, and else end it at once; so does a second Ctrl-C.

    Of several processes JAX's own service takes SIGTERM, and tells all of them at the
    same step; Ctrl-C becomes a SIGTERM.
    """

    def __init__(self, several: bool = False) -> None:
        self.several = several
        self.asked = self.training = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.wakeup_before = signal.set_wakeup_fd(self.write_end)
        for number in SIGNALS[1:] if self.several else SIGNALS:
            self.before[number] = signal.signal(number, self.take_note)
        threading.Thread(target=self.watch, daemon=True).start()
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup_before)
        os.close(self.write_end)  # which ends the thread

    def watch(self) -> None:
        """Ends the process where nothing is to be saved. Python calls a handler only
        when XLA has compiled, which may take minutes; the number comes here at once."""
        while number := os.read(self.read_end, 1):
            if number[0] in SIGNALS and not (self.training or self.several):
                leave()
        os.close(self.read_end)

    def take_note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        if self.several:
            os.kill(os.getpid(), signal.SIGTERM)

    def must_stop(self, step: int) -> bool:
        """Whether to save and end after this step; the same in all processes."""
        self.training = True
        if not self.several:
            return self.asked
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)


def leave() -> None:
    """Python's own way out runs while XLA's threads compile, and crashes."""
    try:
        print("stopped: no step was under way", flush=True)
        sys.stderr.flush()
    finally:
        os._exit(0)


def end_when_told() -> None:
    """From here on the signals end the process at once, where no `Stopping` is open."""
    Stopping().__enter__()
