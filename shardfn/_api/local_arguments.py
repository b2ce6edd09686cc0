"""Which arguments of a step inside `shard_map` or `pmap` are state, on whole shapes.

In: what one device holds of a call's arguments, and the states that the step was given.
Out: both sides of the call on global shapes; or an error that shows what might be
meant. What is state is found as without a `shard_map`: in a trace on global shapes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax

from shardfn._api.argument_leaves import Side, with_shape
from shardfn._api.call_arguments import by_position, parameter_names
from shardfn._api.given_states import GivenStates, Stored
from shardfn._api.local_types import check_same, check_split, same_over
from shardfn._api.plain_step import PlainStep
from shardfn._core import compat
from shardfn._core.argnums_text import argnums_text, positions_advice
from shardfn._core.call_arguments import Position, Rest, StateArguments, by_place
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaves import Leaf
from shardfn._core.limits import LOCAL_READINGS
from shardfn._core.recent import Recent
from shardfn._core.sharding import Axes, Sharding, axes_of
from shardfn.storage._leaves import leaves_of


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call on local arguments.

    Attributes:
      state: the state's side.
      batch: the other arguments.
      arrays: the leaves of both, on one device.
    """

    state: Side
    batch: Side
    arrays: list[Any]


def local_call(
    plain: PlainStep,
    args: Sequence[Any],
    named: Mapping[str, Any],
    states: GivenStates,
    axes: Axes,
    found: Recent[Any, StateArguments],
) -> LocalCall:
    """Both sides of a call.

    Args:
      plain: the plain step.
      args: the arguments passed by position, on one device.
      named: those passed by name.
      states: the states that the step was given.
      axes: the mesh axes.
      found: which arguments are state, of the calls so far.

    Returns:
      The sides, on global shapes.

    Raises:
      ShardingError: a state is not one that the step was given, or may be several; or
        it is ambiguous which arguments are state.
    """
    search = _Search(plain, tuple(by_position(plain.step, args, named)), states, axes)
    key = search.key
    if key not in found:
        found[key] = search.found() if plain.state_argnums is None else search.asked()
    names = tuple(parameter_names(plain.step))
    return search.call(replace(found[key], parameters=names))


