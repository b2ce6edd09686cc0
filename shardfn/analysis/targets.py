"""Names of accelerators in; devices to compile for, and their public figures, out.

XLA's GPU and TPU compilers run on a machine without a GPU or a TPU. They need the
packages of `pip install -e '.[aot]'`, in the versions that belong to the installed
JAX. Set `JAX_PLATFORMS=cpu` before importing JAX on a machine without accelerators.
"""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from shardfn.analysis._gpus import GPUS, target_config

__all__ = ["Target", "devices", "mesh", "missing", "target"]

GB = 10**9


@dataclass(frozen=True, slots=True)
class Target:
    """A number of equal accelerators and what one of them can do at most.

    Attributes:
      name: as given to `target`.
      platform: `cuda` or `tpu`.
      topology: slices x hosts x GPUs per host, or the TPU slice such as `v5e:2x4`.
      num_devices: how many there are.
      flops: peak bfloat16 floating-point operations per second, dense.
      memory: bytes of HBM.
      memory_bandwidth: bytes per second to and from HBM.
      link_bandwidth: bytes per second that one device sends over all its NVLink or ICI
        links together; it receives as much at the same time.
      network_bandwidth: bytes per second per device and direction between hosts that no
        such link connects.
    """

    name: str
    platform: str
    topology: str
    num_devices: int
    flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float

    def matmul_rate(self, dtype: str) -> float:
        """Peak FLOP/s of matmuls at JAX's default precision.

        GPUs run float32 operands as TF32, at half the rate of bfloat16 in the same data
        sheets; TPUs round them to bfloat16.

        Args:
          dtype: of the operands.

        Returns:
          FLOP/s. Dtypes of one byte are taken at the rate of bfloat16.
        """
        slow = self.platform == "cuda" and dtype in ("float32", "float64")
        return self.flops / 2 if slow else self.flops

    def transfer_seconds(self, sent: float, coords: Sequence[Sequence[int]]) -> float:
        """Seconds that a ring of devices needs, if nothing else uses its links.

        A GPU's ring that spans hosts crosses each host's edge over the network cards of
        all its devices there. A TPU's uses the links along the torus dimensions that it
        extends over.

        Args:
          sent: bytes that each device sends.
          coords: `Device.coords` of the devices of one group.

        Returns:
          Seconds at the rates of the data sheets.
        """
        if self.platform == "cuda":
            hosts = Counter(tuple(c[:2]) for c in coords)
            if len(hosts) == 1:
                return sent / self.link_bandwidth
            network = self.network_bandwidth * min(hosts.values())
            return sent / min(self.link_bandwidth, network)
        dims = len(self.topology.rpartition(":")[2].split("x"))
        used = sum(len(set(along)) > 1 for along in zip(*coords, strict=True))
        return sent / (self.link_bandwidth * min(max(used, 1), dims) / dims)


def _figures(
    flops: float, memory: int, bandwidth: float, link: float, network: float
) -> Target:
    return Target("", "", "", 0, flops, memory, bandwidth, link, network)


