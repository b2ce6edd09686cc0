"""The plan of one step, as users read, compare and check it.

In: the mesh axes, the steps, and every collective. Out: a frozen value that prints as
a table and can be held against a compiled program.
"""

from dataclasses import dataclass, field, replace

from jax.stages import Compiled

from shardfn._core import compat
from shardfn._core.argument_values import COMPILED, PATTERN, check_arguments
from shardfn._core.control import Control
from shardfn._core.offloading import OffloadChoice
from shardfn._core.plan import BodyPlan
from shardfn._core.sharding import Axes
from shardfn.analysis._explain import LeafLayout, Operation, explain
from shardfn.analysis._host_check import check_host
from shardfn.analysis._match import verify
from shardfn.analysis._offload_table import offload_table
from shardfn.analysis._offset_check import check_offsets
from shardfn.analysis._replicated import Work
from shardfn.analysis._tables import table
from shardfn.analysis.collective import Collective
from shardfn.analysis.host_transfer import HostTransfer, LeafOnHost, host_table
from shardfn.analysis.verification import Verification


@dataclass(frozen=True, slots=True)
class Plan:
    """What one sharded step moves, when, and why; see `print(plan)`.

    Attributes:
      axes: the mesh axes sharded over.
      body: the steps.
      collectives: every collective, in program order.
      parameter_bytes: M, the bytes of the gathered parameters in their compute dtype.
      program: fingerprint of the planned step and of the arrays it captured.
      operations_hash: that of the traced step's operations without their sizes: the
        same for batches of other sizes, and for other devices.
      control: what was asked of the moves of state leaves.
      work: the FLOPs of one device, and those of them that every device repeats.
      notes: which arguments are state, where that had to be found, and what of the mesh
        is not used.
      leaves: how every leaf of the state is stored, and why.
      operations: what is run, and which factors of it are split.
      transfers: every copy between the host's memory and the device's, in program
        order.
      on_host: the leaves of the state that live in the host's memory.
      copies_itself: whether the step's own code copies between the memories besides.
      offload: which of them `offload` has chosen so that the step fits, and why; None
        if nothing was to be chosen.
    """

    axes: Axes
    body: BodyPlan = field(repr=False)
    collectives: tuple[Collective, ...]
    parameter_bytes: int
    program: str
    control: Control = Control()
    work: Work = Work()
    notes: tuple[str, ...] = field(default=(), compare=False)
    leaves: tuple[LeafLayout, ...] = field(default=(), compare=False, repr=False)
    operations: tuple[Operation, ...] = field(default=(), compare=False, repr=False)
    transfers: tuple[HostTransfer, ...] = ()
    on_host: tuple[LeafOnHost, ...] = ()
    copies_itself: bool = field(default=False, compare=False, repr=False)
    operations_hash: str = ""
    offload: OffloadChoice | None = field(default=None, compare=False, repr=False)

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends per step."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def fallbacks(self) -> tuple[Collective, ...]:
        """Collectives that only a primitive without a rule needs."""
        return tuple(c for c in self.collectives if c.fallback)

    def verify(self, compiled: Compiled | str) -> Verification:
        """Holds a compiled program against this plan, line by line.

        Reads the optimized program, so it says what the compiler made of each planned
        collective: there, merged with another, in a larger dtype, turned into an
        all-reduce, or missing; and what is there besides. Where XLA for GPUs works out
        ahead of time which part of a stack an iteration reads or writes, it says
        whether that is the part of the indices. Runs nothing.

        Args:
          compiled: the step compiled for CPUs, GPUs or TPUs, as `lower(...).compile()`
            returns it, or its text in HLO.

        Returns:
          A frozen value; `print` it, or ask it whether it is `ok`.

        Raises:
          ValueError: the backend shows no text, or one in a notation that is not known.

        Example:
          >>> import jax, jax.numpy as jnp, shardfn
          >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
          >>> step = shardfn.fully_shard(lambda w, x: (w, x @ w), mesh, min_size=0)
          >>> args = jnp.ones((64, 64)), jnp.ones((8, 64))
          >>> step.plan(*args).verify(step.lower(*args).compile()).ok
          True
        """
        check_arguments("verify", compiled=(compiled, COMPILED))
        is_text = isinstance(compiled, str)
        text = compiled if is_text else compiled.as_text()
        if text is None:
            raise ValueError(
                "this backend does not show its compiled programs as text.\n"
                "Compile the step for devices whose compiler does, such as CPUs."
            )
        platform = "" if is_text else compat.platform_of(compiled)
        checked = verify(self.collectives, self.axes, text, platform)
        found, wrong = check_host(
            self.on_host, self.transfers, self.copies_itself, text
        )
        misplaced = check_offsets(text)
        return replace(checked, on_host=wrong, copied=found, misplaced=misplaced)

    def explain(self, pattern: str) -> str:
        """Why leaves of the state, or the values of one line, move or stay.

        Says where a leaf is stored and what decided that, and for every collective that
        moves it the rule, the factor of it that made it move, and the passes, options
        and thresholds that shared, kept, joined or delayed it.

        Args:
          pattern: path of a leaf or subtree as the plan prints it, where `*` stands for
            any characters; or a line of the user's such as `train.py:12`.

        Returns:
          A few lines for each.

        Raises:
          ShardingError: no leaf and no collective has that name.

        Example:
          >>> import jax, jax.numpy as jnp, shardfn
          >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
          >>> step = shardfn.fully_shard(
          ...     lambda s, x: (s, x @ s["w"]), mesh, min_size=0
          ... )
          >>> plan = step.plan({"w": jnp.ones((64, 64))}, jnp.ones((512, 64)))
          >>> print(plan.explain("w"))  # doctest: +ELLIPSIS
          w: float32 64x64, stored split over data along dimension 0
            8 devices divide dimension 0 of 64, in parts that fill TPU tiles ...
            forward all_gather over data: 64x64 float32, 14.0 KiB sent, at ...
        """
        check_arguments("explain", pattern=(pattern, PATTERN))
        lines = self.collectives
        return explain(
            pattern, self.leaves, lines, self.operations, self.axes, self.transfers
        )

    def __str__(self) -> str:
        lines = table(
            self.collectives, self.axes, self.parameter_bytes, self.control, self.work
        )
        copies = host_table(self.transfers)
        chosen = [] if self.offload is None else [f"\n{offload_table(self.offload)}"]
        copied = [f"\n{copies}"] if copies else []
        return "\n".join([lines, *copied, *chosen, *self.notes])