def unknown_state(
    what: str, state: Any, readings: Sequence[Stored], states: GivenStates
) -> ShardingError:
    """The error for a state that the step was not given, or for one that may be one of
    several."""
    if len(readings) > 1:
        each = " or ".join(str(list(x.shapes)) for x in readings[:2])
        return ShardingError(
            f"{what} could be one with leaves of shapes {each}: both have these local "
            f"shards.\n{called()}"
            "Say which: step.with_state(whole_state) is the step for that one alone."
        )
    known, why = states.shapes_of(state), ""
    if known:
        local = [tuple(jax.numpy.shape(x)) for x in jax.tree.leaves(state)]
        why = (
            f"  its leaves have shapes {local} here; this step was given "
            + " and ".join(str(list(shapes)) for shapes in known[:2])
            + ", whose shards have others\n"
        )
    return ShardingError(
        f"{what} is not one that this step was given, so the global shapes of its "
        f"leaves are not known.\n{why}{called()}"
        "Make it with step.init(...) or step.shard(whole_state) inside the shard_map "
        "or pmap, or call step.specs(whole_state, mesh) before, or use "
        "step.with_state(whole_state)."
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the state among the arguments of a call.

    Attributes:
      plain: the plain step.
      args: the arguments, on one device.
      states: the states that the step was given.
      axes: the mesh axes.
    """

    plain: PlainStep
    args: tuple[Any, ...]
    states: GivenStates
    axes: Axes

    @property
    def key(self) -> Any:
        """What the result depends on."""
        leaves, treedef = leaves_of(self.args, "argument")
        types = ((x.aval.shape, x.aval.dtype, x.aval.weak_type) for x in leaves)
        same = tuple(same_over(x, self.axes) for x in jax.tree.leaves(self.args))
        config = compat.configuration()
        return treedef, tuple(types), same, self.axes, len(self.states), config

    def found(self) -> StateArguments:
        """Which arguments are state: those of which a trace says so, on the global
        shapes that they have if they are."""
        given = by_place(self.args)
        candidates = [
            place
            for place, x in given.items()
            if jax.tree.leaves(x) and self._readings(x)
        ]
        if not candidates:
            raise self._unknown(next(iter(given), 0))
        errors: list[ShardingError] = []
        fits: dict[Any, _Reading] = {}
        found: set[Position] = set()
        for places in _subsets(candidates):
            try:
                leaves = self._leaves(places)
                treedef = jax.tree.structure(self.args)
                meaning = self.plain.find(leaves, treedef, self.axes, None)
            except ShardingError as error:
                errors.append(error)
                continue
            if meaning is not None:
                found.update(meaning.arguments)
                if set(meaning.arguments) <= set(places):
                    fits[_types(leaves)] = _Reading(leaves, places, meaning)
        if len(fits) > 1:
            self._refuse(*itertools.islice(fits.values(), 2))
        if fits:
            return next(iter(fits.values())).meaning
        for place in sorted(found - {*candidates}, key=str):
            raise self._unknown(place, of=len(found))
        if errors:
            raise errors[0]
        return StateArguments()  # the trace that follows says what is wrong

    def asked(self) -> StateArguments:
        """What becomes of the arguments that the user says are state."""
        places = self.plain.state_argnums or ()
        leaves, treedef = self._leaves(sorted(places)), jax.tree.structure(self.args)
        found = self.plain.find(leaves, treedef, self.axes, None)
        return found or StateArguments(places, by_hand=True)

    def call(self, meaning: StateArguments) -> LocalCall:
        """The call, where this is what its arguments are."""
        states, batch = self.plain.divided(self.args, meaning)
        leaves, stored = self._states(states, meaning.arguments)
        treedef = jax.tree.structure(states)
        batch_leaves, split = self._batch(batch, leaves, treedef)
        arrays = [*jax.tree.leaves(states), *jax.tree.leaves(batch)]
        count = len(leaves)
        for x, leaf, sharding in zip(arrays[:count], leaves, stored, strict=True):
            check_split(x, leaf, sharding, self.axes)
        every = zip(arrays, (*leaves, *batch_leaves), (*stored, *split), strict=True)
        for i, (x, leaf, sharding) in enumerate(every):
            what = "state" if i < count else "batch"
            check_same(x, leaf, sharding, self.axes, what)
        return LocalCall(
            Side(leaves, stored, treedef),
            Side(batch_leaves, split, jax.tree.structure(batch)),
            arrays,
        )

    def _leaves(self, places: Sequence[Position]) -> list[Leaf]:
        """The leaves of all arguments, on the shapes that they have if these are
        state."""
        guess = StateArguments(tuple(places))
        states, batch = self.plain.divided(self.args, guess)
        leaves, _ = self._states(states, guess.arguments)
        rows, _ = self._batch(batch, leaves, jax.tree.structure(states))
        known, rest, out = iter(leaves), iter(rows), []
        for place, argument in self._in_order():
            of = known if place in places else rest
            out += [next(of) for _ in jax.tree.leaves(argument)]
        local, _ = leaves_of(self.args, "argument")
        return [
            replace(own, aval=leaf.aval) for own, leaf in zip(local, out, strict=True)
        ]

    def _in_order(self) -> list[tuple[Position, Any]]:
        """The arguments in the order of their leaves."""
        given = by_place(self.args).items()
        return sorted(given, key=lambda item: (isinstance(item[0], str), item[0]))

    def _states(
        self, states: tuple[Any, ...], places: Sequence[Position]
    ) -> tuple[tuple[Leaf, ...], tuple[Sharding, ...]]:
        """The leaves of the states on whole shapes, and how they are stored."""
        local, _ = leaves_of(states, "state")
        by_number = sorted(places, key=lambda place: (isinstance(place, str), place))
        order = self.plain.state_argnums or by_number
        found = [
            self._stored(place, state, order.index(place), len(places))
            for place, state in zip(places, states, strict=True)
        ]
        shapes = [shape for one in found for shape in one.shapes]
        leaves = tuple(with_shape(x, s) for x, s in zip(local, shapes, strict=True))
        return leaves, tuple(s for one in found for s in one.shardings)

    def _stored(self, place: Position, state: Any, number: int, of: int) -> Stored:
        """How one state is stored."""
        if not jax.tree.leaves(state):
            return Stored((), ())
        readings = self._readings(state, number, of)
        if len(readings) == 1:
            return readings[0]
        raise self._unknown(place, of)

    def _readings(self, state: Any, number: int = 0, of: int = 1) -> list[Stored]:
        partition = self.plain.partition
        return self.states.readings(state, self.axes, partition, number, of)

    def _unknown(self, place: Position, of: int = 1) -> ShardingError:
        state, name = by_place(self.args)[place], self.plain.name(place)
        what = "the state" if of == 1 else f"argument {place} ('{name}')"
        return unknown_state(what, state, self._readings(state), self.states)

    def _batch(
        self, batch: Rest, states: Sequence[Leaf], treedef: Any
    ) -> tuple[tuple[Leaf, ...], tuple[Sharding, ...]]:
        """The batch's leaves on global shapes, and how they are split."""
        local, _ = leaves_of(batch, "batch")
        same = [same_over(x, self.axes) for x in jax.tree.leaves(batch)]
        split = self.plain.split(batch, local, self.axes, (states, treedef), same)
        leaves = []
        for leaf, sharding in zip(local, split, strict=True):
            shape = list(leaf.aval.shape)
            for dim in range(len(shape)):
                for axis in axes_of(sharding, dim):
                    shape[dim] *= self.axes.sizes[axis]
            leaves.append(with_shape(leaf, tuple(shape)))
        return tuple(leaves), split

    def _refuse(self, one: "_Reading", other: "_Reading") -> NoReturn:
        """Raises for a call that can be read in two ways."""
        first, second, lines = iter(one.leaves), iter(other.leaves), ""
        for p, argument in self._in_order():
            count = range(len(jax.tree.leaves(argument)))
            x, y = ([next(of).aval.shape for _ in count] for of in (first, second))
            if x != y:
                lines += (
                    f"  argument {p} ('{self.plain.name(p)}') may be the shards of a "
                    f"state of shapes {x}, or rows of {y}\n"
                )
        raise ShardingError(
            f"it cannot be told which arguments of {step_name()} are its state.\n"
            f"{lines}{called()}"
            f"Pass {argnums_text(one.places)} to fully_shard if it is state, "
            f"{argnums_text(other.places)} if it is of the batch."
            f"{positions_advice(one.places)}"
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the arguments of a call may be.

    Attributes:
      leaves: the leaves of all arguments, on whole shapes.
      places: those whose shapes are those of states that the step was given.
      meaning: which of them are state, as a trace on these shapes says.
    """

    leaves: list[Leaf]
    places: tuple[Position, ...]
    meaning: StateArguments


def _types(leaves: Sequence[Leaf]) -> Any:
    return tuple((x.aval.shape, x.aval.dtype) for x in leaves)


def _subsets(places: Sequence[Position]) -> list[tuple[Position, ...]]:
    """What may be state among these, the most first; of many, all or all but some."""
    counts = range(len(places), 0, -1)
    every = (s for k in counts for s in itertools.combinations(places, k))
    return list(itertools.islice(every, LOCAL_READINGS))
