"""Whether a checkpoint is what was written, and whether an error says that it is not.

In: the leaves and `extra` of a state that is saved; the text of the file that Orbax
keeps them in; errors of reading. Out: a record with a checksum of itself; the record
again, or an error; what of an error is the damage. Arrays have checksums of their own
(see `_orbax_handler`).
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn._core import compat
from shardfn._core.leaves import Leaf
from shardfn.storage._orbax_items import Saved, has_values, on_disk

FILE = "_CHECKPOINT_METADATA"
"""The file of a checkpoint in which Orbax keeps what it is given besides the items."""
OF_FILES = (EOFError, FileNotFoundError, KeyError, NotADirectoryError, TypeError)
OF_FILES += (ValueError,)  # also json.JSONDecodeError and UnicodeDecodeError
"""What is raised for files that are missing, cut off, or not what was written."""
OF_MACHINE = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAUTHENTICATED")
OF_MACHINE += ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNKNOWN")
"""What a ValueError of TensorStore names that another attempt may not meet."""


class DamagedError(ValueError):
    """A file of a checkpoint is not what was written."""


def damage(error: BaseException) -> str | None:
    """What is wrong with the files, or None if they need not be: there may be no
    memory, permission or network."""
    if not isinstance(error, OF_FILES) or any(x in str(error) for x in OF_MACHINE):
        return None
    return str(error) if isinstance(error, DamagedError) else f"{_name(error)}: {error}"


def _name(error: BaseException) -> str:
    return type(error).__name__


def record(extra: Mapping[str, Any], leaves: Sequence[Leaf]) -> dict[str, Any]:
    """What is kept with a state: `extra`, and what the state's leaves are."""
    listing = {leaf.name: on_disk(leaf.aval) for leaf in leaves if has_values(leaf)}
    keys = {
        leaf.name: str(leaf.aval.dtype)
        for leaf in leaves
        if has_values(leaf) and compat.is_key(leaf.aval.dtype)
    }
    made = {"extra": dict(extra), "leaves": checksum_of(listing), "keys": keys}
    return made | {"checksum": _checksum(made)}


def checked(text: bytes) -> dict[str, Any]:
    """The record in what Orbax has written; DamagedError if it is another."""
    try:
        found = json.loads(text)["custom_metadata"]
        checksum = found.pop("checksum")
        if checksum == _checksum(found):
            return found
        reason = "its checksum is another"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{_name(error)}: {error}"
    raise DamagedError(f"{FILE} is not what `save` has written ({reason})")


def checksum_of(listing: Mapping[str, Saved]) -> int:
    """Of the shapes and dtypes of leaves."""
    return _checksum({name: str(saved) for name, saved in listing.items()})


def _checksum(x: Any) -> int:
    """The same before and after `x` was written as JSON."""
    plain = json.loads(json.dumps(x))
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())
