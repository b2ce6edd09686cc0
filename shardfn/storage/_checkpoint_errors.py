"""What cannot be saved or restored, and the errors that say so.

In: the leaves of a state that is to be saved, what is saved beside it, and what goes
wrong in other processes. Out: nothing, or a `CheckpointError`.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from shardfn._core import processes
from shardfn._core.errors import call_site
from shardfn._core.leaves import Leaf
from shardfn.storage._leaves import is_text
from shardfn.storage._orbax_items import has_values, is_known, not_json, on_disk


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or does not fit the state to be restored."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint are not what was written; an older one's may be.

    Attributes:
      number: the checkpoint's number; None if only another process knows it.
    """

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.number = number


def check_extra(extra: Mapping[str, Any]) -> None:
    if found := not_json(dict(extra), "extra"):
        raise CheckpointError(
            f"{found[0]} is {found[1]}, which JSON cannot hold.\n"
            f"  save was called at {call_site()}\n"
            "Pass float(...) or int(...) of a number, .tolist() of an array."
        )


def check_leaves(leaves: Sequence[Leaf]) -> None:
    """Refuses what has no name or no dtype on disk."""
    if not leaves:
        raise CheckpointError(
            "the state has no arrays, so that there is nothing to save.\n"
            f"  save was called at {call_site()}\n"
            "Pass the state that step.init or the step returned; what is no array "
            "goes into extra=."
        )
    names = Counter(leaf.name.replace("/", ".") for leaf in leaves)
    for leaf in leaves:
        if names[leaf.name.replace("/", ".")] > 1:
            raise CheckpointError(
                f"two leaves of the state are called '{leaf.name}' on disk, where '.' "
                f"stands between keys.\n  save was called at {call_site()}\n"
                "Rename a key of the state, such as one that has a '.' or '/' in it."
            )
        if has_values(leaf) and not is_known(dtype := on_disk(leaf.aval).dtype):
            raise CheckpointError(
                f"state leaf '{leaf.name}' is {dtype.name}, which TensorStore cannot "
                f"write.\n  save was called at {call_site()}\n"
                "Cast it in the state, such as to int8 or float8_e4m3fn."
            )
        if not is_text(leaf.name):
            raise CheckpointError(
                f"state leaf {leaf.name!a} has a name that is no Unicode text: half of "
                f"a surrogate pair.\n  save was called at {call_site()}\n"
                "Rename that key of the state."
            )


@contextlib.contextmanager
def in_all_processes(done: str, group: Sequence[int] | None) -> Iterator[None]:
    """What one process cannot do, all do not: they go on together, or not at all."""
    try:
        with processes.meeting(done, group):
            yield
    except processes.ElsewhereError as error:
        message = (
            f"process {error.process} has not {done}:\n    {error.reason}\n"
            f"  this one called shardfn at {call_site()}\n"
            "What one process cannot do, none does: see to that one first."
        )
        if error.kind == DamagedCheckpointError.__name__:
            raise DamagedCheckpointError(message, None) from None
        raise CheckpointError(message) from None


def check_devices(
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    group: Sequence[int] | None,
) -> None:
    """Refuses that each of several processes saves a state of its own."""
    count = len(group or range(processes.count()))
    for leaf, x in zip(leaves, arrays, strict=True):
        if count > 1 and x.is_fully_addressable:
            raise CheckpointError(
                f"state leaf '{leaf.name}' is on the devices of one process, and "
                f"{count} processes save together.\n"
                f"  save was called at {call_site()}\n"
                "Give Checkpoints the step that the state belongs to."
            )
