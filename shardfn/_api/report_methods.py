"""What a sharded step says of itself without running: its plan, its program, and what
it would take on other machines.

In: the step's arguments, arrays or shapes. Out: a lowered step, a plan or a report.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardfn._api.aot import report_on
from shardfn._api.planner import describe
from shardfn._api.state_methods import StateMethods
from shardfn._api.static_arguments import advises_binding
from shardfn._api.stored_dimensions import dimensions_of, with_advice
from shardfn._core.call_arguments import Rest, StateArguments
from shardfn._core.errors import (
    ShardingError,
    called,
    names_step,
)
from shardfn._core.recent import Recent
from shardfn.analysis import targets
from shardfn.analysis.plan import Plan
from shardfn.analysis.report import Report
from shardfn.storage._arriving_memory import memory_notes


@dataclass(eq=False, repr=False)
class ReportMethods(StateMethods):
    """The methods of a `ShardedStep` that run nothing."""

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
        return step.programs.lower(*step._divide(args, named))

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
        step.programs.choose_memories(states, batch)
        leaves, treedef = self.storage.leaves(states)
        planned = step.programs.planned(leaves, treedef, batch)
        notes = (*planned.notes, *memory_notes(self.storage, states))
        return describe(with_advice(replace(planned, notes=notes)))

    @names_step
    @advises_binding
    def best_dimensions(self, *args: Any, **named: Any) -> dict[str, dict[str, int]]:
        """The dimensions on which leaves of the state are best stored for this use.

        Where leaves are stationary, what moves depends on the dimension that each is
        split on. `init` and `shard` choose it by the leaf's shape alone, since they do
        not know the batch. This one plans the step with leaves stored on each of their
        dimensions, and takes those with which the whole step sends least:
        `fully_shard(step, mesh, shard=step.best_dimensions(state, batch))` stores them
        so, as `fully_shard(step, mesh, shard_for=(state, batch))` does by itself.
        Evaluations of the same state take the same `shard=`.

        Args:
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored.
          **named: those of them that are passed by name.

        Returns:
          For `shard=`: by the path of each leaf that is best stored otherwise, the mesh
          axis and the dimension. Leaves whose dimension `shard=` asks for already are
          not among them. Empty where less than a fifth of the bytes is saved, as in
          ordinary training.
        """
        step, args, named = self.as_pure(args, named)
        states, batch = step._divide(args, named)
        leaves, treedef = self.storage.leaves(states)
        return dimensions_of(step.programs.planned(leaves, treedef, batch))[0]

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
            `"h100:64"`.
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
          ShardingError: the step cannot be sharded so, or the compiler finds that it
            does not fit.
          ValueError: no such target, or its devices form no such mesh.
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
        leaves, treedef = self.storage.leaves(states, undecided=True)
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

    def as_pure(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple["ReportMethods", tuple[Any, ...], dict[str, Any]]:
        """The step as a pure function, and its arguments for it."""
        return self, args, named

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
