"""The only place that asks which process this is, of how many.

In: nothing, or what every process should have the same. Out: what a process needs to
know to place and write its own part. No plan depends on it (see tests/test_laws.py).
"""

import difflib
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from shardfn import _compat
from shardfn._errors import ShardingError, called

WAIT_SECONDS = 600
"""How long one process waits for another to plan the step that it plans itself."""

_compared = itertools.count()
_met = itertools.count()
_tried = itertools.count()


def index() -> int:
    """The number of this process, from 0."""
    return jax.process_index()


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def own_device() -> Any:
    """The first device of this process."""
    return jax.local_devices()[0]


def reachable(devices: Sequence[Any]) -> Any:
    """The first of some devices that is this process's; of absent ones the first."""
    own = (device for device in devices if device.process_index == index())
    return next(own, devices[0])


def span(devices: Sequence[Any]) -> int:
    """How many processes some devices belong to."""
    return len({device.process_index for device in devices})


def own_directory() -> dict[str, Any]:
    """What tells Orbax to write into a directory of this process's own; it merges
    them."""
    return {"process_index": index()}


def everyone() -> set[int] | None:
    """The numbers of all processes, if they can wait for each other on their hosts."""
    if count() == 1 or _compat.distributed_client() is None:
        return None
    return set(range(count()))


def assert_same(what: str, text: str) -> None:
    """Compares what every process should have the same; all have to call it.

    Args:
      what: what is compared, for the message.
      text: this process's.

    Raises:
      ShardingError: process 0 has another text, or this is process 0 and another
        process has; it shows the lines that differ.
    """
    client = _compat.distributed_client()
    if count() == 1 or client is None:
        return
    key = f"shardfn/{next(_compared)}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    client.key_value_set(f"{key}/text/{index()}", text)
    client.key_value_set(f"{key}/digest/{index()}", digest)
    for other in range(1, count()) if index() == 0 else (0,):
        if _theirs(client, f"{key}/digest/{other}", other, what) == digest:
            continue
        theirs = _theirs(client, f"{key}/text/{other}", other, what)
        lines = difflib.unified_diff(
            theirs.splitlines(),
            text.splitlines(),
            f"process {other}",
            f"process {index()}",
            lineterm="",
            n=0,
        )
        shown = "\n    ".join(itertools.islice(lines, 40))
        raise ShardingError(
            f"process {index()} and process {other} have different {what}:\n    {shown}"
            f"\n{called()}"
            "Every process has to run the same step on the same shapes: look for what "
            "depends on the process, such as its number, its files or its versions."
        )


def meet(done: str) -> None:
    """Waits for all processes, all of which have to call it. Some collectives wait for
    30 seconds only, and one process may compile for longer than another.

    Args:
      done: what this process has done, for the message.

    Raises:
      ShardingError: not all have come in `WAIT_SECONDS`.
    """
    client = _compat.distributed_client()
    if count() == 1 or client is None:
        return
    try:
        client.wait_at_barrier(f"shardfn/met/{next(_met)}", WAIT_SECONDS * 1000)
    except Exception as error:
        raise ShardingError(
            f"process {index()} has {done}, and another one has not in {WAIT_SECONDS} "
            f"s.\n{called()}"
            "Every process has to call the same steps in the same order, and all have "
            "to be alive: the output of the others says what became of them."
        ) from error


def failed_elsewhere(own: str | None) -> tuple[int, str] | None:
    """Tells all processes whether this one has failed; all have to call it.

    Args:
      own: what went wrong here, or None.

    Returns:
      The number of the first process that has failed, and what went wrong there.

    Raises:
      ShardingError: another one does not come in `WAIT_SECONDS`.
    """
    client = _compat.distributed_client()
    if count() == 1 or client is None:
        return None
    key = f"shardfn/tried/{next(_tried)}"
    client.key_value_set(f"{key}/{index()}", "well" if own is None else f"not: {own}")
    for process in range(count()):
        text = _theirs(client, f"{key}/{process}", process, "attempt")
        if text != "well":
            return process, text.removeprefix("not: ")
    return None


def _theirs(client: Any, key: str, other: int, what: str) -> str:
    try:
        return client.blocking_key_value_get(key, WAIT_SECONDS * 1000)
    except Exception as error:
        raise ShardingError(
            f"process {other} has not made the {what} that process {index()} has made, "
            f"in {WAIT_SECONDS} s.\n{called()}"
            "Every process has to call the same steps in the same order."
        ) from error
