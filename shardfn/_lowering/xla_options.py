"""Compiler options of a platform, with which transfers overlap with matmuls.

In: a device, and what the user asked for or set elsewhere.
Out: options for `jax.jit(compiler_options=)` that this compiler knows.
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from shardfn._core import compat, processes
from shardfn._core.device_coords import slices_of
from shardfn._core.errors import ShardingError, called, cannot_be
from shardfn._core.limits import CHAINED_BYTES

Asked = Mapping[str, Any] | Literal[False] | None
"""`compiler_options` as users write it."""

Flags = tuple[tuple[str, Any], ...]
"""Names and values."""

_INVALID = "INVALID_ARGUMENT: "
_VALUES = (str, int, float, bool, type(None))

_GPUS = ("gpu", "cuda", "rocm")


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
    """

    platform: str
    spellings: Flags
    decided_by: tuple[str, ...] = ()
    slices: bool = False
    kinds: tuple[str, ...] = ()
    most: int = 0
    quantized: bool = False
    in_turn: bool = False

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
    # for the next layer's gathers to end, nor the gathers for one another.
    CompilerOption(
        "gpu",
        (("xla_gpu_experimental_parallel_collective_overlap_limit", 4),),
        slices=True,
    ),
    # Each sum of a loop's iteration begins when it can. Combined, all would begin with
    # the last one; those of less, such as norms' scales, still are.
    CompilerOption(
        "gpu",
        (("xla_gpu_reduce_scatter_combine_threshold_bytes", CHAINED_BYTES),),
        in_turn=True,
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
    "four transfers in flight": (
        CompilerOption(
            "gpu", (("xla_gpu_experimental_parallel_collective_overlap_limit", 4),)
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


def device_and_platform(devices: Sequence[Any]) -> tuple[Any, str]:
    """One of these devices, and their platform, "gpu" for all GPUs."""
    device = processes.reachable(devices)
    return device, "gpu" if device.platform in _GPUS else device.platform


def tried(devices: Sequence[Any], name: str) -> dict[str, Any]:
    """The options of one row of `TRIED`, as the compiler of these devices spells them;
    nothing if it is another platform's, or does not know one of them."""
    device, platform = device_and_platform(devices)
    rows = [option for option in TRIED[name] if option.is_for(device, platform)]
    known = _known(device, rows) if rows else {}
    return known if len(known) == len(rows) else {}


def check_options(asked: Any) -> Asked:
    """Raises if `compiler_options` is nothing that can be asked."""
    if asked is None or asked is False:
        return asked
    if isinstance(asked, Mapping) and all(
        isinstance(name, str) and isinstance(value, _VALUES)
        for name, value in asked.items()
    ):
        return dict(asked)
    cannot_be(
        "compiler_options",
        asked,
        "Pass a mapping from names of XLA's options to strings, numbers or booleans, "
        "with None for an option that XLA shall choose; False to set none at all; or "
        "None.",
    )


def compiler_options(
    devices: Sequence[Any],
    asked: Asked,
    quantizes: bool = False,
    in_turn: bool = False,
) -> dict[str, Any]:
    """The options that a step is compiled with.

    Args:
      devices: those of the mesh; they may be devices that are not there.
      asked: what the user said; see `fully_shard`.
      quantizes: whether leaves may be gathered quantized.
      in_turn: whether the plan orders gathers.

    Returns:
      Names and values, all known to the compiler of these devices.

    Raises:
      ShardingError: the user names an option that it does not know, or a value that the
        option does not take.
    """
    device, platform = device_and_platform(devices)
    given = dict(asked or {})
    named = {name: value for name, value in given.items() if value is not None}
    given_by_user = {*given, *set_elsewhere()}
    ours = [
        option
        for option in OPTIONS
        if option.is_for(device, platform)
        and (not option.slices or slices_of(devices) > 1)
        and (not option.most or len(devices) <= option.most)
        and (quantizes or not option.quantized)
        and (in_turn or not option.in_turn)
        and given_by_user.isdisjoint((*dict(option.spellings), *option.decided_by))
    ]
    if named and (refused := refusal(device, _frozen(named))):
        raise ShardingError(
            f"compiler_options names an option or a value that the compiler of "
            f"{device.device_kind} does not know: {refused}.\n{called()}"
            "Correct it, or leave it out."
        )
    if asked is False:
        return {}
    return {**_known(device, ours), **named}


def set_elsewhere() -> set[str]:
    """Names of the options that the user set outside of this package: in XLA_FLAGS, or
    the file that it names, in LIBTPU_INIT_ARGS, and in JAX's own settings."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-") and Path(flags).is_file():
        flags = Path(flags).read_text()
    flags += " " + os.environ.get("LIBTPU_INIT_ARGS", "")
    found = re.findall(r"--(\w+)", flags)
    found += [name[2:] for name in found if name.startswith("no")]
    return {*found, *compat.compiler_settings()}


def _known(device: Any, options: Iterable[CompilerOption]) -> dict[str, Any]:
    """The options in the spelling that the compiler knows, without those it does not
    know in any."""
    each = [list(option.spellings) for option in options]
    while each:
        now = dict(spellings[0] for spellings in each)
        refused = refusal(device, _frozen(now))
        if not refused:
            return now
        left = [s[1:] if re.search(rf"\b{s[0][0]}\b", refused) else s for s in each]
        if left == each:  # the compiler has another trouble: not here
            return {}
        each = [spellings for spellings in left if spellings]
    return {}


def refusal(device: Any, options: Flags) -> str:
    """Why the compiler of `device` does not take these options, or `""`: tried on a
    program that returns zero. Troubles of another kind, such as no memory, are raised;
    they may have passed the next time."""
    # True is 1 in Python, and not to a compiler.
    return _tried(device, options, tuple(type(value) for _, value in options))


@functools.cache
def _tried(device: Any, options: Flags, kinds: tuple[type, ...]) -> str:
    one = jax.sharding.SingleDeviceSharding(device)
    with compat.at_top_level():
        lowered = jax.jit(lambda: jax.numpy.float32(0), out_shardings=one).lower()
    try:
        lowered.compile(compiler_options=dict(options))
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        refused = first.startswith(_INVALID) or "No such compile option" in first
        if isinstance(error, jax.errors.JaxRuntimeError) and not refused:
            raise
        return first.removeprefix(_INVALID).rstrip(".")
    return ""


def _frozen(options: Mapping[str, Any]) -> Flags:
    return tuple(sorted(options.items()))
