"""A training step on a sharded state: how it is called, planned, lowered and fed.

In: the plain step and how its state is stored. Out: a callable like the step.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn import _compat, _processes, targets
from shardfn._arguments import Leaf
from shardfn._auto import full_spec, made_shardings
from shardfn._errors import (
    ShardingError,
    VerificationWarning,
    called,
    names_step,
    step_name,
)
from shardfn._flops import count_flops
from shardfn._padding import remember, to_stored
from shardfn._plain_step import PlainStep, Side
from shardfn._plan import Plan
from shardfn._planner import Planned, describe
from shardfn._ready import Ready
from shardfn._report import Report, compile_for, memory_of, rates_of, stored_leaves
from shardfn._sharding import partition_spec
from shardfn._storage import Storage
from shardfn._timeline import play
from shardfn._trace import leaked_tracer

VERIFY = ("off", "warn", "error")


@dataclass(eq=False)
class ShardedStep:
    """A training step on a sharded state; `fully_shard` makes it, and it is called like
    the step that it was made from.

    Attributes:
      plain: the plain step, and what its arguments mean.
      storage: the mesh, and how states are stored on it.
      donate: whether the state's buffers are given to the result.
      verify: what to do if the compiled step is not as planned: one of `VERIFY`.
    """

    plain: PlainStep
    storage: Storage
    donate: bool
    verify: str = "off"
    _jitted: dict[Any, Any] = field(default_factory=dict, repr=False)
    _ready: dict[Any, Ready] = field(default_factory=dict, repr=False)
    _verified: set[Any] = field(default_factory=set, repr=False)

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
          ShardingError: the step or its arguments cannot be sharded, or the compiled
            step is not as planned and `verify` is `"error"`; the message says which
            leaf or line, and what to do. The state stays usable.
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
        return self._traced(args).lower()

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

    @names_step
    def on(
        self,
        target: str,
        *args: Any,
        mesh_shape: tuple[int, ...] | None = None,
        progress: Callable[[str], None] = lambda stage: None,
    ) -> Report:
        """What the step would take on machines that are not there.

        Compiles it for them, which needs the extra `aot` and no accelerator, and takes
        as long as compiling there.

        Args:
          target: a name as in `shardfn.targets.target`, such as `"h100:1x8x8"`.
          *args: the step's arguments, arrays or `ShapeDtypeStruct`s, whole or stored;
            the batch is the global one.
          mesh_shape: sizes of the mesh axes there; may be left out if there is only one
            axis, or if the target has as many devices as the mesh.
          progress: called with each stage when it starts.

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
        states, batch = self.plain.divide(args)
        leaves, treedef = self.storage.leaves(states)
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        moved = ShardedStep(self.plain, self.storage.on(there), self.donate)
        return moved._report(
            targets.target(target),
            jax.tree.unflatten(treedef, moved.storage.abstract(leaves)),
            jax.tree.unflatten(batch_tree, moved.storage.abstract(batch_leaves)),
            progress,
        )

    # State

    @names_step
    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Makes the state, sharded from birth, with the values of `init_fn(*args)`.

        Args:
          init_fn: pure function that returns the whole state. Splits over other mesh
            axes that it names, by `with_sharding_constraint` or as `out_shardings` of a
            `jax.jit`, are kept.
          *args: its arguments.

        Returns:
          The state, each leaf split as `shardings` says.
        """
        leaves, treedef = self.storage.leaves((self._made(init_fn, *args),))
        each = self.storage.each(leaves)

        def stored(*args: Any) -> list[jax.Array]:
            made = jax.tree.leaves(init_fn(*args))
            return [
                to_stored(jax.numpy.asarray(x), s, self.storage.axes)
                for x, (_, s) in zip(made, each, strict=True)
            ]

        named = [self.storage.named(leaf, s) for leaf, s in each]
        out = jax.jit(stored, out_shardings=named)(*args)
        self.storage.remember(out, leaves, treedef)
        return jax.tree.unflatten(treedef, out)[0]

    @names_step
    def shard(self, state: Any) -> Any:
        """Splits a whole state, which stays usable.

        Args:
          state: pytree of arrays, on the host or on any device.

        Returns:
          The same pytree, each leaf split as `shardings` says: over the mesh axis of
          `fully_shard`, and over other mesh axes as it comes in. A leaf that no
          dimension divides is stored padded, or flattened and padded.
        """
        stored, leaves, treedef = self.storage.place((state,))
        given = {id(x) for x in jax.tree.leaves(state)}
        stored = [jax.numpy.copy(x) if id(x) in given else x for x in stored]
        self.storage.remember(stored, leaves, treedef)
        return jax.tree.unflatten(treedef, stored)[0]

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
        if process is None:
            return self.storage.whole((state,))[0]
        whole = self.storage.whole_on(process, (state,))
        return None if whole is None else whole[0]

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
        leaves, treedef = self.storage.batch_leaves(batch)
        split = self.plain.split(batch, leaves, self.storage.axes, is_local=True)
        arrays = [
            jax.make_array_from_process_local_data(
                self.storage.named(leaf, sharding), numpy.asarray(x)
            )
            for x, leaf, sharding in zip(
                jax.tree.leaves(batch), leaves, split, strict=True
            )
        ]
        made = jax.tree.unflatten(treedef, arrays)
        return made[0] if len(made) == 1 else made

    @names_step
    def shardings(self, state: Any) -> Any:
        """The `NamedSharding` of every leaf, as stored.

        Args:
          state: a state or its `ShapeDtypeStruct`s, whole or stored.

        Returns:
          Pytree of `NamedSharding`.
        """
        leaves, treedef = self.storage.leaves((state,))
        named = [self.storage.named(x, s) for x, s in self.storage.each(leaves)]
        return jax.tree.unflatten(treedef, named)[0]

    # Inside

    def _traced(self, args: Sequence[Any]) -> Any:
        """The jitted step traced on abstract arguments."""
        states, batch = self.plain.divide(args)
        leaves, treedef = self.storage.leaves(states)
        stored = [self.storage.stored_aval(x, s) for x, s in self.storage.each(leaves)]
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        split = self.plain.split(batch, batch_leaves, self.storage.axes)
        placed = [
            self.storage.stored_aval(leaf, s)
            for leaf, s in zip(batch_leaves, split, strict=True)
        ]
        placed = jax.tree.unflatten(batch_tree, placed)
        return self._jit(leaves, treedef).trace(stored, placed)

    def _report(
        self,
        target: targets.Target,
        states: tuple[Any, ...],
        batch: tuple[Any, ...],
        progress: Callable[[str], None],
    ) -> Report:
        """The report of this step, whose mesh is of the target's devices."""
        storage = self.storage
        leaves, treedef = storage.leaves(states)
        progress("planning")
        plan = describe(self._planned(leaves, treedef, batch))
        progress("tracing")
        traced = self._traced(self.plain.arguments(states, batch))
        progress("compiling")
        compiled = compile_for(target, traced.lower())
        progress("reading the compiled program")
        text = compiled.as_text() or ""
        return Report(
            step=step_name(),
            target=target,
            plan=plan,
            verification=plan.verify(text),
            state=stored_leaves(leaves, storage.partition(leaves), storage.axes),
            memory=memory_of(compiled),
            flops=count_flops(traced.jaxpr.jaxpr),
            timeline=play(text, rates_of(target, storage.mesh)),
        )

    def _made(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """What `init_fn` returns, as `ShapeDtypeStruct`s with the shardings it gives
        them."""
        made = jax.eval_shape(init_fn, *args)
        if not self.storage.auto_sizes:
            return made
        leaves, treedef = jax.tree.flatten(made)
        given = made_shardings(jax.make_jaxpr(init_fn)(*args))
        return jax.tree.unflatten(
            treedef,
            [
                jax.ShapeDtypeStruct(
                    x.shape, x.dtype, weak_type=x.weak_type, sharding=sharding
                )
                for x, sharding in zip(leaves, given, strict=True)
            ],
        )

    def _prepare(
        self, states: tuple[Any, ...], batch: tuple[Any, ...]
    ) -> tuple[Ready, list[Any], list[Any]]:
        """The long way of a call: checks and places its leaves.

        Returns:
          What later calls may skip this for, the state's leaves and the batch's.
        """
        storage = self.storage
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        split = self.plain.split(batch, batch_leaves, storage.axes)
        stored, leaves, treedef = storage.place(states)
        placed = storage.place_batch(batch, batch_leaves, split)
        shapes = tuple(jax.numpy.shape(x) for x in stored)
        ready = Ready(
            run=self._jit(leaves, treedef),
            shapes=shapes,
            shardings=tuple(storage.named(x, s) for x, s in storage.each(leaves)),
            padded=storage.to_remember(shapes, leaves, treedef),
            batch_types=tuple((x.aval.shape, x.aval.dtype) for x in batch_leaves),
            batch_shardings=tuple(
                storage.named(leaf, s) if leaf.aval.shape else None
                for leaf, s in zip(batch_leaves, split, strict=True)
            ),
        )
        if self.verify != "off" and not any(map(_compat.is_traced, (*stored, *placed))):
            key = treedef, batch_tree, shapes, ready.batch_types
            if key not in self._verified:
                batch = jax.tree.unflatten(batch_tree, placed)
                planned = self._planned(leaves, treedef, batch)
                self._check_compiled(ready.run.lower(stored, batch), planned)
                self._verified.add(key)
        if _processes.count() > 1:
            self._check_processes(leaves, treedef, batch)
        self._ready[treedef, batch_tree] = ready
        return ready, stored, placed

    def _check_processes(
        self, leaves: tuple[Leaf, ...], treedef: Any, batch: tuple[Any, ...]
    ) -> None:
        """Raises if another process is about to run another plan."""
        plan = describe(self._planned(leaves, treedef, batch))
        _processes.assert_same("plans", f"{plan}\nprogram {plan.program}")

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

    def _planned(
        self, leaves: tuple[Leaf, ...], treedef: Any, batch: tuple[Any, ...]
    ) -> Planned:
        axes = self.storage.axes
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        split = self.plain.split(batch, batch_leaves, axes)
        return self.plain.planned(
            Side(leaves, self.storage.partition(leaves), treedef),
            Side(tuple(replace(x, auto=()) for x in batch_leaves), split, batch_tree),
            axes,
        )

    def _jit(self, leaves: tuple[Leaf, ...], treedef: Any) -> Any:
        """The jitted step on stored leaves, traced on the logical shapes of
        `leaves`."""
        key = treedef, tuple((leaf.aval.shape, leaf.auto) for leaf in leaves)
        if key not in self._jitted:

            def run(stored: list[jax.Array], batch: tuple[Any, ...]) -> Any:
                named = [
                    replace(leaf, aval=_like(x, leaf.aval.shape))
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
        given = self.storage.given

        def run(*args: jax.Array) -> list[jax.Array]:
            with jax.sharding.use_abstract_mesh(self.storage.mesh.abstract_mesh):
                return self._shard_map(planned)(*args)

        def typed(*args: jax.Array) -> list[jax.Array]:
            if not any(map(_compat.is_explicit, args)):
                return run(*args)
            specs = output_specs(planned)
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
            out = [
                made[j] if j in made else jax.numpy.zeros(shape, dtype)
                for j, (shape, dtype) in enumerate(outs)
            ]
            for j, leaf in enumerate(planned.state):
                if leaf.auto:
                    named = NamedSharding(self.storage.mesh, output_specs(planned)[j])
                    out[j] = jax.lax.with_sharding_constraint(out[j], named)
            return out

        return run


def output_specs(planned: Planned) -> list[PartitionSpec]:
    """The PartitionSpecs of a planned step's results on the mesh."""
    autos = [leaf.auto or () for leaf in planned.state]
    shardings = planned.body.output_shardings
    autos += [()] * (len(shardings) - len(autos))
    return [
        full_spec(s, auto, planned.axes)
        for s, auto in zip(shardings, autos, strict=True)
    ]


def _like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    weak = getattr(jax.typeof(x), "weak_type", False)
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=weak)
