"""The options of compilers that this package sets, and those that it tries.

In: nothing. Out: the table. What of it a step is compiled with is in `xla_options.py`.
"""

from dataclasses import dataclass
from typing import Any

from shardfn._core.host_values import NO_OFFSETS
from shardfn._core.limits import CHAINED_BYTES

Flags = tuple[tuple[str, Any], ...]
"""Names and values."""


@dataclass(frozen=True, slots=True)
class CompilerOption:
    """One thing to tell a compiler.

    Attributes:
      platform: "gpu" or "tpu".
      spellings: names and values that say it, the newest first; the first that the
        compiler knows counts.
      decided_by: other flags and JAX settings that decide it. If the user gave one of
        them, or one of the names, this package leaves the option alone.
      slices: it is of use only if the mesh spans several slices, each of what NVLink
        connects.
      kinds: the `device_kind`s that it is of use on; all of the platform if empty.
      most: devices beyond which it is left out; 0 if it never is.
      quantized: it is of use only if what is gathered is quantized.
      in_turn: it is of use only if a plan orders gathers.
      other_axes: it is of use only if loops sum over other mesh axes, such as replicas,
        what they scatter over one.
      on_host: it is of use only if a step has values in the host's memory.
      is_list: its value is put behind what the user sets it to. Results depend on it,
        so that only None leaves it out.
    """

    platform: str
    spellings: Flags
    decided_by: tuple[str, ...] = ()
    slices: bool = False
    kinds: tuple[str, ...] = ()
    most: int = 0
    quantized: bool = False
    in_turn: bool = False
    other_axes: bool = False
    on_host: bool = False
    is_list: bool = False

    @property
    def names(self) -> set[str]:
        """The option's names."""
        return {name for name, _ in self.spellings}

    def is_for(self, device: Any, platform: str) -> bool:
        """Whether it is of use on a device of a platform."""
        is_kind = not self.kinds or device.device_kind in self.kinds
        return self.platform == platform and is_kind


_SPARSE_CORES = ("TPU v5", "TPU v5p", "TPU v6 lite")
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
_FUSED_GATHERS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"


def _on_sparse_cores(
    name: str, value: str = "true", *decided_by: str, most: int = 0
) -> CompilerOption:
    return CompilerOption(
        "tpu", ((name, value),), decided_by, kinds=_SPARSE_CORES, most=most
    )


