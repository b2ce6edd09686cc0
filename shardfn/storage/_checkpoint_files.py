"""What lies in a directory of checkpoints, read and checked against what was written.

In: the directory, and a checkpoint's number. Out: its files, its record and how its
leaves differ from a state's; or an error that says that it is damaged.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from shardfn._core.errors import call_site
from shardfn._core.leaves import Leaf, path_name
from shardfn.storage import _damage
from shardfn.storage._checkpoint_errors import CheckpointError, DamagedCheckpointError
from shardfn.storage._orbax_items import (
    Saved,
    advice,
    differences,
    handler,
)
from shardfn.storage._residual_rows import absent

ITEM = "state"
"""The name of the state's directory in a checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of the checkpoints in one directory.

    Attributes:
      directory: where they are, by number.
    """

    directory: epath.Path

    def path(self, number: int) -> epath.Path:
        return self.directory / str(number)

    def numbers(self) -> list[int]:
        there = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(int(path.name) for path in there if path.name.isdigit())

    @contextlib.contextmanager
    def intact(self, number: int) -> Iterator[None]:
        """Separates damaged files from what another attempt may not meet."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if (reason := _damage.damage(error)) is None:
                raise
            raise DamagedCheckpointError(
                f"checkpoint {number} in {self.directory} is damaged: {reason}\n"
                f"  it was read at {call_site()}\n"
                "Restore an older checkpoint, in every process.",
                number,
            ) from error

    def record(self, number: int) -> dict[str, Any]:
        return _damage.checked((self.path(number) / _damage.FILE).read_bytes())

    def check_fit(
        self, leaves: Sequence[Leaf], number: int, partial: bool
    ) -> frozenset[str]:
        """Lists every leaf that is not the same in the checkpoint and in the state; in
        a part of a state, of those that it has. Returns the residuals that begin."""
        metadata = handler().metadata(self.path(number) / ITEM)
        flat, _ = jax.tree_util.tree_flatten_with_path(metadata.tree)
        saved = {
            path_name(path): Saved(tuple(x.shape), jnp.dtype(x.dtype))
            for path, x in flat
        }
        record = self.record(number)
        if _damage.checksum_of(saved) != record["leaves"]:
            raise _damage.DamagedError(f"the list of leaves in {ITEM} is not the saved")
        if lines := differences(leaves, saved, record["keys"], partial):
            raise CheckpointError(
                f"checkpoint {number} in {self.directory} does not fit the state:\n    "
                + "\n    ".join(lines)
                + f"\n  restore was called at {call_site()}\n"
                f"{advice(lines)}"
            )
        return absent(leaves, saved)
