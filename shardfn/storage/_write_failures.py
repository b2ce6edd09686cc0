"""A failed write ends the wait for the others: Orbax tells of it after minutes only.

In: writes under way, and what waits for those of all processes. Out: the same, and the
error of a write of this process as soon as there is one.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp

from shardfn._core.limits import FAILURE_SECONDS


@dataclass
class Watched:
    """A write under way, as Orbax knows them; its error is added to `failures`."""

    write: Any
    failures: list[Exception]

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.write.result(timeout)
        except Exception as error:
            self.failures.append(error)
            raise

    def cancel(self) -> bool | None:
        return self.write.cancel()


def watch(handler: ocp.PyTreeCheckpointHandler, failures: list[Exception]) -> None:
    """Adds the errors of what a handler writes to `failures`. Orbax knows a handler by
    its class, so that a subclass of it would write nothing."""
    start = handler.async_save

    async def async_save(*args: Any, **kwargs: Any) -> Any:
        writes = await start(*args, **kwargs)
        return [Watched(write, failures) for write in writes or ()]

    handler.async_save = async_save


def wait(finish: Callable[[], None], failures: list[Exception]) -> None:
    """Calls `finish`, which waits for all processes, and no longer once this one has
    failed: then it cannot save again, since the others wait for it."""
    ended: list[Exception] = []

    def call() -> None:
        try:
            finish()
        except Exception as error:
            ended.append(error)

    waiting = threading.Thread(target=call, daemon=True)
    waiting.start()
    while waiting.is_alive() and not failures:
        waiting.join(FAILURE_SECONDS)
    for error in (*failures, *ended):
        raise error
