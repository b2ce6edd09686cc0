"""A training step on a sharded state: how it is called, planned, lowered and fed.

In: the plain step and how its state is stored. Out: a callable like the step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from shardfn import _compat
from shardfn._arguments import Leaf, leaves_of
from shardfn._errors import names_step
from shardfn._padding import remember, to_stored
from shardfn._plain_step import PlainStep, Side
from shardfn._plan import Plan
from shardfn._planner import Planned, describe
from shardfn._ready import Ready
from shardfn._sharding import partition_spec
from shardfn._storage import Storage
from shardfn._trace import leaked_tracer


@dataclass(eq=False)
class ShardedStep:
    """A training step on a sharded state; `fully_shard` makes it, and it is called like
    the step that it was made from.

    Attributes:
      plain: the plain step, and what its arguments mean.
      storage: the mesh, and how states are stored on it.
      donate: whether the state's buffers are given to the result.
    """

    plain: PlainStep
    storage: Storage
    donate: bool
    _jitted: dict[Any, Any] = field(default_factory=dict, repr=False)
    _ready: dict[Any, Ready] = field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> Mesh:
        """The mesh that `fully_shard` was given."""
        return self.storage.given

    # Running

    @names_step
    def __call__(self, *args: Any) -> Any:
        """Runs the step: state and batch in, the new state, stored, and the rest out.

        Args:
          *args: the step's arguments. A state that is not stored yet is placed first;
            batch arrays have shape `[B, ...]` and are split over the mesh.

        Returns:
          What the step returns.

        Raises:
          ShardingError: the step or its arguments cannot be sharded; the message says
            which leaf or line, and what to do. The state stays usable.
        """
        states, batch = self.plain.divide(args)
        stored, state_tree = jax.tree.flatten(states)
        flat_batch, batch_tree = jax.tree.flatten(batch)
        ready = self._ready.get((state_tree, batch_tree))
        placed = ready.place(flat_batch) if ready and ready.takes(stored) else None
        if placed is None:
            ready, stored, placed = self._prepare(states, batch)
        assert ready is not None
        try:
            out = ready.run(stored, jax.tree.unflatten(batch_tree, placed))
        except jax.errors.UnexpectedTracerError as error:
            raise leaked_tracer() from error
        flat, tree = jax.tree.flatten(out)
        new, rest = flat[: len(stored)], flat[len(stored) :]
        for i, shape in ready.padded:
            if not _compat.is_traced(new[i]):
                remember(new[i], shape)
        return jax.tree.unflatten(tree, [*new, *self.storage.hand_back(rest)])

    @names_step
    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the step; the mesh may be of devices that are not there.

        Args:
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored.

        Returns:
          The lowered step, ready for `.compile()`.
        """
        states, batch = self.plain.divide(args)
        leaves, treedef = self.storage.leaves(states)
        stored = [self.storage.stored_aval(x, s) for x, s in self.storage.each(leaves)]
        batch_leaves, batch_tree = leaves_of(batch, "batch")
        split = self.plain.split(batch, batch_leaves, self.storage.axes)
        placed = [
            self.storage.stored_aval(leaf, s)
            for leaf, s in zip(batch_leaves, split, strict=True)
        ]
        return self._jit(leaves, treedef).lower(
            stored, jax.tree.unflatten(batch_tree, placed)
        )

    @names_step
    def plan(self, *args: Any) -> Plan:
        """What the step moves: every collective with bytes, dtype, phase and parameter.

        Args:
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored.

        Returns:
          A frozen plan; print it, compare it, or read its fields.
        """
        states, batch = self.plain.divide(args)
        leaves, treedef = self.storage.leaves(states)
        return describe(self._planned(leaves, treedef, batch))

    # State

    @names_step
    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Makes the state, sharded from birth, with the values of `init_fn(*args)`.

        Args:
          init_fn: pure function that returns the whole state.
          *args: its arguments.

        Returns:
          The state, each leaf split as `shardings` says.
        """
        leaves, treedef = self.storage.leaves((jax.eval_shape(init_fn, *args),))
        each = self.storage.each(leaves)

        def stored(*args: Any) -> list[jax.Array]:
            made = jax.tree.leaves(init_fn(*args))
            return [
                to_stored(jax.numpy.asarray(x), s, self.storage.axes)
                for x, (_, s) in zip(made, each, strict=True)
            ]

        named = [self.storage.named(s) for _, s in each]
        out = jax.jit(stored, out_shardings=named)(*args)
        self.storage.remember(out, leaves, treedef)
        return jax.tree.unflatten(treedef, out)[0]

    @names_step
    def shard(self, state: Any) -> Any:
        """Splits a whole state, which stays usable.

        Args:
          state: pytree of arrays, on the host or on any device.

        Returns:
          The same pytree, each leaf split as `shardings` says. A leaf that no dimension
          divides is stored padded, or flattened and padded.
        """
        stored, leaves, treedef = self.storage.place((state,))
        given = {id(x) for x in jax.tree.leaves(state)}
        stored = [jax.numpy.copy(x) if id(x) in given else x for x in stored]
        self.storage.remember(stored, leaves, treedef)
        return jax.tree.unflatten(treedef, stored)[0]

    @names_step
    def unshard(self, state: Any) -> Any:
        """Puts a stored state together on the first device of the mesh.

        Args:
          state: a state that `init`, `shard` or the step returned.

        Returns:
          The same pytree with every leaf whole, without padding.
        """
        return self.storage.whole((state,))[0]

    @names_step
    def shardings(self, state: Any) -> Any:
        """The `NamedSharding` of every leaf, as stored.

        Args:
          state: a state or its `ShapeDtypeStruct`s, whole or stored.

        Returns:
          Pytree of `NamedSharding`.
        """
        leaves, treedef = self.storage.leaves((state,))
        named = [self.storage.named(s) for _, s in self.storage.each(leaves)]
        return jax.tree.unflatten(treedef, named)[0]

    # Inside

    def _prepare(
        self, states: tuple[Any, ...], batch: tuple[Any, ...]
    ) -> tuple[Ready, list[Any], list[Any]]:
        """The long way of a call: checks and places its leaves.

        Returns:
          What later calls may skip this for, the state's leaves and the batch's.
        """
        storage = self.storage
        batch_leaves, batch_tree = leaves_of(batch, "batch")
        split = self.plain.split(batch, batch_leaves, storage.axes)
        stored, leaves, treedef = storage.place(states)
        placed = storage.place_batch(batch, batch_leaves, split)
        shapes = tuple(jax.numpy.shape(x) for x in stored)
        ready = Ready(
            run=self._jit(leaves, treedef),
            shapes=shapes,
            shardings=tuple(storage.named(s) for s in storage.partition(leaves)),
            padded=storage.to_remember(shapes, leaves, treedef),
            batch_types=tuple((x.aval.shape, x.aval.dtype) for x in batch_leaves),
            batch_shardings=tuple(
                storage.named(s) if leaf.aval.shape else None
                for leaf, s in zip(batch_leaves, split, strict=True)
            ),
        )
        self._ready[treedef, batch_tree] = ready
        return ready, stored, placed

    def _planned(
        self, leaves: tuple[Leaf, ...], treedef: Any, batch: tuple[Any, ...]
    ) -> Planned:
        axes = self.storage.axes
        batch_leaves, batch_tree = leaves_of(batch, "batch")
        split = self.plain.split(batch, batch_leaves, axes)
        return self.plain.planned(
            Side(leaves, self.storage.partition(leaves), treedef),
            Side(tuple(batch_leaves), split, batch_tree),
            axes,
        )

    def _jit(self, leaves: tuple[Leaf, ...], treedef: Any) -> Any:
        """The jitted step on stored leaves, traced on the logical shapes of
        `leaves`."""
        key = treedef, tuple(leaf.aval.shape for leaf in leaves)
        if key not in self._jitted:

            def run(stored: list[jax.Array], batch: tuple[Any, ...]) -> Any:
                named = [
                    Leaf(leaf.path, _like(x, leaf.aval.shape))
                    for x, leaf in zip(stored, leaves, strict=True)
                ]
                planned = self._planned(tuple(named), treedef, batch)
                out = self._on_given_mesh(planned)(*stored, *jax.tree.leaves(batch))
                return jax.tree.unflatten(planned.traced.out_tree, out)

            functools.update_wrapper(run, self.plain.step, updated=())
            donated = (0,) if self.donate else ()
            self._jitted[key] = jax.jit(run, donate_argnums=donated)
        return self._jitted[key]

    def _on_given_mesh(self, planned: Planned) -> Callable[..., list[jax.Array]]:
        """The planned step on arrays typed by the caller's mesh, explicit or not."""
        given, axes = self.storage.given, self.storage.axes

        def run(*args: jax.Array) -> list[jax.Array]:
            with jax.sharding.use_abstract_mesh(self.storage.mesh.abstract_mesh):
                return self._shard_map(planned)(*args)

        def typed(*args: jax.Array) -> list[jax.Array]:
            if not any(map(_compat.is_explicit, args)):
                return run(*args)
            specs = [partition_spec(s, axes) for s in planned.body.output_shardings]
            with jax.sharding.use_abstract_mesh(given.abstract_mesh):
                over: Any = jax.sharding.auto_axes(
                    run, axes=given.axis_names, out_sharding=specs
                )
                return over(*args)

        return typed

    def _shard_map(self, planned: Planned) -> Callable[..., list[jax.Array]]:
        """The planned step on global arrays. Empty ones stay outside: jax 0.11 crashes
        on an empty array that goes through `shard_map`."""
        axes, body = self.storage.axes, planned.body
        ins = [v.shape for v in planned.input_avals]
        outs = [(v.shape, v.dtype) for v in planned.output_avals]
        full_ins = [i for i, shape in enumerate(ins) if 0 not in shape]
        full_outs = [j for j, (shape, _) in enumerate(outs) if 0 not in shape]
        avals = planned.input_avals

        def local(*args: jax.Array) -> list[jax.Array]:
            given = dict(zip(full_ins, args, strict=True))
            out = planned.run(
                *(
                    given[i] if i in given else jax.numpy.zeros(v.shape, v.dtype)
                    for i, v in enumerate(avals)
                )
            )
            return [out[j] for j in full_outs]

        over = jax.shard_map(
            local,
            mesh=self.storage.mesh,
            in_specs=tuple(partition_spec(body.inputs[i], axes) for i in full_ins),
            out_specs=[
                partition_spec(body.output_shardings[j], axes) for j in full_outs
            ],
            axis_names=set(axes.names),
        )

        def run(*args: jax.Array) -> list[jax.Array]:
            made = dict(zip(full_outs, over(*(args[i] for i in full_ins)), strict=True))
            return [
                made[j] if j in made else jax.numpy.zeros(shape, dtype)
                for j, (shape, dtype) in enumerate(outs)
            ]

        return run


def _like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    weak = getattr(jax.typeof(x), "weak_type", False)
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=weak)
