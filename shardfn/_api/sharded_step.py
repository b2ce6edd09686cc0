"""A training step on a sharded state: how it is called, planned and lowered.

In: the plain step and how its state is stored. Out: a callable like the step.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax

from shardfn._api.aot import report_on
from shardfn._api.call_arguments import by_position
from shardfn._api.call_cache import Division, Kind, Ready, types_of
from shardfn._api.compiled_steps import Programs, caches_apart, given
from shardfn._api.methods import Known, Method, binds, bound_to
from shardfn._api.nnx_modules import Call, call_of, has_modules
from shardfn._api.planner import describe
from shardfn._api.state_methods import StateMethods, is_traced
from shardfn._api.static_arguments import advises_binding
from shardfn._core import compat, processes
from shardfn._core.call_arguments import Named, Rest, StateArguments
from shardfn._core.errors import (
    ShardingError,
    VerificationWarning,
    called,
    names_step,
    step_name,
)
from shardfn._core.limits import BATCH_KINDS
from shardfn._core.recent import Recent
from shardfn._lowering.planned_program import Planned
from shardfn._trace.purity import leaked_tracer
from shardfn.analysis import targets
from shardfn.analysis._program_hash import listing_of
from shardfn.analysis.plan import Plan
from shardfn.analysis.report import Report

VERIFY = ("off", "warn", "error")

P = ParamSpec("P")
R = TypeVar("R")
Own = ParamSpec("Own")
"""The parameters of a method but the object."""


@dataclass(eq=False, repr=False)
class ShardedStep(StateMethods, Generic[P, R]):
    """A training step on a sharded state; `fully_shard` makes it, and it is called like
    the step that it was made from.

    Attributes:
      programs: the plain step, how its state is stored, and what is compiled of it.
      verify: what to do if the compiled step is not as planned: one of `VERIFY`.
    """

    verify: str = "off"
    _ready: Recent[Any, Ready] = field(
        default_factory=lambda: Recent(BATCH_KINDS), repr=False
    )
    _divisions: Recent[Any, Division | None] = field(
        default_factory=lambda: Recent(BATCH_KINDS), repr=False
    )
    _checked: Recent[Any, bool] = field(
        default_factory=lambda: Recent(BATCH_KINDS), repr=False
    )
    _bound: Known = field(default_factory=dict, repr=False)
    _owner: Any = None
    _in_place: Recent[Any, "ShardedStep[..., Any] | None"] = field(
        default_factory=lambda: Recent(BATCH_KINDS), repr=False
    )

    @overload
    def __get__(self, owner: None, of: Any = None) -> "ShardedStep[P, R]": ...

    @overload
    def __get__(
        self: "ShardedStep[Concatenate[Any, Own], R]", owner: object, of: Any = None
    ) -> "ShardedStep[Own, R]": ...

    def __get__(self, owner: Any, of: Any = None) -> "ShardedStep[..., Any]":
        """The step as a method of an object, which is read when the step is traced, not
        an argument: state and batch are all that is sharded."""
        function = self.plain.step
        if owner is None or not binds(function):
            return self

        def make(method: Method) -> ShardedStep:
            own, of = self.plain.of(method), self.programs
            programs = Programs(own, of.storage, of.donate, of.asked)
            return ShardedStep(programs, self.verify)

        step = replace(bound_to(owner, function, self._bound, make), _owner=owner)
        functools.update_wrapper(step, MethodType(function, owner), updated=())
        return step

    def __repr__(self) -> str:
        sizes = zip(self.storage.axes.names, self.storage.axes.sizes, strict=True)
        over = ", ".join(f"{axis}={size}" for axis, size in sizes)
        name = getattr(self.plain.step, "__name__", "step")
        found = (m.notes[0] for m in self.plain.found.values() if m.notes)
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
        """Compiler options, set by `fully_shard` and by the user there: names and
        values of XLA's options. Empty on CPUs, unless the user names some."""
        return self.programs.options

    # Running

    @names_step
    @advises_binding
    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        """Runs the step: state and batch in, the new state, stored, and the rest out.

        Args:
          *args: the step's arguments. A state that is not stored yet is placed first;
            batch arrays have shape `[B, ...]` and are split over the mesh.
          **named: those of them that are passed by name; the same program runs.

        Returns:
          What the step returns.

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
        found = None if ready is None else ready.arrays(state)
        placed = None if ready is None else ready.place(flat_batch)
        if ready is not None and found is not None and placed is not None:
            stored, known = found
        else:
            states, batch = self._divide(given_args, {})
            flat_batch, known = jax.tree.leaves(batch), None
            ready, stored, placed = self._prepare(states, batch)
            new = Division.of(tree, batch.meaning.arguments)
            if division is None or new is None or not new.is_like(division):
                division = self._divisions[tree] = new
            key = self._key(division, flat_batch) if division else None
            if key is not None:
                self._ready[key] = ready
        if ready.donates:
            stored = ready.apart(stored, placed, known)
            placed = caches_apart(ready.rest, placed, flat_batch)
        try:
            out = ready.run(*given(stored, ready.returned, ready.rest, placed))
        except jax.errors.UnexpectedTracerError as error:
            raise leaked_tracer() from error
        return ready.hand_back(out, self.storage, flat_batch, stored, known)

    @names_step
    @advises_binding
    def lower(self, *args: Any, **named: Any) -> jax.stages.Lowered:
        """Lowers the step; the mesh may be of devices that are not there.

        Args:
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored.
          **named: those of them that are passed by name.

        Returns:
          The lowered step, ready for `.compile()`.
        """
        step, args, named = self.as_pure(args, named)
        return step.programs.traced(*step._divide(args, named)).lower()

    @names_step
    @advises_binding
    def plan(self, *args: Any, **named: Any) -> Plan:
        """What the step moves: every collective with bytes, dtype, phase and parameter.

        Args:
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored.
          **named: those of them that are passed by name.

        Returns:
          A frozen plan; print it, compare it, or read its fields.
        """
        step, args, named = self.as_pure(args, named)
        states, batch = step._divide(args, named)
        leaves, treedef = self.storage.leaves(states)
        return describe(step.programs.planned(leaves, treedef, batch))

    @names_step
    def on(
        self,
        target: str,
        *args: Any,
        mesh_shape: tuple[int, ...] | None = None,
        progress: Callable[[str], None] = lambda stage: None,
        **named: Any,
    ) -> Report:
        """What the step would take on machines that are not there.

        Compiles it for them, which needs the extra `aot` and no accelerator, and takes
        as long as compiling there.

        Args:
          target: a name as in `shardfn.analysis.targets.target`, such as
            `"h100:1x8x8"`.
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored;
            the batch is the global one.
          mesh_shape: sizes of the mesh axes there; may be left out if there is only one
            axis, or if the target has as many devices as the mesh.
          progress: called with each stage when it starts.
          **named: arguments of the step that are passed by name.

        Returns:
          A frozen report: memory, bytes on the wire, whether the program is as planned,
          and an estimate of time. Print it, or read its fields.

        Raises:
          ShardingError: the step cannot be sharded so, the devices form no such
            mesh, or the compiler finds that it does not fit.
          ValueError: no such target.
          ImportError: the target's compiler is not installed.
        """
        names, sizes = self.mesh.axis_names, tuple(self.mesh.shape.values())
        count = targets.target(target).num_devices
        if mesh_shape is None and len(names) > 1:
            if count != self.mesh.size:
                raise ShardingError(
                    f"target {target!r} has {count} devices and the mesh {names} has "
                    f"shape {sizes}.\n{called()}"
                    "Pass mesh_shape=, one size per mesh axis."
                )
            mesh_shape = sizes
        progress("describing devices")
        there = targets.mesh(target, names, mesh_shape)
        step, args, named = self.as_pure(args, named)
        states, batch = step._divide(args, named)
        leaves, treedef = self.storage.leaves(states)
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        moved = replace(
            step.programs, storage=self.storage.on(there), _jitted=Recent(1)
        )
        return report_on(
            targets.target(target),
            moved,
            jax.tree.unflatten(treedef, moved.storage.abstract(leaves)),
            jax.tree.unflatten(batch_tree, moved.storage.abstract(batch_leaves)),
            progress,
        )

    # Inside

    def _divide(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Rest]:
        """The state arguments of a call, and the others."""
        axes, mesh = self.storage.axes, self.storage.given.abstract_mesh
        return self.plain.divide(args, named, axes, mesh)

    def meaning_of(self, *args: Any) -> StateArguments:
        """Which of a call's arguments are state, and where they come back.

        Args:
          *args: the step's arguments, whole or stored.

        Returns:
          What they mean, by position.
        """
        return self._divide(args, {})[1].meaning

    def as_pure(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple["ShardedStep[..., Any]", tuple[Any, ...], dict[str, Any]]:
        """The step and its arguments, with variables in place of modules that it
        updates in place.

        Args:
          args: the step's arguments by position.
          named: those passed by name.

        Returns:
          A step that is a pure function, and the same arguments for it.
        """
        if has_modules(args, named) and (found := self._modules(args, named)):
            step, call = found
            return step, *call.arguments
        return self, args, named

    def _modules(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple["ShardedStep[..., Any]", Call] | None:
        """For a call with modules of nnx: the step on their variables, and the call;
        None if the step returns the modules, as a function of pytrees does."""
        call = call_of(self.plain.step, args, named)
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
        plain = replace(self.plain.of(call.pure(self.plain.step)), state_argnums=(0,))
        positional, named = call.arguments
        given = (*positional, Named(named)) if named else positional
        axes, mesh = self.storage.axes, self.storage.given.abstract_mesh
        traced = plain.traced(given, axes, mesh)
        if traced is None:
            return None
        if call.comes_back(traced[1].out):
            return (None,)
        call.check_others()
        of = self.programs
        programs = Programs(plain, of.storage, of.donate, of.asked)
        return (ShardedStep(programs, self.verify),)

    def _prepare(
        self, states: tuple[Any, ...], batch: Rest
    ) -> tuple[Ready, list[Any], list[Any]]:
        """The long way of a call: checks and places its leaves.

        Returns:
          What later calls may skip this for, the state's leaves and the batch's.
        """
        storage = self.storage
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        known = storage.leaves(states)
        split = self.plain.split(batch, batch_leaves, storage.axes, known)
        whole = is_traced((states, batch))
        stored, leaves, treedef = storage.place(states, whole)
        placed = storage.place_batch(batch, batch_leaves, split)
        kinds = [Kind.of(x, storage.stored_aval(x, s)) for x, s in storage.each(leaves)]
        returned = batch.meaning.returned(treedef)
        padded = (i for i, k in enumerate(kinds) if k.is_padded and not whole)
        ready = Ready(
            run=self.programs.jitted(
                leaves, treedef, (batch_leaves, batch_tree), batch.meaning, whole
            ),
            kinds=kinds,
            returned=returned,
            padded=tuple(padded),
            batch=tuple(
                (storage.named(leaf, s), not leaf.aval.shape)
                for leaf, s in zip(batch_leaves, split, strict=True)
            ),
            rest=batch_tree,
            donates=self.programs.donate and not whole,
        )
        types = tuple((x.aval, x.auto) for x in (*leaves, *batch_leaves))
        program = (
            treedef,
            batch_tree,
            types,
            storage.current_mesh,
            compat.configuration(),
        )
        if not self._checked.find(program):
            is_real = not whole
            rest = jax.tree.unflatten(batch_tree, placed)
            planned = functools.partial(self.programs.planned, leaves, treedef, rest)
            run_on = given(stored, returned, batch_tree, placed)
            lowered = functools.partial(ready.run.lower, *run_on)
            if self.verify != "off" and is_real:
                self._check_compiled(lowered(), planned())
            group = processes.of(self.mesh.devices.flat)
            if len(group) > 1:
                with processes.meeting("planned the step", group):
                    made = planned()
                self._check_processes(made, group)
                if is_real:
                    with processes.meeting("compiled the step", group):
                        lowered().compile()
            if is_real:
                self._checked[program] = True
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

    def _check_processes(self, planned: Planned, group: Sequence[int]) -> None:
        """Raises if another process of a group is about to run another plan."""
        plan = describe(planned)
        lines = str(plan), f"program {plan.program}", *listing_of(planned.program)
        processes.assert_processes_agree("plans", "\n".join(lines), group)

    def _check_compiled(self, lowered: jax.stages.Lowered, planned: Planned) -> None:
        """Warns or raises if the compiled step is not as planned. The call that follows
        finds the step compiled."""
        checked = describe(planned, fingerprint=False).verify(lowered.compile())
        if checked.ok:
            return
        message = (
            f"the compiled {step_name()} is not as planned on "
            f"{self.mesh.devices.flat[0].device_kind}.\n{called()}"
            f"{checked.problems()}\n"
        )
        if self.verify == "error":
            raise ShardingError(f"{message}verify='warn' warns, and runs it as it is.")
        warnings.warn(f"{message}It runs as it is.", VerificationWarning, stacklevel=2)
