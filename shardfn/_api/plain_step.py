"""The user's step, and what its arguments mean.

In: the step as written for one device, and the options that describe it. Out: which
arguments are state, how the batch is split, and the planned step for given shapes.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardfn._api.argument_leaves import Side
from shardfn._api.batch_division import BatchDivision
from shardfn._api.call_arguments import (
    by_position,
    parameter_names,
    refuse_count,
    taking_named,
)
from shardfn._api.names_in_code import mentions
from shardfn._api.plan_warnings import warn_of
from shardfn._api.planner import plan_traced
from shardfn._api.tuning.tuned_options import TunedOptions
from shardfn._core import compat
from shardfn._core.call_arguments import (
    Position,
    Rest,
    StateArguments,
    by_place,
    rejoined,
    without,
)
from shardfn._core.control import Control
from shardfn._core.errors import ShardingError
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.limits import BATCH_KINDS
from shardfn._core.named_states import NamedStates
from shardfn._core.recent import Recent
from shardfn._core.sharding import Axes, Sharding
from shardfn._lowering.planned_program import Planned
from shardfn._trace.containers import classes_closed, closed_inside
from shardfn._trace.state_arguments import find_state
from shardfn._trace.state_texts import found_note, refuse_readings
from shardfn._trace.trace_step import CallTrace, failure, trace, trace_once
from shardfn.storage._arrives_stored import arrives_stored
from shardfn.storage._layout import layouts
from shardfn.storage._leaves import leaves_of

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A plain step.

    Attributes:
      step: the function that the user wrote.
      min_size: state leaves with fewer elements stay replicated.
      strict: whether a primitive without a rule is an error.
      state_argnums: positions of the state arguments; None to find them.
      batch_spec: prefix pytree of PartitionSpecs of the batch, or None.
      control: what is asked of the moves of state leaves.
      tuned: where options come from, if it is a file: it is of one program.
      plans: planned steps by structure, shapes and configuration of JAX.
      found: what arguments of some types are, as far as it had to be found.
      traces: the trace that found it, until it is planned.
      keys: which leaves of a batch are raw PRNG keys, by types; None if not known.
    """

    step: Step
    min_size: int
    strict: bool
    state_argnums: tuple[int, ...] | None
    batch_spec: Any
    control: Control = Control()
    tuned: TunedOptions | None = None
    plans: Recent[Any, Planned] = field(default_factory=lambda: Recent(BATCH_KINDS))
    found: Recent[Any, StateArguments] = field(
        default_factory=lambda: Recent(BATCH_KINDS)
    )
    traces: dict[Hashable, CallTrace] = field(default_factory=dict)
    keys: Recent[Hashable, frozenset[int] | None] = field(
        default_factory=lambda: Recent(BATCH_KINDS)
    )

    def of(self, step: Step) -> "PlainStep":
        """Another step with the same options."""
        options = self.min_size, self.strict, self.state_argnums, self.batch_spec
        return PlainStep(step, *options, self.control, self.tuned)

    def meaning(
        self,
        args: tuple[Any, ...],
        axes: Axes,
        mesh: jax.sharding.AbstractMesh | None = None,
    ) -> StateArguments:
        """Which of a call's arguments are state; `mesh` is the caller's."""
        names = tuple(parameter_names(self.step))
        given = StateArguments(
            (0,) if self.state_argnums is None else self.state_argnums,
            by_hand=self.state_argnums is not None,
            parameters=names,
        )
        try:
            leaves, treedef = leaves_of(args, "argument")
        except ShardingError:  # a leaf that is no array, which planning reports
            return given
        key = _key([leaf.aval for leaf in leaves], treedef, axes, mesh), ()
        if key not in self.found:
            found = self.find(leaves, treedef, axes, mesh)
            if found is None:  # whatever is wrong with this call is that of no other
                hints = failure(taking_named(self.step), leaves, treedef)
                return replace(given, hints=hints)
            self.found[key] = replace(found, parameters=names)
        found = self.found[key]
        stored = self.arriving_stored(args, found, axes)
        if stored:
            caches = (*found.written, *found.caches)
            note = found_note(self.titles(by_place(args)), {}, (), stored)
            found = replace(found, arguments=stored, results=(), caches=caches)
            found = replace(found, written=(), notes=(note,), hints=(note,), asks=False)
            self.found[key[0], stored] = found
        elif found.asks:
            pairs = dict(zip(found.arguments, found.places, strict=False))
            refuse_readings(self.titles(by_place(args)), pairs, (), True)
        return found

    def arriving_stored(
        self, args: Sequence[Any], found: StateArguments, axes: Axes
    ) -> tuple[Position, ...]:
        """The arguments that arrive stored, if those that were found to be state are
        others, and nothing comes back but what is written in place as a cache is."""
        only_caches = len(found.written) == len(found.places)
        if found.by_hand or not only_caches:
            return ()
        if found.is_forward_only and found.caches:
            return ()
        each = by_place(args).items()
        stored = tuple(p for p, x in each if arrives_stored(x, self.partition, axes))
        return () if found.arguments[0] in stored else stored

    def titles(self, places: Iterable[Position]) -> dict[Position, str]:
        """What to call arguments in messages."""
        return {
            p: str(p) + f" ('{self.name(p)}')" * (self.name(p) != p) for p in places
        }

    def partition(self, leaves: Sequence[Leaf], axes: Axes) -> tuple[Sharding, ...]:
        """How the leaves of a state are stored."""
        paths, avals = [x.path for x in leaves], [x.aval for x in leaves]
        found = layouts(paths, avals, axes, self.min_size, control=self.control)
        return tuple(layout.sharding for layout in found)

    def divide(
        self,
        args: Sequence[Any],
        named: Mapping[str, Any],
        axes: Axes,
        mesh: jax.sharding.AbstractMesh | None = None,
    ) -> tuple[tuple[Any, ...], Rest]:
        """The state arguments of a call, and the others.

        Args:
          args: the arguments passed by position.
          named: those passed by name.
          axes: the mesh axes.
          mesh: the mesh as the caller made it, whose shardings the step may name.
        """
        args = tuple(by_position(self.step, args, named))
        return self.divided(args, self.meaning(args, axes, mesh))

    def divided(
        self, args: tuple[Any, ...], meaning: StateArguments
    ) -> tuple[tuple[Any, ...], Rest]:
        """Arguments by position, divided as what they mean says."""
        given = by_place(args)
        if not all(place in given for place in meaning.arguments):
            refuse_count(given, meaning.arguments)
        states = tuple(given[place] for place in meaning.arguments)
        if len(states) > 1:
            states = NamedStates([self.name(p) for p in meaning.arguments], states)
        return states, Rest(without(args, meaning.arguments), meaning)

    def call(self, states: Sequence[Any], batch: Rest) -> Any:
        """Calls the plain step with its arguments in its own order."""
        return taking_named(self.step)(*rejoined(states, batch))

    def name(self, place: Position) -> str:
        """What the step calls an argument."""
        if isinstance(place, str):
            return place
        names = parameter_names(self.step)
        return names[place] if place < len(names) else str(place)

    def traced(
        self,
        leaves: Sequence[Leaf],
        treedef: Any,
        axes: Axes,
        mesh: jax.sharding.AbstractMesh | None,
    ) -> tuple[tuple[Any, ...], CallTrace] | None:
        """Abstract arguments, and the trace of the step on them, which is kept until
        the step is planned; None where it cannot be traced. Classes that take no
        abstract values are closed in it, and it is not kept.

        Args:
          leaves: those of all arguments.
          treedef: structure of the tuple of them.
          axes: the mesh axes.
          mesh: the mesh as the caller made it.
        """
        types, step = [leaf.aval for leaf in leaves], taking_named(self.step)
        try:
            avals = jax.tree.unflatten(treedef, types)
        except Exception:  # of a class of the user's
            avals = closed_inside(treedef, leaves)
            made = trace_once(classes_closed(step), avals, axes, mesh)
            return None if made is None else (avals, made)
        key = _key(types, treedef, axes, mesh)
        made = self.traces.get(key) or trace_once(step, avals, axes, mesh)
        if made is None:
            return None
        self.traces.clear()
        self.traces[key] = made
        return avals, made

    def find(
        self,
        leaves: Sequence[Leaf],
        treedef: Any,
        axes: Axes,
        mesh: jax.sharding.AbstractMesh | None,
    ) -> StateArguments | None:
        """Traces the step to find which arguments come back. None where it cannot be
        traced: the first is taken for the state, and planning says what is wrong."""
        found = self.traced(leaves, treedef, axes, mesh)
        if found is None:
            return None
        avals, made = found
        given = by_place(avals)
        devices = math.prod(axes.sizes) if self.batch_spec is None else 1
        found = self.titles(given), made.out, made.program, self.state_argnums
        return find_state(given, *found, devices)

    @property
    def split(self) -> Callable[..., tuple[Sharding, ...]]:
        """How each leaf of the batch is split: see `BatchDivision.shardings`."""
        division = BatchDivision(self.call, self.batch_spec, self.control, self.keys)
        return division.shardings

    def planned(
        self,
        state: Side,
        batch: Side,
        axes: Axes,
        mesh: jax.sharding.AbstractMesh | None = None,
    ) -> Planned:
        """The planned step for these arguments; traced once per shapes and structure,
        and per configuration of JAX, such as `jax.default_matmul_precision`.

        Args:
          state: the state arguments, on logical global shapes.
          batch: the other arguments, on global shapes.
          axes: the mesh axes.
          mesh: the mesh as the caller made it, if there is one.

        Returns:
          The planned step.
        """
        key = state.key, batch.key, axes, mesh, compat.configuration()
        if key not in self.plans:
            names = [leaf_name(leaf.path) for leaf in state.leaves]
            states, rest = state.avals, Rest(batch.avals, batch.treedef.node_data()[1])
            known = None
            if self.traces:  # in containers that take abstract values
                states, rest = state.opened, batch.opened
                types, structure = jax.tree.flatten(rejoined(states, rest))
                known = self.traces.pop(_key(types, structure, axes, mesh), None)
            traced = trace(
                self.call,
                states,
                rest,
                state.leaves,
                batch.shardings,
                axes,
                mesh,
                names_axes=lambda: mentions(self.step, axes.names),
                own=[self.control.of(x).per_device_state for x in names],
                known=known,
            )
            # Primitives are traced anew to expand them.
            with compat.at_top_level(), compat.broadcasts_ranks():
                planned = plan_traced(
                    traced,
                    state.leaves,
                    state.shardings,
                    batch.shardings,
                    axes,
                    self.min_size,
                    self.control,
                )
            if self.tuned is not None:
                self.tuned.check(traced.jaxpr, planned.state)
            warn_of(planned, self.strict)
            self.plans[key] = planned
        return self.plans[key]


def _key(
    avals: Sequence[jax.ShapeDtypeStruct],
    treedef: Any,
    axes: Axes,
    mesh: jax.sharding.AbstractMesh | None,
) -> Hashable:
    """What a trace on such arguments depends on."""
    types = ((x.shape, x.dtype, x.weak_type) for x in avals)
    return treedef, tuple(types), axes, mesh, compat.configuration()