# GPUs: NVIDIA's data sheets, whose NVLink rates are the sum of both directions and
# whose rates marked "with sparsity" are twice the dense ones. Networks: the NIC per
# GPU in the data sheet of that generation's DGX.
# TPUs: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e}, whose ICI rates in GBps sum up
# both directions. Data-centre networks there are per host of 8 chips or per chip.
_FIGURES = {
    # A100 80GB SXM: 312 TFLOPS, 80 GB, 2,039 GB/s, NVLink 600 GB/s; DGX A100 200 Gb/s.
    "a100": _figures(312e12, 80 * GB, 2.039e12, 300e9, 25e9),
    # H100 SXM: 1,979 TFLOPS sparse, 80 GB, 3.35 TB/s, 900 GB/s; DGX H100 400 Gb/s.
    "h100": _figures(989.5e12, 80 * GB, 3.35e12, 450e9, 50e9),
    # H200 SXM: 1,979 TFLOPS sparse, 141 GB, 4.8 TB/s, 900 GB/s; DGX H200 400 Gb/s.
    "h200": _figures(989.5e12, 141 * GB, 4.8e12, 450e9, 50e9),
    # DGX B200, eighth parts: 36 PFLOPS sparse, 1,440 GB, 64 TB/s, 14.4 TB/s; 400 Gb/s.
    "b200": _figures(2.25e15, 180 * GB, 8e12, 900e9, 50e9),
    # v5e: 197 TFLOPs, 16 GB, 819 GBps, ICI 1600 Gbps each way, 2 x 100 Gbps per host.
    "v5e": _figures(197e12, 16 * GB, 819e9, 200e9, 3.125e9),
    # v5p: 459 TFLOPs, 95 GiB, 2765 GBps, ICI 1200 GBps, DCN 50 Gbps per chip.
    "v5p": _figures(459e12, 95 * 2**30, 2.765e12, 600e9, 6.25e9),
    # v6e: 918 TFLOPs, 32 GB, 1600 GBps, ICI 800 GBps, 4 x 200 Gbps per host.
    "v6e": _figures(918e12, 32 * GB, 1.6e12, 400e9, 12.5e9),
}

_KNOWN = "a100:8, h100:8, h100:1x8x8, h200:8, b200:8, tpu:v5e:2x4, tpu:v5p:4x4x4, ..."


def target(name: str) -> Target:
    """The figures of a compile-only target, without loading its compiler.

    Args:
      name: `<gpu>:<count>` or `<gpu>:<slices>x<hosts>x<GPUs per host>`, with one of
        `a100`, `h100`, `h200`, `b200`; or `tpu:<generation>:<slice shape>`, with
        `v5e`, `v5p` or `v6e`. A count above 8 is taken as hosts of 8. Capitals are
        small letters.

    Returns:
      A `Target`.

    Raises:
      ValueError: the name has another form or names another chip.

    Example:
      >>> target("h100:16").topology
      '1x2x8'
    """
    name = name.lower()
    if match := re.fullmatch(r"tpu:(\w+):(\d+(?:x\d+){1,2})", name):
        chip, shape = match.groups()
        platform, topology = "tpu", f"{chip}:{shape}"
    elif match := re.fullmatch(r"(\w+):(\d+|\d+x\d+x\d+)", name):
        chip, shape = match.groups()
        platform, topology = "cuda", shape if "x" in shape else _hosts_of_8(name, shape)
        shape = topology
    else:
        raise _unknown(name, known=name.removeprefix("tpu:") in _FIGURES)
    count = math.prod(int(n) for n in shape.split("x"))
    if chip not in _FIGURES or (platform == "cuda") != (chip in GPUS) or not count:
        raise _unknown(name)
    return replace(
        _FIGURES[chip],
        name=name,
        platform=platform,
        topology=topology,
        num_devices=count,
    )


@functools.cache
def devices(name: str) -> tuple[jax.Device, ...]:  # pyright: ignore
    """Devices of a target that is not there: programs compile for them but do not run.

    For a TPU target on a machine without a TPU, sets `TPU_SKIP_MDS_QUERY=1` (libtpu
    would ask the cloud's metadata server which TPU this is) and
    `ALLOW_MULTIPLE_LIBTPU_LOAD=1` (one process per machine could compile), if unset.

    Args:
      name: see `target`.

    Returns:
      The same devices for the same name, in the compiler's order.

    Raises:
      ValueError: no such target, or the compiler refuses the topology.
      ImportError: the target's compiler is not installed.
      RuntimeError: it belongs to another version of JAX.

    Example:
      >>> len(devices("h100:8"))
      8
    """
    asked = target(name)
    if reason := missing(name):
        raise ImportError(reason)
    _check_version(asked.platform)
    try:
        found = _topology(asked).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise ValueError(f"the compiler refuses target {name!r}: {error}") from error
    return tuple(found)


