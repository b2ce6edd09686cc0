"""The programs of one step: planned, traced and jitted once for each kind of state.

In: the plain step, and how its state is stored. Out: its plan, and the jitted function
of stored leaves.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardfn._api.argument_leaves import Side
from shardfn._api.offload_bound import offload_bound
from shardfn._api.plain_step import PlainStep
from shardfn._api.predicted_latencies import (
    Latencies,
    are_predicted,
    predicted_latencies,
)
from shardfn._api.shared_buffers import apart
from shardfn._core import compat
from shardfn._core.call_arguments import (
    Rest,
    StateArguments,
    joined,
    meaning_of,
    with_caches,
)
from shardfn._core.errors import OffloadWarning, called, step_name, warn
from shardfn._core.host_values import has_host_values
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.limits import BATCH_KINDS
from shardfn._core.memories import HOST, kind_of
from shardfn._core.offloading import OffloadChoice
from shardfn._core.recent import Recent
from shardfn._lowering.choose_offload import choose_offload
from shardfn._lowering.heap import heap_of
from shardfn._lowering.option_table import NETWORK_FLAG
from shardfn._lowering.planned_program import Planned
from shardfn._lowering.shard_map import on_mesh
from shardfn._lowering.xla_options import (
    Asked,
    compiler_options,
    elsewhere_key,
    needed_options,
    set_elsewhere,
)
from shardfn._schedule.delayed_sums import leaves_sums
from shardfn._schedule.heap import Heap
from shardfn._schedule.order_gathers import orders_gathers
from shardfn._trace.purity import calls_the_host
from shardfn.storage._placement import Storage


@dataclass(frozen=True, slots=True, eq=False)
class Programs:
    """The programs of a step on one mesh.

    Attributes:
      plain: the plain step.
      storage: the mesh, and how states are stored on it.
      donate: whether the state's buffers are given to the result.
      asked: what the user asks of the compiler.
      latencies: whose figures its scheduler goes by.
    """

    plain: PlainStep
    storage: Storage
    donate: bool
    asked: Asked = None
    latencies: Latencies = "xla"
    _jitted: Recent[Any, Any] = field(
        default_factory=lambda: Recent(BATCH_KINDS), repr=False
    )

    def planned(self, leaves: tuple[Leaf, ...], treedef: Any, batch: Rest) -> Planned:
        axes = self.storage.axes
        has_rate = NETWORK_FLAG in set_elsewhere()
        axes = replace(
            axes,
            misjudges_network=axes.misjudges_network and not has_rate,
            profiled=self.latencies == "predicted",
        )
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        split = self.plain.split(batch, batch_leaves, axes, (leaves, treedef))
        planned = self.plain.planned(
            Side(leaves, self.storage.partition(leaves), treedef),
            Side(tuple(replace(x, auto=()) for x in batch_leaves), split, batch_tree),
            axes,
            self.storage.given.abstract_mesh,
        )
        return replace(planned, offload=self.storage.choice_of(leaves))

    def choose_memories(
        self,
        states: tuple[Any, ...],
        batch: Rest,
        memory: int | None = None,
        correction: int = 0,
    ) -> OffloadChoice | None:
        """Chooses which leaves of a state live on the host, where that is asked and has
        not been done for such a state.

        Args:
          states: the state arguments.
          batch: the others.
          memory: bytes of a device; None if the devices are to say.
          correction: bytes that the step takes beyond the plan's estimate.

        Returns:
          The choice; None where nothing was left to choose.
        """
        leaves, treedef = self.storage.leaves(states, undecided=True)
        able = self.storage.to_choose(leaves)
        names = [leaf_name(leaf.path) for leaf in leaves]
        keys = [(names[i], leaves[i].aval.shape) for i in able]
        if all(key in self.storage.chosen for key in keys):
            return None
        asked, bound = offload_bound(self.storage, memory)
        planned = self.planned(leaves, treedef, batch)
        choice = choose_offload(
            planned, names, able, asked, bound, self.heap, correction
        )
        self.storage.chosen.update(dict.fromkeys(keys, choice))
        if memory is None and not choice.fits:
            warn(
                f"{step_name()} takes {choice.taken} bytes of each device by its plan, "
                f"more than offload={asked!r} allows: {bound}.\n{called()}Pass a "
                "smaller batch, more devices or a larger bound, or rematerialize "
                "activations with jax.checkpoint.",
                OffloadWarning,
            )
        return choice

    def options(self, planned: Planned | None = None) -> dict[str, Any]:
        """The compiler's options; for a plan, those that it asks for, too."""
        devices = tuple(self.storage.given.devices.flat)
        quantizes = self.storage.control.quantizes_gathers
        in_turn = on_host = other_axes = False
        if planned is not None:
            in_turn = orders_gathers(planned.body)
            on_host = has_host_values(planned.program, planned.body)
            other_axes = leaves_sums(planned.program, planned.body, self.storage.axes)
        asked = self.asked_of_compiler
        return compiler_options(devices, asked, quantizes, in_turn, on_host, other_axes)

    @property
    def asked_of_compiler(self) -> Asked:
        """What the user asks of the compiler, and the file of tuned options."""
        asked, tuned = self.asked, self.plain.tuned
        if tuned is None or asked is False:
            return asked
        platform = self.storage.given.devices.flat[0].platform
        return {**tuned.of_compiler(platform), **(asked or {})}

    @property
    def heap(self) -> Heap:
        """How their compiler uses memory."""
        devices = tuple(self.storage.given.devices.flat)
        return replace(heap_of(devices, self.asked_of_compiler), donates=self.donate)

    def jitted(
        self,
        leaves: tuple[Leaf, ...],
        treedef: Any,
        batch: tuple[Sequence[Leaf], Any],
        meaning: StateArguments,
        run_on: tuple[Any, ...],
        whole: bool = False,
    ) -> Any:
        """The jitted step on stored leaves and the tuple of the other arguments, traced
        on the logical shapes of `leaves`: one for each kind of them and of `batch`, its
        leaves and structure, so that what is compiled goes with it.

        Where its latencies are predicted, it is compiled once here, for `run_on`, the
        arguments that it is for. Where it becomes part of another program, that is
        compiled as its own call says, and leaves that are stored padded come and go
        `whole`.
        """
        asked = None if whole else self.asked_of_compiler
        of_compiler = tuple((asked or {}).items()), elsewhere_key()
        shapes = tuple((leaf.aval.shape, leaf.aval.dtype, leaf.auto) for leaf in leaves)
        donated = (0,) if self.donate and not compat.checks_values() else ()
        kinds = tuple((leaf.aval.shape, leaf.aval.dtype) for leaf in batch[0])
        key = treedef, shapes, batch[1], kinds, whole
        key = *key, asked is False, of_compiler, donated, meaning
        storage = self.storage
        if key not in self._jitted:

            def planned_for(
                donated: Any, given: tuple[Any, ...]
            ) -> tuple[Planned, Sequence[Any], Rest]:
                stored, caches = donated if meaning.caches else (donated, ())
                given, fixed = given if meaning.read_only else (given, ())
                stored, rest = (*stored, *fixed), joined(given, caches, meaning)
                named = [
                    replace(leaf, aval=_like(x, leaf.aval.shape))
                    for x, leaf in zip(stored, leaves, strict=True)
                ]
                planned = self.planned(tuple(named), treedef, rest)
                return planned, stored, rest

            def run(donated: Any, given: tuple[Any, ...]) -> Any:
                planned, stored, rest = planned_for(donated, given)
                program = on_mesh(planned, storage.mesh, storage.given, whole)
                out = program(*stored, *jax.tree.leaves(rest))
                return planned.traced.returned(out)

            functools.update_wrapper(run, self.plain.step, updated=())
            delattr(run, "__wrapped__")  # its arguments may be passed by name alone

            def jitted(options: dict[str, Any]) -> Any:
                given = options or None
                return jax.jit(run, donate_argnums=donated, compiler_options=given)

            options: dict[str, Any] = {}
            if not whole:
                options = self.options(planned_for(*run_on)[0])
                if are_predicted(self.latencies, storage.mesh):
                    lowered = self.lowered(jitted(options).trace(*run_on), leaves)
                    options |= predicted_latencies(lowered, storage.mesh)
            self._jitted[key] = jitted(options)
        return self._jitted[key]

    def warn_of_options(self, planned: Planned) -> None:
        """Warns of what another program, which a step becomes part of, is to be
        compiled with, where results depend on it."""
        on_host = has_host_values(planned.program, planned.body)
        if on_host and (needed := needed_options(self.options(planned))):
            warn(
                f"{step_name()} has values in the host's memory, and is part of "
                "another program, which is compiled with options of its own.\n"
                f"{called()}XLA for GPUs may read and write other parts of scanned "
                f"stacks than it should. Pass compiler_options={needed} to the "
                "jax.jit of that program, or call the step outside of it.",
                OffloadWarning,
            )

    def traced(self, states: tuple[Any, ...], batch: Rest) -> Any:
        """The jitted step traced on abstract arguments."""
        leaves, treedef = self.storage.leaves(states)
        stored = [self.storage.stored_aval(x, s) for x, s in self.storage.each(leaves)]
        batch_leaves, batch_tree = self.storage.batch_leaves(batch)
        split = self.plain.split(
            batch, batch_leaves, self.storage.axes, (leaves, treedef)
        )
        placed = [
            self.storage.stored_aval(leaf, s)
            for leaf, s in zip(batch_leaves, split, strict=True)
        ]
        count = batch.meaning.returned(treedef)
        if self.is_described(leaves):
            kinds = (kind_of(leaf.memory) for leaf in leaves)
            stored = list(map(compat.without_devices, stored, kinds))
            placed = [compat.without_devices(aval, None) for aval in placed]
        run_on = given(stored, count, batch_tree, placed)
        kind = batch_leaves, batch_tree
        return self.jitted(leaves, treedef, kind, batch.meaning, run_on).trace(*run_on)

    def lower(self, states: tuple[Any, ...], batch: Rest) -> jax.stages.Lowered:
        """The jitted step lowered for the devices of the mesh."""
        self.choose_memories(states, batch)
        return self.lowered(self.traced(states, batch), self.storage.leaves(states)[0])

    def lowered(self, traced: Any, leaves: Sequence[Leaf]) -> jax.stages.Lowered:
        """What `traced` returned, lowered, of a state of these leaves."""
        mesh = self.storage.mesh
        try:
            with compat.device_known(mesh):
                if self.is_described(leaves):
                    return compat.lower_on(traced, mesh)
                return traced.lower()
        except RuntimeError as error:
            prints = any(map(compat.is_debug_effect, traced.jaxpr.effects))
            if not prints or not compat.are_described(mesh):
                raise
            raise calls_the_host() from error

    def is_described(self, leaves: Sequence[Leaf]) -> bool:
        """Whether leaves live on hosts of devices that only a description is there
        of."""
        on_host = any(leaf.memory == HOST for leaf in leaves)
        return on_host and compat.lacks_memories(self.storage.mesh)


