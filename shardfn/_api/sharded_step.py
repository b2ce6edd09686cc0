"""A training step on a sharded state: how it is called, planned and lowered.

In: the plain step and how its state is stored. Out: a callable like the step.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax

from shardfn._api.call_arguments import by_position, state_names
from shardfn._api.call_cache import Division, Ready, StoredKind, types_of
from shardfn._api.compiled_steps import Programs, caches_apart, given
from shardfn._api.first_run import check_first_run
from shardfn._api.known_arrays import last_states
from shardfn._api.methods import Known, Method, binds, bound_to
from shardfn._api.nnx_modules import Call, call_of, has_modules
from shardfn._api.report_methods import ReportMethods
from shardfn._api.state_methods import is_traced
from shardfn._api.static_arguments import advises_binding
from shardfn._api.static_kinds import StaticKinds
from shardfn._core import compat
from shardfn._core.call_arguments import Named, Rest
from shardfn._core.errors import ShardingError, names_step
from shardfn._core.limits import BATCH_KINDS
from shardfn._core.recent import Recent
from shardfn._core.static_leaves import (
    close_call,
    has_static,
    open_static,
    returns_closed,
)
from shardfn._trace.purity import leaked_tracer
from shardfn.storage._arriving_memory import check_memories
from shardfn.storage._leaves import leaves_of

VERIFY = ("off", "warn", "error")

P = ParamSpec("P")
R = TypeVar("R")
Own = ParamSpec("Own")
"""The parameters of a method but the object."""


def _recent() -> Any:
    return field(default_factory=lambda: Recent(BATCH_KINDS), repr=False)


@dataclass(eq=False, repr=False)
class ShardedStep(ReportMethods, Generic[P, R]):
    """A training step on a sharded state; `fully_shard` makes it, and it is called like
    the step that it was made from.

    Attributes:
      programs: the plain step, how its state is stored, and what is compiled of it.
      verify: what to do if the compiled step is not as planned: one of `VERIFY`.
    """

    verify: str = "off"
    _ready: Recent[Any, Ready] = _recent()
    _divisions: Recent[Any, Division | None] = _recent()
    _checked: Recent[Any, bool] = _recent()
    _bound: Known = field(default_factory=dict, repr=False)
    _owner: Any = None
    _closed: "list[ShardedStep[..., Any]]" = field(default_factory=list, repr=False)
    _static: StaticKinds = field(default_factory=StaticKinds, repr=False)
    _in_place: Recent[Any, "ShardedStep[..., Any] | None"] = _recent()

    @overload
    def __get__(self, owner: None, of: Any = None) -> "ShardedStep[P, R]": ...

    @overload
    def __get__(
        self: "ShardedStep[Concatenate[Any, Own], R]", owner: object, of: Any = None
    ) -> "ShardedStep[Own, R]": ...

    def __get__(self, owner: Any, of: Any = None) -> "ShardedStep[..., Any]":
        """The step as a method of an object, which is no argument: it is read when the
        step is traced."""
        function = self.plain.step
        if owner is None or not binds(function):
            return self

        def make(method: Method) -> ShardedStep:
            return self._like(method)

        step = replace(bound_to(owner, function, self._bound, make), _owner=owner)
        functools.update_wrapper(step, MethodType(function, owner), updated=())
        return step

    def __repr__(self) -> str:
        if self._closed and not self.plain.found:
            return repr(self._closed[0])
        sizes = zip(self.storage.axes.names, self.storage.axes.sizes, strict=True)
        over = ", ".join(f"{axis}={size}" for axis, size in sizes)
        name = getattr(self.plain.step, "__name__", "step")
        newest = {key: meaning for (key, _), meaning in self.plain.found.items()}
        found = (m.notes[0] for m in newest.values() if m.notes)
        unused = (
            f"{axis}={size} unused"
            for planned in self.plain.plans.values()
            for axis, size in planned.unused
        )
        modules = (
            f"updates {', '.join(names)} in place"
            for (_, names, _), step in self._in_place.items()
            if step is not None
        )
        known = dict.fromkeys((f"{name} over {over}", *found, *modules, *unused))
        return f"ShardedStep({'; '.join(known)})"

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options, set by `fully_shard` and by the user there, on CPUs his; a
        plan may ask for more, which a report shows."""
        return self.programs.options()

    # Running

    @names_step
    @advises_binding
    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        """Runs the step: state and batch in, the new state, stored, and the rest out.

        Args:
          *args: the step's arguments. A state that is not stored yet is placed first;
            batch arrays have shape `[B, ...]` and are split over the mesh.
          **named: those of them that are passed by name; the same program runs.

        Raises:
          ShardingError: the step or its arguments cannot be sharded, or the compiled
            step is not as planned and `verify` is `"error"`; the message says which
            leaf or line, and what to do. The state stays usable.
        """
        if has_modules(args, named) and (of_modules := self._modules(args, named)):
            step, call = of_modules
            positional, by_name = call.arguments
            return call.hand_back(step(*positional, **by_name))
        given_args = tuple(by_position(self.plain.step, args, named))
        flat, tree = jax.tree.flatten(given_args)
        division = self._divisions.find(tree)
        state, flat_batch = division.divide(flat) if division else ([], [])
        key = self._key(division, flat_batch) if division else None
        ready = None if key is None else self._ready.find(key)
        stored, known = (None, None) if ready is None else ready.arrays(state)
        placed = None if ready is None else ready.place(flat_batch)
        if ready is None or stored is None or placed is None:
            if has_static(given_args):
                step, closed, by_name = self._on_closed(args, named)
                return open_static(step(*closed, **by_name))
            states, batch = self._divide(given_args, {})
            flat_batch, known = jax.tree.leaves(batch), None
            ready, stored, placed = self._prepare(states, batch)
            new = Division.of(tree, batch.meaning.arguments)
            if division is None or new is None or not new.is_like(division):
                division = self._divisions[tree] = new
            key = self._key(division, flat_batch) if division else None
            if key is not None:
                self._ready[key] = ready
        try:
            if ready.donates:
                stored = ready.apart(stored, placed, known)
                placed = caches_apart(ready.rest, placed, flat_batch)
            out = ready.run(*given(stored, ready.returned, ready.rest, placed))
        except jax.errors.UnexpectedTracerError as error:
            raise leaked_tracer() from error
        except RuntimeError as error:
            if type(error) is RuntimeError and ready.any_deleted(stored):
                self._prepare(*self._divide(given_args, {}))  # says which leaf
            raise
        if ready.donates and known is not None:
            # Before the new state is known: this frees an object for each leaf, and
            # Python collects garbage whenever there are some hundred more than before.
            last_states.forget(known)
            known = None
        return ready.hand_back(out, self.storage, flat_batch, stored)

    def as_pure(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple["ShardedStep[..., Any]", tuple[Any, ...], dict[str, Any]]:
        """The step and its arguments, with variables in place of modules that it
        updates in place, and leaves that are no arrays static.

        Args:
          args: the step's arguments by position.
          named: those passed by name.

        Returns:
          A step that is a pure function, and the same arguments for it.
        """
        if has_static((args, named)):
            step, args, named = self._on_closed(args, named)
            return step.as_pure(args, named)
        if has_modules(args, named) and (found := self._modules(args, named)):
            step, call = found
            return step, *call.arguments
        return self, args, named

    def _on_closed(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple["ShardedStep[..., Any]", tuple[Any, ...], dict[str, Any]]:
        """The step on closed arguments, which returns them closed, and those."""
        if not self._closed:
            self._closed.append(self._like(returns_closed(self.plain.step)))
        args, named = close_call(args, named)
        self._static.check((args, named))
        return self._closed[0], args, named

    def _like(self, step: Any, *states: int) -> "ShardedStep[..., Any]":
        """Another step with these options; `states` are where its state is."""
        plain, of = self.plain.of(step), self.programs
        plain = replace(plain, state_argnums=states) if states else plain
        storage = of.storage
        if (known := state_names(step, plain.state_argnums)) != storage.names:
            storage = replace(storage, names=known)
        own = Programs(plain, storage, of.donate, of.asked, of.latencies)
        return ShardedStep(own, self.verify)

    def _modules(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple["ShardedStep[..., Any]", Call] | None:
        """For a call with modules of nnx: the step on their variables, and the call;
        None if the step returns the modules, as a function of pytrees does."""
        call = call_of(self.plain.step, args, named)
        if has_static(call.others):  # closed first
            return None
        key = call.positions, tuple(call.modules), jax.tree.structure((args, named))
        if key not in self._in_place and self.plain.state_argnums is None:
            found = self._on_variables(call)
            if found is None:  # whatever is wrong with this call is that of no other
                return None
            self._in_place[key] = found[0]
        step = self._in_place.get(key)
        return None if step is None else (step, call)

    def _on_variables(self, call: Call) -> tuple["ShardedStep[..., Any] | None"] | None:
        """The step on the variables, if it updates them in place; None where it cannot
        be traced."""
        step = self._like(call.pure(self.plain.step), 0)
        positional, named = call.arguments
        given = (*positional, Named(named)) if named else positional
        axes, mesh = self.storage.axes, self.storage.given.abstract_mesh
        try:
            traced = step.plain.traced(*leaves_of(given, "argument"), axes, mesh)
        except ShardingError:  # a leaf that is no array, which is said elsewhere
            return None
        if traced is None:
            return None
        if call.comes_back(traced[1].out):
            return (None,)
        call.check_others(traced[1].out)
        return (step,)

    def _prepare(
        self, states: tuple[Any, ...], batch: Rest
    ) -> tuple[Ready, list[Any], list[Any]]:
        """The long way of a call: checks and places its leaves.

        Returns:
          What later calls may skip this for, the state's leaves and the batch's.
        """
        storage = self.storage
        self.programs.choose_memories(states, batch)
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        known = storage.leaves(states)
        split = self.plain.split(batch, batch_leaves, storage.axes, known)
        whole = is_traced((states, batch))
        check_memories(storage, states)
        stored, leaves, treedef = storage.place(states, whole)
        placed = storage.place_batch(batch, batch_leaves, split)
        kinds = [
            StoredKind.of(x, storage.stored_aval(x, s)) for x, s in storage.each(leaves)
        ]
        returned = batch.meaning.returned(treedef)
        padded = (i for i, k in enumerate(kinds) if k.is_padded and not whole)
        run_on = given(stored, returned, batch_tree, placed)
        kind = batch_leaves, batch_tree
        jitted = functools.partial(
            self.programs.jitted, leaves, treedef, kind, batch.meaning, run_on, whole
        )
        types = tuple((x.aval, x.auto) for x in (*leaves, *batch_leaves))
        around = storage.current_mesh, compat.configuration()
        program = treedef, batch_tree, types, *around
        if not self._checked.find(program):
            rest = jax.tree.unflatten(batch_tree, placed)
            plan = functools.partial(self.programs.planned, leaves, treedef, rest)
            check_first_run(
                lambda: jitted().lower(*run_on), plan, self.mesh, self.verify, whole
            )
            if whole:
                self.programs.warn_of_options(plan())
            else:
                self._checked[program] = True
        ready = Ready(
            run=jitted(),
            kinds=kinds,
            returned=returned,
            padded=tuple(padded),
            batch=tuple(
                (storage.named(leaf, s), not leaf.aval.shape)
                for leaf, s in zip(batch_leaves, split, strict=True)
            ),
            rest=batch_tree,
            donates=self.programs.donate and not whole,
            without_values=any(k.aval.dtype == jax.dtypes.float0 for k in kinds),
        )
        return ready, stored, placed

    def _key(self, division: Division, batch: Sequence[Any]) -> Any:
        """What calls of one structure have in common that run the same compiled step,
        but the types of the state; None if that is not known at once."""
        types = None if compat.is_tracing() else types_of(batch)
        if types is None:
            return None
        settings = None if self.verify == "off" else compat.configuration()
        debugs = compat.checks_values()
        return division, types, self.storage.current_mesh, settings, debugs