def mesh(
    name: str,
    axis_names: tuple[str, ...] = ("data",),
    shape: tuple[int, ...] | None = None,
) -> Mesh:
    """A mesh of a compile-only target's devices, for `.lower(...).compile()`.

    Args:
      name: see `target`.
      axis_names: names of the mesh axes.
      shape: sizes of the mesh axes; may be left out for a single axis.

    Returns:
      A mesh whose axes are all `AxisType.Auto`, devices placed as `jax.make_mesh` does.

    Raises:
      ValueError: `shape` does not name every device, or as `devices`.
      NotImplementedError: a TPU's torus has no such shape (from `jax.make_mesh`).

    Example:
      >>> mesh("h100:8", ("replica", "data"), (2, 4)).shape["data"]
      4
    """
    count = target(name).num_devices
    sizes = (count,) if shape is None else shape
    if len(sizes) != len(axis_names) or math.prod(sizes) != count:
        raise ValueError(
            f"target {name!r} has {count} devices, which do not form a mesh of shape "
            f"{sizes} with axes {axis_names}.\nPass shape= with one size per axis."
        )
    return jax.make_mesh(
        sizes,
        axis_names,
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices(name),
    )


def missing(name: str) -> str:
    """Why a target's compiler cannot be loaded: what to install, or `""` if nothing.

    Only looks whether the packages are there, not whether they work: tests that skip on
    it still fail on a broken installation.

    Args:
      name: see `target`.

    Returns:
      A message, or the empty string.

    Raises:
      ValueError: no such target.

    Example:
      >>> missing("h100:8")
      ''
    """
    platform = target(name).platform
    if any(_version(package) for package in _PACKAGES[platform]):
        return ""
    return (
        f"compiling for {name!r} needs the package {' or '.join(_PACKAGES[platform])}, "
        "which is not installed.\nRun, in a clone of shardfn: pip install -e '.[aot]'"
    )


_PACKAGES = {
    "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
    "tpu": ("libtpu",),
}


def _unknown(name: str, known: bool = False) -> ValueError:
    if known:
        chip = name.removeprefix("tpu:")
        whole = f"{chip}:8" if chip in GPUS else f"tpu:{chip}:2x4"
        what = "the number of devices" if chip in GPUS else "the shape of a slice"
        return ValueError(
            f"target {name!r} lacks {what} behind it.\nWrite {whole} for example; "
            f"others are {_KNOWN}"
        )
    return ValueError(
        f"no compile-only target is called {name!r}. GPUs: {', '.join(GPUS)}; TPUs: "
        f"{', '.join(c for c in _FIGURES if c not in GPUS)}.\nExamples: {_KNOWN}"
    )


def _hosts_of_8(name: str, count: str) -> str:
    """`"8"` -> `"1x1x8"`, `"64"` -> `"1x8x8"`."""
    hosts, rest = divmod(int(count), 8)
    if int(count) > 8 and rest:
        raise ValueError(
            f"target {name!r} has {count} GPUs, which do not fill hosts of 8.\n"
            "Write it as <slices>x<hosts>x<GPUs per host>."
        )
    return f"1x1x{count}" if hosts <= 1 else f"1x{hosts}x8"


def _topology(asked: Target) -> topologies.TopologyDescription:
    if asked.platform == "tpu":
        if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        return topologies.get_topology_desc(asked.topology, platform="tpu")
    gpu = GPUS[asked.name.partition(":")[0]]
    return topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology=asked.topology
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _check_version(platform: str) -> None:
    """Raises if the installed compiler belongs to another JAX."""
    needed = _needed_libtpu() if platform == "tpu" else _version("jaxlib")
    for package in _PACKAGES[platform]:
        found = _version(package)
        if found and needed and not f"{found}.".startswith(f"{needed}."):
            raise RuntimeError(
                f"{package} {found} does not belong to jax {jax.__version__}, which "
                f"needs {needed}: it may misread the programs of this one.\n"
                f"Run, in a clone of shardfn: pip install -e '.[aot]' "
                f"'jax=={jax.__version__}'"
            )


def _needed_libtpu() -> str:
    """The version, or its first parts, that `jax[tpu]` asks for."""
    for line in importlib.metadata.requires("jax") or ():
        if pinned := re.match(r"libtpu\s*==\s*([\d.]+?)(?:\.\*)?\s*;", line):
            return pinned[1]
    return ""
