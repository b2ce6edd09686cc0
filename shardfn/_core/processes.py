"""The only place that asks which process this is, of how many.

In: nothing, or what every process should have the same. Out: what a process needs to
know to place and write its own part. No plan depends on it (tests/parity/test_laws.py).
"""

import contextlib
import difflib
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from shardfn._core import compat
from shardfn._core.argument_values import NUMBERS, TEXT, check_arguments
from shardfn._core.errors import ShardingError, call_site, called
from shardfn._core.limits import PROCESS_SECONDS
from shardfn._core.shown_limits import SHOWN_LINES

_often: Counter[str] = Counter()
"""How often each group of processes has met."""

_cleared: Counter[str] = Counter()
"""Of how many of these meetings nothing is left."""


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


def own_directory() -> dict[str, Any]:
    """What tells Orbax to write into a directory of this process's own; it merges
    them."""
    return {"process_index": index()}


def checkpointing(group: Sequence[int] | None = None) -> tuple[int, ...]:
    """The processes that write checkpoints together, as Orbax has to know them; none if
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


class ElsewhereError(ShardingError):
    """Another process has failed in what all do together.

    Attributes:
      process: its number.
      kind: the type of its error.
      reason: the error.
    """

    def __init__(self, message: str, process: int, kind: str, reason: str) -> None:
        super().__init__(message)
        self.process, self.kind, self.reason = process, kind, reason


def assert_processes_agree(
    what: str, text: str, group: Sequence[int] | None = None
) -> None:
    """Compares what processes should have the same, such as a run's choices; all of
    them have to call it. The first collective would hang otherwise, or be of different
    programs.

    Args:
      what: what is compared, for the message, such as `"choices"`.
      text: this process's, best with one thing per line.
      group: numbers of the processes that call it; all without it.

    Returns:
      None; at once where there is one process.

    Raises:
      ShardingError: in all of them, if one has another text than the first of them; it
        shows the lines that differ. Or one does not come in ten minutes.

    Example:
      >>> import shardfn
      >>> shardfn.assert_processes_agree("choices", "seed 0\\nlearning rate 0.001")
    """
    check_arguments(
        "assert_processes_agree", text=(text, TEXT), group=(group, NUMBERS.or_none())
    )
    client, numbers = compat.distributed_client(), together(group)
    if not numbers:
        return
    place = _next_place(numbers)
    digest = hashlib.sha256(text.encode()).hexdigest()
    other = _differing_process(
        client, place, numbers, {"at": f"compared {what}", "is": digest}
    )
    if other is None:
        return
    first = numbers[0]
    if index() in (first, other):
        client.key_value_set(f"{place}/text/{index()}", text)
    own, their = (first, other) if index() != other else (other, first)
    lines = difflib.unified_diff(
        _get(client, f"{place}/text/{their}", their, f"told its {what}").splitlines(),
        _get(client, f"{place}/text/{own}", own, f"told its {what}").splitlines(),
        f"process {their}",
        f"process {own}",
        lineterm="",
        n=0,
    )
    shown = "\n    ".join(itertools.islice(lines, SHOWN_LINES))
    raise ShardingError(
        f"process {own} and process {their} have different {what}:\n    {shown}"
        f"\n  this was called at {call_site()}\n"
        "They have to be the same in every process: look for what depends on the "
        "process, such as its flags, its number, its files or its versions."
    )


def of_the_first(done: str, text: str, group: Sequence[int] | None = None) -> str:
    """What the first process of a group has, in all of them: what compiled programs
    depend on, whose collectives have to be in the same order.

    Args:
      done: what each process has done to have it, for the message.
      text: what this one has.
      group: numbers of the processes, as `of` gives them; all without it.

    Returns:
      The first one's text.

    Raises:
      ShardingError: the first one does not come in `PROCESS_SECONDS`.
    """
    client, numbers = compat.distributed_client(), together(group)
    if not numbers:
        return text
    place, first = _next_place(numbers), numbers[0]
    if index() == first:
        client.key_value_set(f"{place}/{first}", text)
        return text
    return _get(client, f"{place}/{first}", first, done)


def meet(done: str, group: Sequence[int] | None = None) -> None:
    """Waits for other processes, all of which have to call it. Some collectives wait
    for 30 seconds only, and one process may compile for longer than another.

    Args:
      done: what this process has done, for the message.
      group: numbers of the processes, as `of` gives them; all without it.

    Raises:
      ShardingError: not all have come in `PROCESS_SECONDS`, or one has come from
        another place.
    """
    with meeting(done, group):
        pass


@contextlib.contextmanager
def meeting(done: str, group: Sequence[int] | None = None) -> Iterator[None]:
    """What is done in it, all processes of a group do, or none: those that have wait
    for the others, and raise if one has raised.

    Args:
      done: what has been done then, for messages.
      group: numbers of the processes, as `of` gives them; all without it.

    Raises:
      ElsewhereError: another process has raised.
      ShardingError: another one does not come in `PROCESS_SECONDS`, or has come from
        another place.
    """
    client, numbers = compat.distributed_client(), together(group)
    if not numbers:
        yield
        return
    place = _next_place(numbers)
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        report = {"at": done, "kind": kind, "reason": f"{kind}: {error}"}
        is_first = index() == numbers[0]
        _set(client, place, report | {"process": index()} if is_first else report)
        raise
    _differing_process(client, place, numbers, {"at": done})


def _differing_process(
    client: Any, place: str, numbers: Sequence[int], report: dict[str, Any]
) -> int | None:
    """The process that says to be something else than the first of them, if any. Each
    tells the first, which tells all what it has found: who raises, all do."""
    first, *others = numbers
    if index() != first:
        _set(client, place, report)
        found = json.loads(_get(client, f"{place}/{first}", first, report["at"], 2))
    else:
        found = _found(client, place, others, report)
        _set(client, place, found)
        if (
            found["process"] is None
        ):  # all have come here, and read what was said before
            _clear(client, place)
    process = found["process"]
    if "reason" in found:
        raise ElsewhereError(
            f"process {process} has failed, and process {index()} has {report['at']}:\n"
            f"    {found['reason']}\n{called()}"
            "What one process cannot do, none does: see to that one first.",
            *(process, found["kind"], found["reason"]),
        )
    if "late" in found:
        raise ShardingError(found["late"])
    if found["at"] != found["expected"]:
        raise ShardingError(
            f"process {first} has {found['expected']}, and process {process} has "
            f"{found['at']}.\n{called()}"
            "Every process has to call the same steps in the same order: look for what "
            "one of them has left out, such as after an error that it went on from."
        )
    return process


def _found(
    client: Any, place: str, others: Sequence[int], report: dict[str, Any]
) -> dict[str, Any]:
    """What is wrong with the first process that has another report, if any has."""
    for other in others:
        try:
            theirs = json.loads(_get(client, f"{place}/{other}", other, report["at"]))
        except ShardingError as error:
            return {"process": other, "late": str(error)}
        if theirs != report:
            return theirs | {"process": other, "expected": report["at"]}
    return report | {"process": None, "expected": report["at"]}


def _clear(client: Any, place: str) -> None:
    """Deletes what was said in all meetings before this one."""
    group, _, number = place.rpartition("/")
    for before in range(_cleared[group] + 1, int(number)):
        client.key_value_delete(f"{group}/{before}")
    _cleared[group] = int(number) - 1


def _next_place(numbers: Sequence[int]) -> str:
    """Where the processes of a group tell each other something: the same in all of
    them, however often others have met."""
    place = f"shardfn/met/{'-'.join(map(str, numbers))}"
    _often[place] += 1
    return f"{place}/{_often[place]}"


def _set(client: Any, place: str, report: dict[str, Any]) -> None:
    client.key_value_set(f"{place}/{index()}", json.dumps(report))


def _get(client: Any, key: str, other: int, done: str, times: int = 1) -> str:
    """What another process has said; it may itself wait for one that comes late, so
    that the first of them is waited for two `times` as long."""
    try:
        return client.blocking_key_value_get(key, times * PROCESS_SECONDS * 1000)
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            reason = f"and process {other} has not in {PROCESS_SECONDS} s"
        else:
            reason = f"and cannot ask process {other}: {error}"
        raise ShardingError(
            f"process {index()} has {done}, {reason}.\n{called()}"
            "Every process has to call the same steps in the same order, and all have "
            "to be alive: the output of the others says what became of them."
        ) from error
