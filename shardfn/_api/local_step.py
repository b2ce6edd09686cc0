"""A training step on local shards, inside the caller's own `shard_map` or `pmap`.

In: the plain step and the names of mesh axes that the caller binds. Out: a callable
that takes and returns what one device holds.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    overload,
)

import jax
from jax import lax
from jax.sharding import Mesh

from shardfn._api.call_arguments import state_names
from shardfn._api.given_states import GivenStates, StatePart, Stored
from shardfn._api.init_function import checked_init
from shardfn._api.local_arguments import check_split, local_call, unknown_state
from shardfn._api.local_types import as_varying, without_gradient
from shardfn._api.methods import Known, Method, binds, bound_to
from shardfn._api.plain_step import PlainStep
from shardfn._api.planner import plan_init
from shardfn._core import compat
from shardfn._core.argument_values import MESH, check_arguments
from shardfn._core.call_arguments import StateArguments
from shardfn._core.errors import ShardingError, called, names_step
from shardfn._core.limits import BATCH_KINDS
from shardfn._core.moves import moves_of
from shardfn._core.recent import Recent
from shardfn._core.resharding import reshard_path
from shardfn._core.sharding import (
    Axes,
    partition_spec,
)
from shardfn._core.state_names import Argument, StateNames
from shardfn._core.static_leaves import (
    close_call,
    close_static,
    has_static,
    open_static,
    returns_closed,
)
from shardfn._lowering.collectives import run_move
from shardfn.storage._leaves import leaves_of
from shardfn.storage._named_trees import states_of

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
    _given: GivenStates = field(default_factory=GivenStates)
    _found: Recent[Any, StateArguments] = field(
        default_factory=lambda: Recent(BATCH_KINDS)
    )
    _bound: Known = field(default_factory=dict, repr=False)
    _owner: Any = None
    _closed: "list[LocalStep[..., Any]]" = field(default_factory=list, repr=False)

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
            own = self.plain.of(method)
            return LocalStep(own, self.names, self.options, self._given)

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
          What the step returns, with the local shards of the new state, replicated
          scalars, this device's part of per-example results.

        Raises:
          ShardingError: the mesh axes are not bound here, or the state is unknown.
        """
        if has_static((args, named)):
            return open_static(self._on_closed(args, named))
        axes = self._axes()
        call = local_call(self.plain, args, named, self._given, axes, self._found)
        planned = self.plain.planned(call.state, call.batch, axes)
        typed = [
            as_varying(x, s, axes)
            for x, s in zip(
                call.arrays, (*call.state.shardings, *call.batch.shardings), strict=True
            )
        ]
        run = planned.run if compat.checks_types() else without_gradient(planned.run)
        return planned.traced.returned(run(*typed))

    @names_step
    def init(
        self,
        init_fn: Callable[..., State],
        *args: Any,
        argument: Argument | None = None,
    ) -> State:
        """This device's shards of the state that `init_fn(*args)` makes.

        Args:
          init_fn: pure function that returns the whole state.
          *args: its arguments, the same on every device.
          argument: which of several state arguments it is: see `ShardedStep.init`.

        Returns:
          The state; no device holds a whole leaf that can be made in parts.
        """
        axes, init_fn = self._axes(), checked_init(init_fn, args, "init")
        args = close_static(args)
        given = self._see(jax.eval_shape(init_fn, *args), argument)
        planned = plan_init(
            init_fn, args, self.plain.partition(given.whole, axes), axes
        )
        made = planned(*jax.tree.leaves(args))
        return open_static(jax.tree.unflatten(given.treedef, made))

    @names_step
    def shard(self, state: State, *, argument: Argument | None = None) -> State:
        """This device's shards of a whole state.

        Args:
          state: pytree of arrays, whole and the same on every device.
          argument: which of several state arguments it is: see `ShardedStep.shard`.

        Returns:
          The same pytree of local shards.
        """
        state = close_static(state)
        axes, given = self._axes(), self._see(state, argument)
        stored = Stored(given.shapes, self.plain.partition(given.whole, axes))
        return open_static(self._moved(state, stored, axes, to_whole=False))

    @names_step
    def unshard(self, state: State) -> State:
        """The whole state, on every device.

        Args:
          state: pytree of local shards.

        Returns:
          The same pytree with every leaf whole.
        """
        axes, state = self._axes(), close_static(state)
        readings = self._given.readings(state, axes, self.plain.partition)
        if len(readings) != 1:
            raise unknown_state("the state", state, readings, self._given)
        for x, leaf, stored in zip(
            jax.tree.leaves(state),
            leaves_of((state,), "state")[0],
            readings[0].shardings,
            strict=True,
        ):
            check_split(x, leaf, stored, axes)
        return open_static(self._moved(state, readings[0], axes, to_whole=True))

    @names_step
    def specs(self, state: Any, mesh: Mesh, *, argument: Argument | None = None) -> Any:
        """The PartitionSpecs of a state, for the caller's `shard_map`.

        Args:
          state: a whole state or its `ShapeDtypeStruct`s.
          mesh: the mesh that the axes belong to.
          argument: which of several state arguments it is: see `ShardedStep.shard`.

        Returns:
          Pytree of `PartitionSpec`.
        """
        check_arguments("specs", mesh=(mesh, MESH))
        axes = Axes(self.names, tuple(mesh.shape[n] for n in self.names))
        given = self._see(close_static(state), argument)
        specs = [
            partition_spec(s, axes) for s in self.plain.partition(given.whole, axes)
        ]
        return open_static(jax.tree.unflatten(given.treedef, specs))

    def with_state(self, *states: Any) -> "LocalStep[P, R]":
        """The step for these states and no others, where shards could be of several.

        Args:
          *states: the whole states or their `ShapeDtypeStruct`s, in the order of the
            step's arguments that are state.

        Returns:
          A step like this one.

        Example:
          >>> import jax, jax.numpy as jnp, shardfn
          >>> local = shardfn.fully_shard(lambda w, x: (w + x.sum(), x), axis="data")
          >>> local.with_state(jnp.zeros((16, 2)))
          LocalStep(<lambda> over data)
        """
        given = self._given.only(tuple(map(close_static, states)), self._names.known)
        step = replace(
            self, _given=given, _found=Recent(BATCH_KINDS), _bound={}, _closed=[]
        )
        functools.update_wrapper(step, self, updated=())
        return step

    # Inside

    def _on_closed(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What the step returns, closed, of arguments with leaves that are no arrays:
        those are static."""
        if not self._closed:
            plain = self.plain.of(returns_closed(self.plain.step))
            found: Any = Recent(BATCH_KINDS)
            self._closed.append(replace(self, plain=plain, _found=found, _closed=[]))
        args, named = close_call(args, named)
        return self._closed[0](*args, **named)

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
        platform, has_others = compat.bound_platform()
        return Axes(
            self.names,
            sizes,
            cannot_sum=compat.dtypes_without_sum(platform, has_others),
            reads_apart=compat.reads_inside_matmuls(platform),
            fuses_producers=compat.fuses_producers(platform),
            lets_sums_wait=compat.lets_sums_wait(platform),
            indexes_memory=compat.indexes_memory(platform),
            platform=compat.lowered_for(compat.known_platform()),
        )

    @property
    def _names(self) -> StateNames:
        return state_names(self.plain.step, self.plain.state_argnums)

    def _see(self, state: Any, argument: Argument | None) -> StatePart:
        """A whole state, whose shards are known from now on."""
        named = states_of(state, self._names, self.plain.control, argument)
        given = self._given.see(state, named)
        if given is None:
            raise ShardingError(
                "the state is not the one that with_state was given: its structure or "
                f"shapes differ.\n{called()}"
                "Use the step that fully_shard made, or with_state(this_state)."
            )
        return given

    def _moved(self, state: Any, stored: Stored, axes: Axes, to_whole: bool) -> Any:
        flat, treedef = jax.tree.flatten(state)
        out = []
        for x, shape, sharding in zip(
            flat, stored.shapes, stored.shardings, strict=True
        ):
            start, end = axes.replicated, sharding
            if to_whole:
                start, end = end, start
            path = reshard_path(start, end, shape, axes)
            for move in moves_of(path):
                x = run_move(x, shape, move, axes)
            out.append(x)
        return jax.tree.unflatten(treedef, out)
