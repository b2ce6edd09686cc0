"""A traced and planned step, ready to run on local blocks.

In: the trace, the program and its plan, and how the state is stored. Out: a function of
one device's blocks, for `shard_map`.
"""

from dataclasses import dataclass
from typing import Any

import jax

from shardfn._core import compat
from shardfn._core.barrier import barrier
from shardfn._core.control import Control
from shardfn._core.leaves import Leaf
from shardfn._core.offloading import OffloadChoice
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program, aval_of
from shardfn._core.sharding import Axes, Sharding
from shardfn._lowering.choose_lookups import LookupsChoice
from shardfn._lowering.choose_stationary import StationaryChoice
from shardfn._lowering.interpreter import emit
from shardfn._trace.trace_step import TracedStep
from shardfn.storage._padding import zero_padding


@dataclass(frozen=True, slots=True)
class Planned:
    """A traced and planned step. Its arguments are the state's leaves, then the
    batch's.

    Attributes:
      traced: the traced step.
      program: the same as a program.
      body: its plan.
      base: the program, if lookups were exchanged without that: plans with its state
        stored otherwise begin with it.
      state: leaves of the state.
      stored: their shardings.
      axes: the mesh axes.
      control: what was asked of the moves of state leaves.
      notes: what people should know of its arguments and of the mesh.
      unused: mesh axes that nothing is split over, and their devices.
      min_size: leaves with fewer elements stay replicated.
      stationary: which leaves of the state stay where they are, and why.
      lookups: which rows are asked of the devices that own them, and why.
      offload: which of them live on the host so that the step fits, if that was asked.
    """

    traced: TracedStep
    program: Program
    body: BodyPlan
    base: Program
    state: tuple[Leaf, ...]
    stored: tuple[Sharding, ...]
    axes: Axes
    control: Control
    notes: tuple[str, ...] = ()
    unused: tuple[tuple[str, int], ...] = ()
    min_size: int = 0
    stationary: StationaryChoice = StationaryChoice()
    lookups: LookupsChoice = LookupsChoice()
    offload: OffloadChoice | None = None

    @property
    def input_avals(self) -> list[Any]:
        return [self.program.avals[v] for v in self.program.inputs]

    @property
    def returns(self) -> tuple[bool, ...]:
        """For each leaf of the state, whether it comes back."""
        return tuple(k is not None for k in self.traced.order[: len(self.state)])

    @property
    def output_avals(self) -> list[Any]:
        return [aval_of(self.program, atom) for atom in self.program.outputs]

    def run(self, *args: jax.Array) -> list[jax.Array]:
        """Runs the step on local blocks, inside `shard_map`."""
        # Behind barriers what lives on the host: of such an argument that is copied
        # twice, once behind a barrier, libtpu drops that copy and computes over there.
        on_host = self.body.on_host
        given = [barrier(x)[0] if i in on_host else x for i, x in enumerate(args)]
        out = emit(self.program, self.body, given, self.axes)
        for j, (leaf, sharding) in enumerate(zip(self.state, self.stored, strict=True)):
            if j in self.body.to_host:  # their copies have zeros there
                continue
            with compat.broadcasts_ranks():
                out[j] = zero_padding(out[j], leaf.aval.shape, sharding, self.axes)
        return out
