"""A training step on a sharded state: how it is called, planned, lowered and fed.

In: the plain step and how its state is stored. Out: a callable like the step.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from shardfn._arguments import Leaf, batch_shardings, leaves_of
from shardfn._errors import ShardingError, call_site
from shardfn._padding import to_stored
from shardfn._plan import Plan
from shardfn._planner import Planned, check_fallbacks, describe, plan_traced
from shardfn._sharding import partition_spec
from shardfn._storage import Storage
from shardfn._trace import trace

Step = Callable[..., Any]


@dataclass(eq=False)
class ShardedStep:
    """A training step on a sharded state; `fully_shard` makes it, and it is called like
    the step that it was made from.

    Attributes:
      step: the plain step.
      storage: the mesh, and how states are stored on it.
      strict: whether a primitive without a rule is an error.
      state_argnums: positions of the state arguments.
      batch_spec: prefix pytree of PartitionSpecs of the batch, or None.
      donate: whether the state's buffers are given to the result.
    """

    step: Step
    storage: Storage
    strict: bool
    state_argnums: tuple[int, ...]
    batch_spec: Any
    donate: bool
    _plans: dict[Any, Planned] = field(default_factory=dict, repr=False)
    _jitted: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> Mesh:
        """The mesh that `fully_shard` was given."""
        return self.storage.given

    # Running

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
        states, batch = self._divide(args)
        batch_leaves, batch_tree = leaves_of(batch, "batch")
        split = batch_shardings(batch, batch_leaves, self.batch_spec, self.storage.axes)
        stored, leaves, treedef = self.storage.place(states)
        placed = self.storage.place_batch(batch, batch_leaves, split)
        out = self._jit(leaves, treedef)(stored, jax.tree.unflatten(batch_tree, placed))
        flat, tree = jax.tree.flatten(out)
        count = len(leaves)
        self.storage.remember(flat[:count], leaves)
        rest = self.storage.hand_back(flat[count:])
        return jax.tree.unflatten(tree, [*flat[:count], *rest])

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the step; the mesh may be of devices that are not there.

        Args:
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored.

        Returns:
          The lowered step, ready for `.compile()`.
        """
        states, batch = self._divide(args)
        leaves, treedef = self.storage.leaves(states)
        stored = [self.storage.stored_aval(x, s) for x, s in self.storage.each(leaves)]
        batch_leaves, batch_tree = leaves_of(batch, "batch")
        split = batch_shardings(batch, batch_leaves, self.batch_spec, self.storage.axes)
        placed = [
            self.storage.stored_aval(leaf, s)
            for leaf, s in zip(batch_leaves, split, strict=True)
        ]
        return self._jit(leaves, treedef).lower(
            stored, jax.tree.unflatten(batch_tree, placed)
        )

    def plan(self, *args: Any) -> Plan:
        """What the step moves: every collective with bytes, dtype, phase and parameter.

        Args:
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored.

        Returns:
          A frozen plan; print it, compare it, or read its fields.
        """
        states, batch = self._divide(args)
        leaves, treedef = self.storage.leaves(states)
        return describe(self._planned(leaves, treedef, batch))

    # State

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
        self.storage.remember(out, leaves)
        return jax.tree.unflatten(treedef, out)[0]

    def shard(self, state: Any) -> Any:
        """Splits a whole state, which stays usable.

        Args:
          state: pytree of arrays, on the host or on any device.

        Returns:
          The same pytree, each leaf split as `shardings` says. A leaf that no dimension
          divides is stored padded, or flattened and padded.
        """
        stored, _, treedef = self.storage.place((state,))
        return jax.tree.unflatten(treedef, stored)[0]

    def unshard(self, state: Any) -> Any:
        """Puts a stored state together on the first device of the mesh.

        Args:
          state: a state that `init`, `shard` or the step returned.

        Returns:
          The same pytree with every leaf whole, without padding.
        """
        return self.storage.whole((state,))[0]

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

    def _divide(self, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The state arguments, a tuple unless there is only one, and the others."""
        if len(args) <= max(self.state_argnums):
            raise ShardingError(
                f"the step was called with {len(args)} arguments, but its state is "
                f"argument {max(self.state_argnums)} (state_argnums).\n"
                f"  the step was called at {call_site()}"
            )
        states = tuple(args[i] for i in self.state_argnums)
        rest = (a for i, a in enumerate(args) if i not in self.state_argnums)
        return states, tuple(rest)

    def _join(self, states: Sequence[Any], batch: Sequence[Any]) -> Any:
        """Calls the plain step with its arguments in its own order."""
        args = list(batch)
        for position, state in sorted(
            zip(self.state_argnums, states, strict=True), key=lambda pair: pair[0]
        ):
            args.insert(position, state)
        return self.step(*args)

    def _planned(
        self, leaves: tuple[Leaf, ...], treedef: Any, batch: tuple[Any, ...]
    ) -> Planned:
        """The planned step for these leaves; traced once per shapes and structure."""
        axes = self.storage.axes
        batch_leaves, batch_tree = leaves_of(batch, "batch")
        avals = [leaf.aval for leaf in leaves]
        batch_avals = [leaf.aval for leaf in batch_leaves]
        key = (
            treedef,
            batch_tree,
            *((a.shape, a.dtype, a.weak_type) for a in (*avals, *batch_avals)),
        )
        if key not in self._plans:
            stored = self.storage.partition(leaves)
            split = batch_shardings(batch, batch_leaves, self.batch_spec, axes)
            states = jax.tree.unflatten(treedef, avals)
            rest = jax.tree.unflatten(batch_tree, batch_avals)
            traced = trace(self._join, states, rest, leaves, split, axes)
            planned = plan_traced(
                traced, leaves, stored, split, axes, self.storage.min_size
            )
            check_fallbacks(planned, self.strict)
            self._plans[key] = planned
        return self._plans[key]

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
                with jax.sharding.use_abstract_mesh(self.storage.mesh.abstract_mesh):
                    out = self._shard_map(planned)(*stored, *jax.tree.leaves(batch))
                return jax.tree.unflatten(planned.traced.out_tree, out)

            functools.update_wrapper(run, self.step, updated=())
            donated = (0,) if self.donate else ()
            self._jitted[key] = jax.jit(run, donate_argnums=donated)
        return self._jitted[key]

    def _shard_map(self, planned: Planned) -> Callable[..., list[jax.Array]]:
        axes, body = self.storage.axes, planned.body
        return jax.shard_map(
            planned.run,
            mesh=self.storage.mesh,
            in_specs=tuple(partition_spec(s, axes) for s in body.inputs),
            out_specs=[partition_spec(s, axes) for s in body.output_shardings],
            axis_names=set(axes.names),
        )


def _like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    weak = getattr(jax.typeof(x), "weak_type", False)
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=weak)
