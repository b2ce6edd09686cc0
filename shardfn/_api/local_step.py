"""A training step on local shards, inside the caller's own `shard_map` or `pmap`.

In: the plain step and the names of mesh axes that the caller binds. Out: a callable
that takes and returns what one device holds.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import (
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    TypeVar,
    overload,
)

import jax
from jax import lax
from jax.sharding import Mesh

from shardfn._api.argument_leaves import Side
from shardfn._api.init_function import checked_init
from shardfn._api.methods import Kept, Method, binds, bound_to
from shardfn._api.plain_step import PlainStep
from shardfn._api.planner import plan_init
from shardfn._core import compat
from shardfn._core.errors import ShardingError, called, names_step, step_name
from shardfn._core.leaves import Leaf
from shardfn._core.resharding import reshard_path
from shardfn._core.sharding import (
    Axes,
    Sharding,
    axes_of,
    local_shape,
    partition_spec,
)
from shardfn._lowering.collectives import run_move, varying
from shardfn.storage._layout import partition
from shardfn.storage._leaves import leaves_of

Shapes = tuple[tuple[int, ...], ...]
P = ParamSpec("P")
R = TypeVar("R")
Own = ParamSpec("Own")
"""The parameters of a method but the object."""
State = TypeVar("State")


@dataclass(eq=False, repr=False)
class LocalStep(Generic[P, R]):
    """A training step inside a manual context; `fully_shard` without a mesh makes it.

    Call it, and its methods, where the mesh axes are bound: in the body of
    `jax.shard_map` or `jax.pmap`. States are what one device holds of them.

    Attributes:
      plain: the plain step, and what its arguments mean.
      names: names of the mesh axes, major to minor.
      options: the arguments of `fully_shard` that made it, by name.
    """

    plain: PlainStep
    names: tuple[str, ...]
    options: Mapping[str, Any]
    _shapes: dict[tuple[Any, ...], list[Shapes]] = field(
        default_factory=dict, repr=False
    )
    _bound: Kept = field(default_factory=dict, repr=False)
    _owner: Any = None

    @overload
    def __get__(self, owner: None, of: Any = None) -> "LocalStep[P, R]": ...

    @overload
    def __get__(
        self: "LocalStep[Concatenate[Any, Own], R]", owner: object, of: Any = None
    ) -> "LocalStep[Own, R]": ...

    def __get__(self, owner: Any, of: Any = None) -> "LocalStep[..., Any]":
        """The step as a method of an object, which is read when the step is traced."""
        function = self.plain.step
        if owner is None or not binds(function):
            return self

        def make(method: Method) -> LocalStep:
            return LocalStep(self.plain.of(method), self.names, self.options)

        step = replace(bound_to(owner, function, self._bound, make), _owner=owner)
        functools.update_wrapper(step, MethodType(function, owner), updated=())
        return step

    def __repr__(self) -> str:
        name = getattr(self.plain.step, "__name__", "step")
        return f"LocalStep({name} over {', '.join(self.names)})"

    @names_step
    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        """Runs the step on local shards.

        Args:
          *args: the step's arguments: the local shards of the state, from `init`,
            `shard` or the step itself, and this device's part of the batch,
            `[B / n, ...]`.
          **named: those of them that are passed by name.

        Returns:
          What the step returns: the local shards of the new state, replicated scalars,
          this device's part of per-example results.

        Raises:
          ShardingError: the mesh axes are not bound here, or the state is unknown.
        """
        axes = self._axes()
        states, batch = self.plain.divide(args, named)
        leaves, treedef = self._logical(states, axes)
        stored = self._partition(leaves, axes)
        local, batch_tree = leaves_of(batch, "batch")
        batch_leaves, split = self._global_batch(batch, local, axes, (leaves, treedef))
        planned = self.plain.planned(
            Side(leaves, stored, treedef), Side(batch_leaves, split, batch_tree), axes
        )
        flat = [*jax.tree.leaves(states), *jax.tree.leaves(batch)]
        typed = [
            _typed(jax.numpy.asarray(x) if isinstance(x, float | int) else x, s, axes)
            for x, s in zip(flat, (*stored, *split), strict=True)
        ]
        run = planned.run if compat.checks_types() else _without_gradient(planned.run)
        return planned.traced.returned(run(*typed))

    @names_step
    def init(self, init_fn: Callable[..., State], *args: Any) -> State:
        """This device's shards of the state that `init_fn(*args)` makes.

        Args:
          init_fn: pure function that returns the whole state.
          *args: its arguments, the same on every device.

        Returns:
          The state; no device holds a whole leaf that can be made in parts.
        """
        axes, init_fn = self._axes(), checked_init(init_fn, args, "init")
        leaves, treedef = self._remember((jax.eval_shape(init_fn, *args),), axes)
        planned = plan_init(init_fn, args, self._partition(leaves, axes), axes)
        return jax.tree.unflatten(treedef, planned(*jax.tree.leaves(args)))[0]

    @names_step
    def shard(self, state: State) -> State:
        """This device's shards of a whole state.

        Args:
          state: pytree of arrays, whole and the same on every device.

        Returns:
          The same pytree of local shards.
        """
        axes = self._axes()
        leaves, treedef = self._remember((state,), axes)
        return self._moved(state, leaves, treedef, axes, to_whole=False)

    @names_step
    def unshard(self, state: State) -> State:
        """The whole state, on every device.

        Args:
          state: pytree of local shards.

        Returns:
          The same pytree with every leaf whole.
        """
        axes = self._axes()
        leaves, treedef = self._logical((state,), axes)
        return self._moved(state, leaves, treedef, axes, to_whole=True)

    @names_step
    def specs(self, state: Any, mesh: Mesh) -> Any:
        """The PartitionSpecs of a state, for the caller's `shard_map`.

        Args:
          state: a whole state or its `ShapeDtypeStruct`s.
          mesh: the mesh that the axes belong to.

        Returns:
          Pytree of `PartitionSpec`.
        """
        axes = Axes(self.names, tuple(mesh.shape[n] for n in self.names))
        leaves, treedef = self._remember((state,), axes)
        specs = [partition_spec(s, axes) for s in self._partition(leaves, axes)]
        return jax.tree.unflatten(treedef, specs)[0]

    # Inside

    def _axes(self) -> Axes:
        try:
            sizes = tuple(lax.axis_size(n) for n in self.names)
        except NameError as error:
            raise ShardingError(
                f"no mesh axis {self.names} is bound here.\n"
                f"{called()}"
                "Call it inside jax.shard_map or jax.pmap over this axis, or give "
                "fully_shard a mesh: fully_shard(train_step, mesh)."
            ) from error
        cannot_sum = compat.dtypes_without_sum(*compat.bound_platform())
        return Axes(self.names, sizes, cannot_sum=cannot_sum)

    def _partition(self, leaves: Sequence[Leaf], axes: Axes) -> tuple[Sharding, ...]:
        paths, avals = [x.path for x in leaves], [x.aval for x in leaves]
        plain = self.plain
        return partition(paths, avals, axes, plain.min_size, control=plain.control)

    def _remember(
        self, states: tuple[Any, ...], axes: Axes
    ) -> tuple[tuple[Leaf, ...], Any]:
        """The leaves of whole states; their local shapes are recognised from now on."""
        leaves, treedef = leaves_of(states, "state")
        local = tuple(
            local_shape(leaf.aval.shape, s, axes)
            for leaf, s in zip(leaves, self._partition(leaves, axes), strict=True)
        )
        entry = self._shapes.setdefault((treedef, local, axes.names, axes.sizes), [])
        shapes = tuple(leaf.aval.shape for leaf in leaves)
        if shapes not in entry:
            entry.append(shapes)
        return tuple(leaves), treedef

    def _logical(
        self, states: tuple[Any, ...], axes: Axes
    ) -> tuple[tuple[Leaf, ...], Any]:
        """The leaves of local states, on global shapes."""
        leaves, treedef = leaves_of(states, "state")
        local = tuple(leaf.aval.shape for leaf in leaves)
        known = self._shapes.get((treedef, local, axes.names, axes.sizes), [])
        if len(known) > 1:
            raise ShardingError(
                f"the state could be one with leaves of shapes {list(known[0])} or "
                f"{list(known[1])}: both have these local shards.\n{called()}"
                "Make another step with fully_shard for the other state."
            )
        if not known:
            raise ShardingError(
                "the state is not one that this step has sharded, so the global shapes "
                "of its leaves are not known.\n"
                f"{called()}"
                "Make it with step.init(...) or step.shard(whole_state) inside the "
                "shard_map or pmap, or call step.specs(whole_state, mesh) before."
            )
        return tuple(
            Leaf(leaf.path, _with_shape(leaf.aval, shape))
            for leaf, shape in zip(leaves, known[0], strict=True)
        ), treedef

    def _global_batch(
        self,
        batch: tuple[Any, ...],
        local: Sequence[Leaf],
        axes: Axes,
        states: tuple[Sequence[Leaf], Any],
    ) -> tuple[tuple[Leaf, ...], tuple[Sharding, ...]]:
        """The batch's leaves on global shapes, and how they are split."""
        split = self.plain.split(batch, local, axes, states, is_local=True)
        leaves = []
        for leaf, sharding in zip(local, split, strict=True):
            shape = list(leaf.aval.shape)
            for dim in range(len(shape)):
                for axis in axes_of(sharding, dim):
                    shape[dim] *= axes.sizes[axis]
            leaves.append(Leaf(leaf.path, _with_shape(leaf.aval, tuple(shape))))
        return tuple(leaves), split

    def _moved(
        self,
        state: Any,
        leaves: Sequence[Leaf],
        treedef: Any,
        axes: Axes,
        to_whole: bool,
    ) -> Any:
        out = []
        for x, leaf, stored in zip(
            jax.tree.leaves(state), leaves, self._partition(leaves, axes), strict=True
        ):
            start, end = axes.replicated, stored
            if to_whole:
                start, end = end, start
            path = reshard_path(start, end, leaf.aval.shape, axes)
            for before, after in zip(path, path[1:], strict=False):
                x = run_move(x, leaf.aval.shape, before, after, axes)
            out.append(x)
        return jax.tree.unflatten(treedef, out)[0]


def _without_gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which JAX would differentiate wrongly where it checks no types: it would
    take the cotangent of a replicated value for one device's term of a sum."""

    def refuse(*_: Any) -> NoReturn:
        raise ShardingError(
            f"{step_name()} is differentiated from outside, where JAX does not know "
            f"which values are replicated.\n{called()}"
            "Take the gradient inside the step, or call it in "
            "jax.shard_map(check_vma=True), not in jax.pmap."
        )

    checked = jax.custom_jvp(run)
    checked.defjvp(refuse)
    return checked


def _typed(x: jax.Array, sharding: Sharding, axes: Axes) -> jax.Array:
    over = (n for n, s in zip(axes.names, sharding, strict=True) if s is not None)
    return varying(x, *over)


def _with_shape(
    aval: jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)
