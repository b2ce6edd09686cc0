"""Saving and restoring sharded states with Orbax, onto any mesh.

In: a state as a sharded step stores it. Out: a directory of Orbax checkpoints that hold
each leaf in its own shape and dtype, whatever mesh wrote it; and a state back, stored
as another step on another mesh stores it, or whole on one device.

Needs the extra `checkpoint`: `pip install 'shardfn[checkpoint]'`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from shardfn._core import compat, processes
from shardfn._core.argument_values import (
    COUNT,
    FLAG,
    MAPPING,
    PATH,
    STEP,
    check_arguments,
)
from shardfn._core.errors import call_site, called, cannot_be, names_call
from shardfn._core.leaves import Leaf
from shardfn._core.limits import CHUNK_BYTES
from shardfn._core.static_leaves import close_static, open_static
from shardfn.storage import _damage, _write_failures
from shardfn.storage._checkpoint_errors import (
    CheckpointError as CheckpointError,
    DamagedCheckpointError as DamagedCheckpointError,
    check_devices,
    check_extra,
    check_leaves,
    in_all_processes,
)
from shardfn.storage._checkpoint_files import ITEM, CheckpointFiles
from shardfn.storage._leaves import leaves_of
from shardfn.storage._orbax_items import (
    as_item,
    handler,
    manager_options,
    read,
    read_step,
    values,
)
from shardfn.storage._placement import HasStorage, stored_avals
from shardfn.storage._residual_rows import warn_of

__all__ = ["CheckpointError", "Checkpoints", "DamagedCheckpointError"]


class Checkpoints:
    """The checkpoints of one training run: an Orbax `CheckpointManager` for a state
    that a sharded step stores.

    A checkpoint is written in the background and appears under its number when it is
    complete. Each process writes the shards of its own devices, without gathering any:
    it needs one copy of them in host memory, until they are written. A leaf is on disk
    in its own shape and dtype, however it is stored, so that the checkpoint can be
    restored onto any mesh, and read without shardfn. What is read is compared with
    checksums that were written.

    Args:
      directory: absolute path, or `gs://...`; made if it is not there.
      step: the sharded step that the state belongs to. Without one, states are whole
        arrays on one device.
      options: of Orbax: how many checkpoints are kept, time limits, and so on.

    Raises:
      ValueError: `directory` is not absolute.
      DamagedCheckpointError: what says of a checkpoint when it was written is not what
        was written; move that checkpoint away.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, shardfn
      >>> from shardfn.storage.checkpoint import Checkpoints
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> step = shardfn.fully_shard(lambda w, x: (w * x.mean(), x), mesh, min_size=0)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with Checkpoints(directory, step) as checkpoints:
      ...         checkpoints.save(100, step.init(lambda: jnp.arange(5.0)))
      ...     with Checkpoints(directory) as checkpoints:  # on one device, later
      ...         print(checkpoints.latest, checkpoints.restore(jnp.zeros(5)))
      100 [0. 1. 2. 3. 4.]
    """

    def __init__(
        self,
        directory: str | epath.PathLike,
        step: HasStorage | None = None,
        *,
        options: ocp.CheckpointManagerOptions | None = None,
    ) -> None:
        check_arguments(
            "Checkpoints", directory=(directory, PATH), step=(step, STEP.or_none())
        )
        if not isinstance(options, ocp.CheckpointManagerOptions | None):
            advice = "Pass orbax.checkpoint.CheckpointManagerOptions, or None."
            cannot_be("options", options, advice, "Checkpoints")
        self.directory = epath.Path(directory)
        self._files = CheckpointFiles(self.directory)
        self.step = step
        self._writing: int | None = None
        if not str(directory).startswith(("/", "gs://", "s3://")):
            raise ValueError(
                f"the directory of checkpoints is '{directory}', which is relative.\n"
                f"  Checkpoints was called at {call_site()}\n"
                "Pass an absolute path, such as os.path.abspath(...): every process "
                "has to find the same directory."
            )
        on = None if step is None else step.mesh.devices.flat
        self._group = None if on is None else processes.of(on)
        self._failures: list[Exception] = []
        watched = handler()
        _write_failures.watch(watched, self._failures)
        options = manager_options(options, self.directory, self._group)
        with in_all_processes("opened the checkpoints", self._group):
            try:
                self._manager = ocp.CheckpointManager(
                    self.directory, options=options, item_handlers={ITEM: watched}
                )
            except (TypeError, ValueError):  # Orbax reads a file of each
                for number in self._files.numbers():
                    with self._files.intact(number):
                        read_step(self._files.path(number))
                raise

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the complete checkpoints, in order; one that is being written
        is among them after `wait`, the next `save`, or `restore`."""
        return sorted(n for n in self._manager.all_steps() if n != self._writing)

    @property
    def latest(self) -> int | None:
        """The largest of `numbers`, or None."""
        return max(self.numbers, default=None)

    @names_call
    def save(
        self, number: int, state: Any, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Starts to write a checkpoint; waits first for an earlier one.

        It comes back when the shards are copied to host memory: the state can be
        donated to the next step at once. All processes have to call it.

        Args:
          number: the checkpoint's number, such as the count of steps taken.
          state: the state, stored or whole.
          extra: anything else that JSON can hold, such as the position in the data:
            numbers as `int` and `float`, not as arrays.

        Returns:
          None.

        Raises:
          CheckpointError: there is a checkpoint of that number, two leaves of the
            state have the same path, or JSON cannot hold `extra`; nothing is written.
          Exception: what went wrong while an earlier checkpoint was written.
        """
        check_arguments(
            "save", number=(number, COUNT), extra=(extra, MAPPING.or_none())
        )
        with in_all_processes(f"begun to save {number}", self._group):
            self.wait()
            self._check_number(number)
            check_extra(extra or {})
            arrays, leaves, treedef = self._stored(close_static(state))
            check_leaves(leaves)
            check_devices(arrays, leaves, self._group)
            item = as_item(jax.tree.unflatten(treedef, values(arrays, leaves))[0])
        chunked = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
        args = ocp.args.PyTreeSave(
            item, save_args=jax.tree.map(lambda _: chunked, item)
        )
        self._manager.save(
            number,
            args=ocp.args.Composite(**{ITEM: args}),
            custom_metadata=_damage.record(extra or {}, leaves),
            force=True,
        )
        self._writing = number

    @names_call
    def restore(
        self, like: Any, number: int | None = None, *, partial: bool = False
    ) -> Any:
        """Reads a checkpoint, or a part of it, into a state of the form of `like`.

        Each process reads what its devices hold, a few leaves at a time. All processes
        have to call it.

        Args:
          like: a state or its `ShapeDtypeStruct`s, whole or stored: the structure,
            shapes and dtypes that the state has to have. `jax.eval_shape(create_state,
            key)` gives one.
          number: the checkpoint's number; the latest one without it.
          partial: whether the checkpoint may have more leaves than `like`, which are
            then not read: `{"params": like.params}` is the parameters, without an
            optimizer's moments.

        Returns:
          The state, stored as the step stores it, or whole on the first device if there
          is no step. The values are those saved, to the bit.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          DamagedCheckpointError: a file is missing, cut off, or has other bits than
            were written; it names the leaf. Every process raises it, also if only
            another one reads that file.
          CheckpointError: leaves are missing from the checkpoint, are in the checkpoint
            only, or have another shape or dtype; it lists them by path. Or another
            process cannot read its part for lack of memory, permission or network.
          Exception: what this process cannot read for such a reason.
        """
        known = {"number": (number, COUNT.or_none()), "partial": (partial, FLAG)}
        check_arguments("restore", **known)
        at = "the latest checkpoint" if number is None else f"checkpoint {number}"
        with in_all_processes(f"read {at}", self._group):
            self.wait()
            number = self._found(number)
            leaves, treedef, targets = stored_avals(self.step, close_static(like))
            with self._files.intact(number):
                begin = self._files.check_fit(leaves, number, partial)
                where = self._files.path(number) / ITEM
                found = read(where, leaves, targets, treedef, partial, begin)
        warn_of(begin, number)
        arrays: list[Any] = [
            compat.with_weak_type(x, True) if leaf.aval.weak_type else x
            for x, leaf in zip(found, leaves, strict=True)
        ]
        if self.step is not None:
            arrays = self.step.storage.as_leaves(arrays, leaves)
        return open_static(jax.tree.unflatten(treedef, arrays)[0])

    @names_call
    def extra(self, number: int | None = None) -> dict[str, Any]:
        """What was saved with the state.

        Args:
          number: the checkpoint's number; the latest one without it.

        Returns:
          The `extra` of that `save`.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          DamagedCheckpointError: it is not what `save` has written.
        """
        check_arguments("extra", number=(number, COUNT.or_none()))
        number = self._found(number)
        with self._files.intact(number):
            return self._files.record(number)["extra"]

    def wait(self) -> None:
        """Waits until no checkpoint is being written.

        Returns:
          None.

        Raises:
          Exception: what went wrong while one was written. With several processes it
            is raised where it went wrong, which cannot save again: the others wait for
            it until Orbax's time limit (`AsyncOptions`, 10 minutes), or until it ends.
        """
        if processes.count() == 1:
            self._manager.wait_until_finished()
        else:
            _write_failures.wait(self._manager.wait_until_finished, self._failures)
        self._writing = None

    def close(self) -> None:
        """Waits as `wait` does, and releases the threads that write.

        Returns:
          None.
        """
        if processes.count() == 1 or not self._failures:
            self._manager.close()

    def _check_number(self, number: int) -> None:
        if number in self.numbers:
            raise CheckpointError(
                f"there is a checkpoint {number} in {self.directory} already.\n"
                f"{called()}Give the new one another number, or delete the old one."
            )

    def _found(self, number: int | None) -> int:
        numbers = self.numbers
        if numbers and number is None:
            return numbers[-1]
        if number is None or number not in numbers:
            raise FileNotFoundError(
                f"there is no checkpoint {'' if number is None else f'{number} '}in "
                f"{self.directory}; it has {numbers or 'none'}.\n{called()}"
                "Restore one that is there, or start anew if there is none."
            )
        return number

    def _stored(self, state: Any) -> tuple[list[jax.Array], Sequence[Leaf], Any]:
        if self.step is not None:
            storage = self.step.storage
            _, leaves, treedef = storage.own_leaves(state)
            stored, _, _ = storage.place(storage.states_of(state, is_stored=True))
            return stored, leaves, treedef
        leaves, treedef = leaves_of((state,), "state")
        return [jnp.asarray(x) for x in jax.tree.leaves(state)], leaves, treedef