OPTIONS = (
    # On from Hopper on; without it an A100 runs one thing after the other.
    CompilerOption(
        "gpu",
        (("xla_gpu_enable_latency_hiding_scheduler", True),),
        decided_by=("exec_time_optimization_effort", "optimization_level"),
    ),
    # Several transfers in flight instead of one: a layer's reduce-scatters do not wait
    # for the next layer's gathers to end, nor the gathers for one another. Fewer cost
    # many devices up to 9%, as most of what a transfer takes is latency; with more, XLA
    # begins T5-11B's largest gathers before those that it needs first.
    CompilerOption(
        "gpu",
        (("xla_gpu_experimental_parallel_collective_overlap_limit", 5),),
        slices=True,
    ),
    # All that a loop gathers in turn may be in flight. Where less may, XLA waits for
    # one before the next begins. Which is first, the plan says.
    CompilerOption(
        "gpu",
        (("xla_gpu_experimental_parallel_collective_overlap_limit", 8),),
        slices=True,
        in_turn=True,
    ),
    # Each sum of a loop's iteration begins when it can. Combined, all would begin with
    # the last one; those of less, such as norms' scales, still are.
    CompilerOption(
        "gpu",
        (("xla_gpu_reduce_scatter_combine_threshold_bytes", CHAINED_BYTES),),
        in_turn=True,
    ),
    # Of products that share an operand XLA makes one, whose results are then summed
    # together, if one of them reads and writes no more than this. It takes 64 MiB by
    # itself, to which the shared operand no longer counts with JAX 0.12, so that large
    # gradients are merged.
    CompilerOption("gpu", (("xla_gpu_dot_merger_threshold_mb", 32),)),
    # The sums over replicas run beside the next iteration. XLA would wait for them, and
    # for the reduce-scatters in front of them.
    CompilerOption(
        "gpu",
        (
            ("xla_gpu_pipeline_all_reduce", "COLLECTIVE_PIPELINING_MODE_ON"),
            ("xla_gpu_enable_pipelined_all_reduce", True),
        ),
        other_axes=True,
    ),
    # Results depend on it. XLA does not run with both of these options.
    CompilerOption(
        "gpu",
        (NO_OFFSETS,),
        decided_by=("xla_enable_hlo_passes_only",),
        on_host=True,
        is_list=True,
    ),
    # Quantized weights are read inside of the matmuls that use them, with their scales,
    # instead of in a pass of its own that writes them in full. XLA's autotuner still
    # takes the faster of the two.
    CompilerOption(
        "gpu",
        (("xla_gpu_experimental_enable_subchannel_dequantisation_fusion", True),),
        quantized=True,
    ),
    # A TPU's matrix unit waits for its own transfers. Those of the sparse cores run
    # beside it, and over a 3D slice they can reduce-scatter where it would all-reduce.
    _on_sparse_cores(f"{_OFFLOAD}_reduce_scatter"),
    # With this one the compiler (libtpu 0.0.42) divides by zero for 4096 chips.
    _on_sparse_cores(f"{_OFFLOAD}_nd_reduce_scatter", most=2048),
    _on_sparse_cores(f"{_OFFLOAD}_all_gather", "true", _FUSED_GATHERS),
    _on_sparse_cores(f"{_OFFLOAD}_2d_all_gather", "true", _FUSED_GATHERS),
    _on_sparse_cores(f"{_OFFLOAD}_3d_all_gather", "true", _FUSED_GATHERS),
    # Those along the minor dimension in memory are all-reduced unless it is changed.
    _on_sparse_cores("xla_tpu_relayout_group_size_threshold_for_reduce_scatter", "1"),
    # Started earlier than XLA would, they end within the layer that they come from.
    _on_sparse_cores("xla_tpu_sparse_core_reduce_scatter_latency_multiplier", "3"),
    # Gathers that are fused into matmuls cannot go there, nor those that stand as an
    # all-reduce of zeros and a shard, as they do on 64 chips and more.
    _on_sparse_cores(_FUSED_GATHERS, "false"),
    _on_sparse_cores("xla_tpu_prefer_async_allgather_to_allreduce"),
    _on_sparse_cores("xla_enable_async_all_gather"),
)


NETWORK_FLAG = "xla_gpu_analytical_latency_estimator_options"
"""Says how fast the network is; XLA takes it from the environment only."""

NOT_DELAYED = "sums not delayed by XLA"
ONE_LATENCY = "one latency per operation"

TRIED = {
    "gathers pipelined by XLA": (
        CompilerOption(
            "gpu",
            (
                ("xla_gpu_pipeline_all_gather", "COLLECTIVE_PIPELINING_MODE_ON"),
                ("xla_gpu_enable_pipelined_all_gather", True),
            ),
        ),
    ),
    NOT_DELAYED: (
        CompilerOption(
            "gpu",
            (
                ("xla_gpu_pipeline_reduce_scatter", "COLLECTIVE_PIPELINING_MODE_OFF"),
                ("xla_gpu_enable_pipelined_reduce_scatter", False),
            ),
        ),
    ),
    "eight transfers in flight": (
        CompilerOption(
            "gpu", (("xla_gpu_experimental_parallel_collective_overlap_limit", 8),)
        ),
    ),
    ONE_LATENCY: (
        CompilerOption(
            "gpu", (("xla_gpu_enable_analytical_sol_latency_estimator", False),)
        ),
    ),
    "gathers pipelined over ICI": (
        CompilerOption("tpu", (("xla_tpu_enable_ici_ag_pipelining", "true"),)),
        CompilerOption(
            "tpu", (("xla_should_allow_loop_variant_parameter_in_chain", "ENABLED"),)
        ),
        CompilerOption(
            "tpu", (("xla_should_add_loop_invariant_op_in_chain", "ENABLED"),)
        ),
    ),
    "layer scheduler": (
        CompilerOption(
            "tpu", (("xla_tpu_enable_latency_hiding_layer_scheduler", "true"),)
        ),
        CompilerOption(
            "tpu", (("xla_tpu_enable_sparse_core_collective_aggregator", "true"),)
        ),
    ),
}
"""What is not set by itself, for it helps some steps and costs others memory or time:
tuning compiles a step with it. github.com/openxla/xla, docs/flags_guidance.md."""