def given(
    stored: Sequence[Any], returned: int, rest: Any, placed: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:
    """What the jitted step takes, of a state's leaves, the first of which come back,
    and of those of a batch of structure `rest`: what may be donated, state that comes
    back and caches, and the others; caches and state that is read only, if there are
    any."""
    others, caches = with_caches(rest, placed)
    if returned < len(stored):
        stored, others = stored[:returned], (others, stored[returned:])
    return (stored, caches) if caches else stored, others


def caches_apart(rest: Any, placed: list[Any], given: Sequence[Any]) -> list[Any]:
    """The batch's leaves, where no cache, which is donated, shares a buffer with
    another leaf, nor with an array of the caller's that is not on the mesh yet."""
    if not meaning_of(rest).caches:
        return placed
    others, caches = (jax.tree.leaves(x) for x in with_caches(rest, range(len(placed))))
    own = [
        given[i]
        for i in caches
        if given[i] is not placed[i] or not getattr(given[i], "committed", True)
    ]
    copies = apart([placed[i] for i in caches], [*(placed[i] for i in others), *own])
    new = dict(zip(caches, copies, strict=True))
    return [new.get(i, x) for i, x in enumerate(placed)]


def _like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    weak = getattr(jax.typeof(x), "weak_type", False)
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=weak)
