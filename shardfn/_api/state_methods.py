"""What a sharded step does with its state and batch besides running.

In: functions that make states, states and batches, whole or stored. Out: states that
are stored as the step has them, whole again, or without values; global batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import jax
import numpy
from jax.sharding import Mesh

from shardfn._api.compiled_steps import Programs
from shardfn._api.init_function import checked_init, in_containers
from shardfn._api.plain_step import PlainStep
from shardfn._core import compat, processes
from shardfn._core.automatic_axes import made_by
from shardfn._core.errors import names_step
from shardfn._core.state_names import Argument
from shardfn._core.static_leaves import close_static, open_static
from shardfn.storage._init_state import make_leaves
from shardfn.storage._layout import with_device_rows
from shardfn.storage._leaves import batch_shardings, refuse_unsure
from shardfn.storage._placement import Storage
from shardfn.storage._stored_array import stored_array

State = TypeVar("State")


@dataclass(eq=False, repr=False)
class StateMethods:
    """The methods of a `ShardedStep` that make, place and put together its state."""

    programs: Programs

    @property
    def plain(self) -> PlainStep:
        """The plain step, and what its arguments mean."""
        return self.programs.plain

    @property
    def storage(self) -> Storage:
        """The mesh, and how states are stored on it."""
        return self.programs.storage

    @property
    def mesh(self) -> Mesh:
        """The mesh that `fully_shard` was given."""
        return self.storage.given

    @names_step
    def init(
        self,
        init_fn: Callable[..., State],
        *args: Any,
        argument: Argument | None = None,
    ) -> State:
        """Makes the state, sharded from birth, with the values of `init_fn(*args)`.

        A device holds its shards and, while a leaf is made that cannot be made in
        parts, such as an orthogonal matrix, that leaf. Where one program for all leaves
        would hold more, several make some leaves each, one after the other.

        Args:
          init_fn: pure function that returns the whole state. Splits over other mesh
            axes that it names, by `with_sharding_constraint` or as `out_shardings` of a
            `jax.jit`, are kept.
          *args: its arguments.
          argument: which of the step's state arguments it is, if there are several, by
            name or position; for a tuple of states, a tuple of these. A dictionary of
            all states by name needs none. None, the default: what follows from states
            that the step has seen together. An error asks for it where options differ
            between arguments.

        Returns:
          The state, each leaf split as `shardings` says.

        Raises:
          ShardingError: a leaf is no array, or it may be several of the step's states.
        """
        storage = self.storage
        init_fn = self._with_rows(checked_init(init_fn, args, "init"), argument)
        args = close_static(args)
        made = made_by(init_fn, args, storage.auto_sizes)
        reading = storage.reading_of(made, argument)
        made = replace(made, paths=tuple(reading.paths(made.paths)))
        leaves, traced = storage.made_leaves(made), is_traced(args)
        out = make_leaves(*storage.stored_init(init_fn, leaves, whole=traced), args)
        state = jax.tree.unflatten(made.treedef, storage.as_leaves(out, leaves))
        states = reading.states(state)
        storage.note_splits(leaves, jax.tree.structure(states))
        storage.names.see(states, [leaf.aval.shape for leaf in leaves])
        return open_static(state)

    @names_step
    def abstract(
        self,
        init_fn: Callable[..., State],
        *args: Any,
        argument: Argument | None = None,
    ) -> State:
        """What `init` would make, without values: `jax.eval_shape(init_fn, *args)` with
        the splits over other mesh axes that `init_fn` names.

        Args:
          init_fn: pure function that returns the whole state.
          *args: its arguments, arrays or `ShapeDtypeStruct`s.
          argument: which of several state arguments it is, as for `init`.

        Returns:
          Pytree of `ShapeDtypeStruct`, whole, as `plan`, `lower`, `shardings` and the
          `restore` of `shardfn.storage.checkpoint` take it.
        """
        init_fn = self._with_rows(checked_init(init_fn, args, "abstract"), argument)
        made = made_by(init_fn, close_static(args), self.storage.auto_sizes)
        reading = self.storage.reading_of(made, argument)
        made = replace(made, paths=tuple(reading.paths(made.paths)))
        leaves = self.storage.abstract(self.storage.made_leaves(made, undecided=True))
        made = in_containers(made.treedef, leaves, "abstract", "ShapeDtypeStructs")
        self.storage.names.see(reading.states(made), [x.shape for x in leaves])
        return open_static(made)

    @names_step
    def shard(self, state: State, *, argument: Argument | None = None) -> State:
        """Splits a whole state, which stays usable.

        Args:
          state: pytree of arrays, on the host or on any device.
          argument: which of the step's state arguments it is, if there are several, by
            name or position; for a tuple of states, a tuple of these. A dictionary of
            all states by name needs none. None, the default: what follows from states
            that the step has seen together. An error asks for it where options differ
            between arguments.

        Returns:
          The same pytree, each leaf split as `shardings` says, over the mesh axis of
          `fully_shard`, and over other mesh axes as it comes in. A leaf that no
          dimension divides is stored padded, or flattened and padded.

        Raises:
          ShardingError: a leaf is no array, or it may be several of the step's states.

        Example:
          >>> import jax, jax.numpy as jnp, shardfn
          >>> mesh = jax.make_mesh((8,), ("data",))
          >>> def train_step(lora, frozen, x):
          ...     return lora + (x @ frozen).sum(), x
          >>> step = shardfn.fully_shard(
          ...     train_step, mesh, state_argnums=(0, 1), shard={"frozen": False}
          ... )
          >>> frozen = step.shard(jnp.ones((128, 128)), argument="frozen")
          >>> frozen.sharding.spec
          P()
        """
        storage, state = self.storage, close_static(state)
        state = self._rows_in(state, argument)
        states, traced = storage.states_of(state, argument), is_traced(state)
        stored, leaves, _ = storage.place(states, whole=traced)
        given = map(stored_array, jax.tree.leaves(state))
        stored = [
            jax.numpy.copy(x) if x is old and not traced else x
            for x, old in zip(stored, given, strict=True)
        ]
        made = storage.as_leaves(stored, leaves)
        return open_static(jax.tree.unflatten(jax.tree.structure(state), made))

    @overload
    def unshard(self, state: State, process: None = None) -> State: ...

    @overload
    def unshard(self, state: State, process: int | None) -> State | None: ...

    @names_step
    def unshard(self, state: Any, process: int | None = None) -> Any:
        """Puts a stored state together on one device.

        Args:
          state: a state that `init`, `shard` or the step returned.
          process: with several processes, the number of the one that gets the state;
            all have to call it. Each device holds one whole leaf at a time.

        Returns:
          The same pytree with every leaf whole, without padding, on the first device of
          the mesh, or of the process; None in other processes.

        Raises:
          ShardingError: the mesh has devices of several processes, and `process` is
            not given.
        """
        state = close_static(state)
        if process is None:
            return open_static(self.storage.whole((state,))[0])
        whole = self.storage.whole_on(process, (state,))
        return None if whole is None else open_static(whole[0])

    @names_step
    def local_batch(self, *batch: Any) -> Any:
        """Puts the rows that each process has together to a global batch.

        Args:
          *batch: the step's arguments but the state, on the host: of leaves that are
            split, this process's own rows, as many as every other has; all of others.

        Returns:
          The batch as global arrays, which the step takes as they are; a tuple if there
          are several arguments. Nothing is sent between processes.

        Raises:
          ValueError: the rows of a leaf cannot be split over the process's devices.

        Example:
          >>> import jax, jax.numpy as jnp, numpy as np, shardfn
          >>> mesh = jax.make_mesh((8,), ("data",))
          >>> step = shardfn.fully_shard(lambda w, x: (w, x.sum()), mesh)
          >>> step.local_batch(np.ones((16, 2))).sharding.spec
          P('data',)
        """
        batch = close_static(batch)
        leaves, treedef = self.storage.batch_leaves(batch)
        axes, several = self.storage.axes, len(processes.of(self.mesh.devices.flat)) > 1

        def keys_among(unsure: Sequence[int]) -> Sequence[int]:
            """Placed whole in one process, rows are where the step finds them, too."""
            return refuse_unsure(leaves[unsure[0]], axes) if several else unsure

        split = batch_shardings(
            batch,
            leaves,
            self.plain.batch_spec,
            axes,
            is_local=True,
            raw_keys=keys_among,
        )
        arrays = [
            jax.make_array_from_process_local_data(
                self.storage.named(leaf, sharding), numpy.asarray(x)
            )
            for x, leaf, sharding in zip(
                jax.tree.leaves(batch), leaves, split, strict=True
            )
        ]
        made = open_static(jax.tree.unflatten(treedef, arrays))
        return made[0] if len(made) == 1 else made

    @names_step
    def shardings(self, state: Any, *, argument: Argument | None = None) -> Any:
        """The `NamedSharding` of every leaf, as `jax.device_put` and Orbax take it.

        A leaf that no dimension divides is stored padded, or flattened and padded, and
        JAX has no sharding of its own shape for that: here it has that of the whole
        leaf, as its `sharding` says. `P()` does not mean that every device stores all
        of it: `x.array.sharding` of such a leaf `x`, and `plan.explain`, say how it is
        stored.

        Args:
          state: a state or its `ShapeDtypeStruct`s, whole or stored.
          argument: which of several state arguments it is, as for `shard`.

        Returns:
          Pytree of `NamedSharding`.

        Example:
          >>> import jax, jax.numpy as jnp, shardfn
          >>> mesh = jax.make_mesh((8,), ("data",))
          >>> step = shardfn.fully_shard(lambda w, x: (w, x @ w), mesh, min_size=0)
          >>> w = step.shard(jnp.ones((1001, 7)))
          >>> step.shardings(w).spec, w.array.shape, w.array.sharding.spec
          (P(), (1008, 7), P('data',))
        """
        state = close_static(state)
        leaves, _ = self.storage.leaves(self.storage.states_of(state, argument))
        avals = [self.storage.whole_aval(x, s) for x, s in self.storage.each(leaves)]
        shardings = [x.sharding for x in avals]
        treedef = jax.tree.structure(state)
        made = in_containers(treedef, shardings, "shardings", "NamedShardings")
        return open_static(made)

    def _with_rows(
        self, init_fn: Callable[..., Any], argument: Argument | None
    ) -> Callable[..., Any]:
        """`init_fn` with a row for each device in what devices keep for themselves."""
        return lambda *args: self._rows_in(init_fn(*args), argument)

    def _rows_in(self, state: Any, argument: Argument | None) -> Any:
        """A state with these rows."""
        if not self.storage.control.asked("per_device_state"):
            return state
        states = self.storage.states_of(state, argument)
        rows = with_device_rows(states, self.storage.axes, self.storage.control)
        return jax.tree.unflatten(jax.tree.structure(state), rows)


def is_traced(tree: Any) -> bool:
    """Whether a call with these arguments is traced, or becomes part of what is."""
    return compat.is_tracing() or any(map(compat.is_traced, jax.tree.leaves(tree)))
