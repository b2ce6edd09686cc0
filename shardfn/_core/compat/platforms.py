"""Platforms and processes.

In: the devices that are there. Out: what their compilers do and cannot do.
"""

from typing import Any

import jax
import numpy as np
from jax._src import distributed as _distributed, xla_bridge as _xla_bridge
from jax.sharding import AxisType


def platform_of(compiled: jax.stages.Compiled) -> str:
    """What a program was compiled for, such as "cpu"; "" if nothing comes in or out."""
    ends = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((d.platform for end in ends for d in end.device_set), "")


def lowered_for(platform: str, client: Any = None) -> str:
    """What lowering calls a platform: of GPUs it tells two, by their client, or by what
    this process has."""
    if platform != "gpu":
        return platform
    of_process = "rocm" if "rocm" in _xla_bridge.backends() else "cuda"
    named = getattr(client, "_raw_platform", of_process)
    return of_process if named == "gpu" else named


def merges_gathers(platform: str) -> bool:
    """Whether the compiler for a platform merges equal operations that an optimization
    barrier keeps apart: XLA for CPUs did, in straight-line code."""
    return platform == "cpu" and jax.__version_info__ < (0, 11)


def hoists_gathers(platform: str) -> bool:
    """Whether the compiler for a platform moves gathers in front of a loop, or merges
    them there, if what they gather is the same in every iteration: XLA for CPUs does,
    however large that is, and also where a barrier keeps them apart."""
    return platform == "cpu"


def loses_clamps() -> bool:
    """Whether XLA, where it makes one dynamic slice of a slice of a slice, loses where
    the last one is moved to if it would begin outside
    (https://github.com/openxla/xla/issues/49121). It also makes such slices itself, of
    a scatter that has one index."""
    return jax.__version_info__ < (0, 12)


def sent_as(dtype: Any) -> Any:
    """The dtype in which to pass a value to a collective: XLA has none of two bits. On
    CPUs it refuses to reduce such values, and writes beyond the end of gathered ones.
    Those of four bits it widens by itself."""
    two_bits = {"int2": np.int8, "uint2": np.uint8}
    return two_bits.get(getattr(dtype, "name", ""), dtype)


def promoted_dtype(platform: str, dtype: str) -> str:
    """The dtype in which the compiler for a platform moves this one: XLA for CPUs has
    no collectives of floats that CPUs do not compute with."""
    if platform != "cpu":
        return dtype
    return "float16" if dtype.startswith("float8") else _ON_CPUS.get(dtype, dtype)


_ON_CPUS = {"bfloat16": "float32"}


def dtypes_without_sum(platform: str, has_automatic_axes: bool) -> tuple[str, ...]:
    """The dtypes whose sums over manual mesh axes end the process in the compiler.

    XLA's CPU compiler promotes all-reduces and reduce-scatters of bfloat16, and fails
    on the computation that JAX gives them where other mesh axes, even of one device,
    are automatic. It does all other dtypes, and all other collectives of bfloat16.
    """
    return ("bfloat16",) if platform == "cpu" and has_automatic_axes else ()


def reads_inside_matmuls(platform: str) -> bool:
    """Whether the compiler reads quantized values inside of the matmuls that use them,
    each its own: XLA for GPUs does, of what nothing else uses. Others share one copy,
    or make several as they see fit."""
    return platform in ("gpu", "cuda", "rocm")


def fuses_producers(platform: str) -> bool:
    """Whether the compiler makes an operand of a matrix product inside of it, where
    only that product reads it: XLA for TPUs does. For GPUs it makes what is no more
    than a cast, in some products."""
    return platform == "tpu"


def indexes_memory(platform: str) -> bool:
    """Whether the compiler writes an array to memory before it is indexed, however it
    is made: XLA for TPUs does. For GPUs and CPUs it computes what is looked up."""
    return platform == "tpu"


def lets_sums_wait(platform: str) -> bool:
    """Whether the compiler puts off sums of unrolled layers that nothing needs yet,
    also where each waits for the one before it: XLA for TPUs does."""
    return platform == "tpu"


def times_transfers(device: Any) -> bool:
    """Whether the compiler schedules transfers by how long they take, and delays sums
    of loops. XLA for GPUs does from compute capability 9 on (Hopper), and goes by one
    figure for each kind of operation below that; for TPUs it delays none. CPU devices
    are planned for as the newest GPUs."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return device.platform != "tpu"
    return int(str(capability).partition(".")[0]) >= 9


def scatters_tiles(platform: str) -> bool:
    """Whether the compiler pads shards of a reduce-scatter to whole tiles, and moves
    rows to the devices that they belong to behind it: for TPUs it does."""
    return platform == "tpu"


def all_reduces_little(platform: str) -> bool:
    """Whether the compiler all-reduces what it should gather if that is a few
    kilobytes, such as a norm's scale: for TPUs it does."""
    return platform == "tpu"


def sums_in_pieces(device: Any) -> bool:
    """Whether the compiler reduce-scatters rows in pieces over a slice that is four
    devices long in each of three directions, and all-reduces those that do not come out
    even: for v5p TPUs it does, on their sparse cores."""
    return device.device_kind in ("TPU v5", "TPU v5p")


def misjudges_network(device: Any) -> bool:
    """Whether the compiler takes the network between hosts for slower than it is. XLA
    takes that of H100s for half as fast (`shardfn/analysis/_gpus.py`)."""
    return device.device_kind.startswith("NVIDIA H100")


def hides_network(device: Any) -> bool:
    """Whether a loop that computes `limits.SUMS_FLOPS` for each byte that it sends
    between hosts computes for longer than it sends: on GPUs of compute capability 9
    (Hopper). Later ones compute faster, and have about the same network."""
    capability = getattr(device, "compute_capability", None)
    return str(capability).partition(".")[0] == "9"


def known_platform() -> str:
    """The platform that the surrounding `shard_map` is for; `""` if JAX knows none, as
    for a mesh without devices."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or ""


def bound_platform() -> tuple[str, bool]:
    """The same, or else that of this process, and whether some axes of the mesh are
    automatic."""
    return known_platform() or jax.default_backend(), bool(automatic_axes())


def automatic_axes() -> frozenset[str]:
    """The mesh axes that are automatic in the surrounding `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    each = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in each if kind is not AxisType.Manual)


def distributed_client() -> Any:
    """What `jax.distributed` connects this process to the others with, or None."""
    return _distributed.global_state.client
