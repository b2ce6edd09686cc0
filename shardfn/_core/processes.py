"""The only place that asks which process this is, of how many.

In: nothing, or what every process should have the same. Out: what a process needs to
know to place and write its own part. No plan depends on it (tests/parity/test_laws.py).
"""

import difflib
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from shardfn._core import compat
from shardfn._core.errors import ShardingError, called

WAIT_SECONDS = 600
"""How long one process waits for another to plan the step that it plans itself."""

_often: Counter[str] = Counter()
"""How often each group of processes has done each of what it does together."""


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


def of(devices: Iterable[Any]) -> tuple[int, ...]:
    """The numbers of the processes that some devices, such as a mesh's, belong to."""
    return tuple(sorted({device.process_index for device in devices}))


def span(devices: Sequence[Any]) -> int:
    """How many processes some devices belong to."""
    return len(of(devices))


def own_directory() -> dict[str, Any]:
    """What tells Orbax to write into a directory of this process's own; it merges
    them."""
    return {"process_index": index()}


def checkpointing(group: Sequence[int] | None = None) -> tuple[int, ...]:
    """The processes that write checkpoints together, as Orbax has to be told; none if
    there is one only, or if they cannot wait for each other on their hosts.

    Args:
      group: numbers of processes; all without it.
    """
    if count() == 1 or compat.distributed_client() is None:
        return ()
    return tuple(range(count())) if group is None else tuple(group)


def together(group: Sequence[int] | None = None) -> tuple[int, ...]:
    """The processes that this one waits for, itself among them; none if it is alone, or
    if they cannot wait for each other on their hosts.

    Args:
      group: numbers of processes; all without it.
    """
    numbers = tuple(range(count())) if group is None else tuple(group)
    alone = len(numbers) < 2 or index() not in numbers
    return () if alone or compat.distributed_client() is None else numbers


def assert_same(what: str, text: str, group: Sequence[int] | None = None) -> None:
    """Compares what processes should have the same; all of them have to call it.

    Args:
      what: what is compared, for the message.
      text: this process's.
      group: numbers of the processes, as `of` gives them; all without it.

    Raises:
      ShardingError: the first of them has another text, or this is the first and
        another process has; it shows the lines that differ.
    """
    client, numbers = compat.distributed_client(), together(group)
    if not numbers:
        return
    key = _next_key("same", numbers)
    digest = hashlib.sha256(text.encode()).hexdigest()
    first, *others = numbers
    asked = others if index() == first else [first]
    for other in asked:
        _tell(client, f"{key}/digest", other, digest)
    for other in asked:
        if _told(client, f"{key}/digest", other, what) == digest:
            continue
        _tell(client, f"{key}/text", other, text)
        theirs = _told(client, f"{key}/text", other, what)
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


def meet(done: str, group: Sequence[int] | None = None) -> None:
    """Waits for other processes, all of which have to call it. Some collectives wait
    for 30 seconds only, and one process may compile for longer than another.

    Args:
      done: what this process has done, for the message.
      group: numbers of the processes, as `of` gives them; all without it.

    Raises:
      ShardingError: not all have come in `WAIT_SECONDS`.
    """
    client, numbers = compat.distributed_client(), together(group)
    if not numbers:
        return
    try:
        client.wait_at_barrier(
            _next_key("met", numbers), WAIT_SECONDS * 1000, list(numbers)
        )
    except Exception as error:
        raise ShardingError(
            f"process {index()} has {done}, and another one has not in {WAIT_SECONDS} "
            f"s.\n{called()}"
            "Every process has to call the same steps in the same order, and all have "
            "to be alive: the output of the others says what became of them."
        ) from error


def failed_elsewhere(
    own: str | None, group: Sequence[int] | None = None
) -> tuple[int, str] | None:
    """Tells other processes whether this one has failed; all have to call it.

    Args:
      own: what went wrong here, or None.
      group: numbers of the processes, as `of` gives them; all without it.

    Returns:
      The number of the first process that has failed, and what went wrong there.

    Raises:
      ShardingError: another one does not come in `WAIT_SECONDS`.
    """
    client, numbers = compat.distributed_client(), together(group)
    if not numbers:
        return None
    key = _next_key("tried", numbers)
    client.key_value_set(f"{key}/{index()}", "well" if own is None else f"not: {own}")
    for process in numbers:
        text = _theirs(client, f"{key}/{process}", process, "attempt")
        if text != "well":
            return process, text.removeprefix("not: ")
    # All have come this far, so that all have read what was told before.
    before, _, times = key.rpartition("/")
    if int(times) > 1:
        client.key_value_delete(f"{before}/{int(times) - 1}/{index()}")
    return None


def _next_key(what: str, numbers: Sequence[int]) -> str:
    """The same in all processes of a group, however often others have met."""
    key = f"shardfn/{what}/{'-'.join(map(str, numbers))}"
    _often[key] += 1
    return f"{key}/{_often[key]}"


def _tell(client: Any, key: str, other: int, text: str) -> None:
    client.key_value_set(f"{key}/{index()}/{other}", text)


def _told(client: Any, key: str, other: int, what: str) -> str:
    """What another process told this one, which alone reads it: nothing stays."""
    text = _theirs(client, key := f"{key}/{other}/{index()}", other, what)
    client.key_value_delete(key)
    return text


def _theirs(client: Any, key: str, other: int, what: str) -> str:
    try:
        return client.blocking_key_value_get(key, WAIT_SECONDS * 1000)
    except Exception as error:
        raise ShardingError(
            f"process {other} has not made the {what} that process {index()} has made, "
            f"in {WAIT_SECONDS} s.\n{called()}"
            "Every process has to call the same steps in the same order."
        ) from error
