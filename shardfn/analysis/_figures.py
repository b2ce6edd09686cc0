"""Figures of a compiled step: what it stores, moves and computes, and its time.

In: a plan, what the compiler made of it, and the schedule played. Out: frozen values,
which `Report` prints and the page draws.
"""

from dataclasses import dataclass, field
from typing import Any

from shardfn._core.memories import DEVICE, HOST
from shardfn.analysis._data_sheets import Target
from shardfn.analysis._flops import Flops
from shardfn.analysis._hlo.timeline import Timeline
from shardfn.analysis._latency import KERNEL_GAP
from shardfn.analysis.advice import Advice
from shardfn.analysis.plan import Plan
from shardfn.analysis.verification import Verification


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """One leaf of the state, as stored.

    Attributes:
      name: its path.
      shape: whole, without padding.
      dtype: its dtype.
      bytes: on one device, padding included.
      split: whether devices hold parts of it.
      memory: the memory that stores it: "device" or "host".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    split: bool
    memory: str = DEVICE


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by the compiler's own account.

    Attributes:
      arguments: state and batch.
      outputs: new state and metrics.
      aliased: outputs that are written over donated arguments.
      temporary: peak of everything else while the step runs.
      code: of the program.
      host_arguments: state in the host's memory, which new state is written over.
      host_temporary: what else the step takes there.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    host_arguments: int = 0
    host_temporary: int = 0

    @property
    def peak(self) -> int:
        """Arguments, temporaries, code, and outputs that are not aliased."""
        kept = self.arguments + self.outputs - self.aliased
        return kept + self.temporary + self.code


@dataclass(frozen=True, slots=True)
class Figures:
    """What one step takes on a target.

    Attributes:
      step: name of the plain step.
      target: the machine, with its rates.
      plan: the plan.
      verification: what the compiler made of it.
      state: leaves of the state.
      memory: bytes on one device.
      flops: of matmuls on one device.
      timeline: the schedule played at the target's rates.
      compiler_options: options that the compiler was given.
      latencies: whose figures its scheduler goes by, "xla" or "predicted".
      advice: options that may help, the most first.
    """

    step: str
    target: Target
    plan: Plan
    verification: Verification
    state: tuple[StoredLeaf, ...] = field(repr=False)
    memory: Memory
    flops: Flops
    timeline: Timeline = field(repr=False)
    compiler_options: tuple[tuple[str, Any], ...] = ()
    latencies: str = "xla"
    advice: tuple[Advice, ...] = ()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the state in the memory of one device."""
        return sum(leaf.bytes for leaf in self.state if leaf.memory == DEVICE)

    @property
    def host_bytes(self) -> int:
        """Bytes of the state in the host's memory, for one device."""
        return sum(leaf.bytes for leaf in self.state if leaf.memory == HOST)

    @property
    def host_seconds(self) -> float:
        """Copies from and to the host alone; both directions at the same time."""
        most = max(self.timeline.copied(memory) for memory in (DEVICE, HOST))
        return most / self.target.host_bandwidth

    @property
    def host_exposed_seconds(self) -> float:
        """What the device waits for copies from and to the host."""
        return self.timeline.host_exposed

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the memory of one device."""
        return self.memory.peak <= self.target.memory

    @property
    def compute_seconds(self) -> float:
        """Matmuls alone, at the peak rate."""
        flops = self.flops.run.items()
        return sum(n / self.target.matmul_rate(dtype) for dtype, n in flops)

    @property
    def memory_seconds(self) -> float:
        """Reads and writes of device memory alone."""
        return self.timeline.memory_bytes / self.target.memory_bandwidth

    @property
    def quantizer_seconds(self) -> float:
        """The part of `memory_seconds` that writing and reading quantized values takes,
        and what is fused with that. Matmuls that read such are not part of it."""
        return self.timeline.quantizer_bytes / self.target.memory_bandwidth

    @property
    def transfer_seconds(self) -> float:
        """Collectives alone, one by one, with their latency."""
        return self.timeline.transfers

    @property
    def gap_seconds(self) -> float:
        """What lies between one kernel and the next."""
        return self.timeline.kernels * KERNEL_GAP[self.target.platform]

    @property
    def exposed_seconds(self) -> float:
        """The part of `transfer_seconds` that the device waits for."""
        return self.timeline.exposed

    @property
    def step_seconds(self) -> float:
        """Estimated duration of one step."""
        return self.timeline.seconds

    @property
    def mfu(self) -> float:
        """Estimated model FLOPs utilization: FLOPs of the model, without those repeated
        by rematerialization, over what the device could do in the step's time."""
        total = sum(self.flops.model.values())
        return total / (self.step_seconds * self.target.flops) if total else 0.0
