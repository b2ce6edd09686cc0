"""Devices of accelerators that are not there, to compile for.

In: a target's name, such as `h100:8`. Out: its devices, a mesh of them, or its figures
(see `_data_sheets`).

XLA's GPU and TPU compilers run on a machine without a GPU or a TPU. They need the
packages of the extra `aot`, in the versions that belong to the installed
JAX. Set `JAX_PLATFORMS=cpu` before importing JAX on a machine without accelerators.
"""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import math
import os
import re
from dataclasses import replace

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from shardfn._core.argument_values import COUNTS, NAMES, TEXT, check_arguments
from shardfn.analysis._data_sheets import DATA_SHEETS, Target
from shardfn.analysis._gpus import GPUS, target_config

__all__ = ["Target", "devices", "mesh", "missing", "target"]


_KNOWN = "a100:8, h100:8, h100:64, h200:8, b200:8, tpu:v5e:2x4, tpu:v5p:4x4x4, ..."
_HOSTS = {"gb200": (4, 18)}
"""GPUs per host, and hosts of a slice, which NVLink connects; 8 and 1 of others."""


_SLICES = {"v5e": "2x4", "v6e": "2x4"}
"""An example of a slice, of chips whose slices have two sides."""


def target(name: str) -> Target:
    """The figures of a compile-only target, without loading its compiler.

    Args:
      name: `<gpu>:<count>` or `<gpu>:<slices>x<hosts>x<GPUs per host>`, with one of
        `a100`, `h100`, `h200`, `b200`, `gb200`; or `tpu:<generation>:<slice shape>`,
        with `v5e`, `v5p`, `v6e` or `tpu7x`. A slice of GPUs is what NVLink connects, as
        XLA takes it on machines that are there. A count above 8 is taken as slices of
        one host of 8; of `gb200` as hosts of 4, of which up to 18 are a slice. The
        shape of a TPU slice counts chips, of which one of `tpu7x` is two devices.
        Capitals are small letters.

    Returns:
      A `Target`.

    Raises:
      ValueError: the name has another form or names another chip.

    Example:
      >>> target("h100:16").topology
      '2x1x8'
    """
    check_arguments("target", name=(name, TEXT))
    name = name.lower()
    if match := re.fullmatch(r"tpu:(\w+):(\d+(?:x\d+){1,2})", name):
        chip, shape = match.groups()
        platform, topology = "tpu", f"{chip}:{shape}"
    elif match := re.fullmatch(r"(\w+):(\d+|\d+x\d+x\d+)", name):
        chip, shape = match.groups()
        platform, topology = (
            "cuda",
            shape if "x" in shape else _hosts(name, chip, shape),
        )
        shape = topology
    else:
        raise _unknown(name)
    count = math.prod(int(n) for n in shape.split("x"))
    if chip not in DATA_SHEETS or (platform == "cuda") != (chip in GPUS) or not count:
        raise _unknown(name)
    return replace(
        DATA_SHEETS[chip],
        name=name,
        platform=platform,
        topology=topology,
        num_devices=count * DATA_SHEETS[chip].cores,
    )


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
    check_arguments("devices", name=(name, TEXT))
    return _devices(name)


@functools.cache
def _devices(name: str) -> tuple[jax.Device, ...]:  # pyright: ignore
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
    check_arguments(
        "mesh", axis_names=(axis_names, NAMES), shape=(shape, COUNTS.or_none())
    )
    count = target(name).num_devices
    sizes = (count,) if shape is None else shape
    if len(sizes) != len(axis_names) or math.prod(sizes) != count:
        raise ValueError(
            f"target {name!r} has {count} devices, which do not form a mesh of shape "
            f"{sizes} with axes {axis_names}.\nPass one size per axis, as shape= of "
            "mesh, or mesh_shape= of step.on and tune."
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
        "which is not installed.\n"
        "Run pip install 'shardfn[aot]', or in a clone pip install -e '.[aot]'"
    )


_PACKAGES = {
    "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
    "tpu": ("libtpu",),
}


def _unknown(name: str) -> ValueError:
    chip, _, rest = name.removeprefix("tpu:").partition(":")
    if chip == "v4":
        return ValueError(
            f"target {name!r} cannot be compiled for: the compiler knows v4 by its "
            "TensorCores, and JAX takes two of them for one device.\n"
            "Take tpu:v5p and a shape of as many chips, the generation after it."
        )
    if chip in DATA_SHEETS and not rest:
        whole = f"{chip}:8" if chip in GPUS else f"tpu:{chip}:2x4"
        what = "the number of devices" if chip in GPUS else "the shape of a slice"
        return ValueError(
            f"target {name!r} lacks {what} behind it.\nWrite {whole} for example; "
            f"others are {_KNOWN}"
        )
    if chip in DATA_SHEETS and re.fullmatch(r"\d+(x\d+){0,2}", rest):
        if chip not in GPUS and "x" in rest and not name.startswith("tpu:"):
            return ValueError(f"target {name!r} lacks tpu:\nWrite tpu:{name}.")
        if chip in GPUS and name.startswith("tpu:"):
            return ValueError(f"target {name!r} is a GPU.\nWrite {chip}:8 for example.")
        if chip not in GPUS and "x" not in rest and int(rest):
            return ValueError(
                f"target {name!r} has a number of TPUs, whose slices are named by "
                f"their shape.\nWrite the chips along each side of the slice, as in "
                f"tpu:{chip}:{_SLICES.get(chip, '2x2x2')}."
            )
    return ValueError(
        f"no compile-only target is called {name!r}. GPUs: {', '.join(GPUS)}; TPUs: "
        f"{', '.join(c for c in DATA_SHEETS if c not in GPUS)}.\nExamples: {_KNOWN}"
    )


def _hosts(name: str, chip: str, count: str) -> str:
    """`"8"` -> `"1x1x8"`, `"64"` -> `"8x1x8"`; of GB200 `"64"` -> `"1x16x4"`."""
    per_host, linked = _HOSTS.get(chip, (8, 1))
    hosts, rest = divmod(int(count), per_host)
    if hosts and rest:
        raise ValueError(
            f"target {name!r} has {count} GPUs, which do not fill hosts of "
            f"{per_host}.\nWrite it as <slices>x<hosts>x<GPUs per host>."
        )
    if not hosts:
        return f"1x1x{count}"
    slices, rest = divmod(hosts, linked)
    if not slices:
        return f"1x{hosts}x{per_host}"
    if rest:
        raise ValueError(
            f"target {name!r} has {hosts} hosts, which do not fill slices of "
            f"{linked}.\nWrite it as <slices>x<hosts>x<GPUs per host>."
        )
    return f"{slices}x{linked}x{per_host}"


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
            pin = f"'jax=={jax.__version__}'"
            raise RuntimeError(
                f"{package} {found} does not belong to jax {jax.__version__}, which "
                f"needs {needed}: it may misread the programs of this one.\n"
                f"Run pip install 'shardfn[aot]' {pin}, or in a clone "
                f"pip install -e '.[aot]' {pin}"
            )


def _needed_libtpu() -> str:
    """The version, or its first parts, that `jax[tpu]` asks for."""
    for line in importlib.metadata.requires("jax") or ():
        if pinned := re.match(r"libtpu\s*==\s*([\d.]+?)(?:\.\*)?\s*;", line):
            return pinned[1]
    return ""
