"""How long transfers and kernels take beyond their bytes and FLOPs.

In: a machine, and a collective with its bytes and devices. Out: `TransferTime`, the
seconds that its bytes take on the links and those until they are there.

GPUs: the ring and tree rows of the table by which NCCL itself chooses an algorithm and
a protocol, github.com/NVIDIA/nccl, src/graph/tuning.cc at 5067397; here, too, the one
of least time counts. Rings and trees through switches that add (NVLS) are left out.
TPUs: a microsecond per hop, jax-ml.github.io/scaling-book, "A note on ICI latency".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardfn._core.moves import AllReduce, AllToAll, Permute
from shardfn.analysis._data_sheets import Target

Coords = Sequence[Sequence[int]]
"""`Device.coords` of the devices that take part."""

US = 1e-6

NVLINK, NETWORK = "NVLink", "network"
"""What moves over one of them alone leaves the other free."""


@dataclass(frozen=True, slots=True)
class TransferTime:
    """One collective.

    Attributes:
      links: seconds that its bytes occupy the links.
      latency: seconds from then on until the last of them is there.
      over: kinds of links that they occupy, where a machine has several.
    """

    links: float
    latency: float
    over: tuple[str, ...] = ("links",)

    @property
    def seconds(self) -> float:
        return self.links + self.latency


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way in which NCCL moves data; seconds of latency.

    Attributes:
      start: of any collective.
      nvlink: of a step within a slice.
      network: of a step between slices.
      network_card: the least of any step, in a group that spans slices.
      share: the part of the links' rate that carries data.
    """

    start: float
    nvlink: float
    network: float
    network_card: float
    share: float


RING = (
    Protocol(6.6 * US, 0.6 * US, 2.7 * US, 1 * US, 0.5),
    Protocol(14 * US, 1.9 * US, 4 * US, 1 * US, 0.92),
    Protocol(8.4 * US, 3.4 * US, 14 * US, 3 * US, 1.0),
)
"""Low latency, 128-byte low latency, and simple, along a ring."""

TREE = (
    Protocol(6.8 * US, 0.6 * US, 5 * US, 0.0, 1 / 3.8),
    Protocol(14 * US, 1.25 * US, 8.5 * US, 0.0, 7 / 9),
    Protocol(8.4 * US, 4 * US, 14 * US, 0.0, 0.92),
)
"""The same up and down a tree, which only all-reduces take."""

ICI_HOP = 1 * US
"""Seconds of a hop between two TPUs of a slice."""

KERNEL_GAP = {"cuda": 0.9 * US, "tpu": 0.0}
"""Seconds between one kernel and the next. On GPUs 20 kernels of 2.9 us each took 3.8
us apiece, launched one behind the other (developer.nvidia.com/blog/cuda-graphs). A TPU
runs one program; no figure is published."""


def transfer(target: Target, op: str, sent: float, coords: Coords) -> TransferTime:
    """How long a collective takes, if nothing else uses its links.

    A GPU's ring that spans slices, each of what NVLink connects, crosses each slice's
    edge over the network cards of all its devices there. One device of each slice, as
    in a sum over replicas, leaves NVLink to others. A TPU's uses the links along
    the torus dimensions that it extends over.

    Args:
      target: the machine.
      op: the collective, as plans name it.
      sent: bytes that each device sends.
      coords: `Device.coords` of the devices of one group.

    Returns:
      Seconds at the rates of the data sheets, and the latency.
    """
    if len(coords) < 2:
        return TransferTime(0.0, 0.0, ())
    if target.platform == "cuda":
        return _on_gpus(target, op, sent, coords)
    return _on_torus(target, op, sent, coords)


def _on_gpus(target: Target, op: str, sent: float, coords: Coords) -> TransferTime:
    slices = Counter(c[0] for c in coords)
    rate, over = target.link_bandwidth, [NVLINK] * (len(coords) > len(slices))
    if len(slices) > 1:
        rate = min(rate, target.network_bandwidth * min(slices.values()))
        over.append(NETWORK)
    ways = (
        TransferTime(sent / (rate * share), latency, tuple(over))
        for latency, share in _ways(op, len(coords), len(slices))
    )
    return min(ways, key=_seconds)


def _ways(op: str, devices: int, slices: int) -> Iterator[tuple[float, float]]:
    """Latency, and the part of the links' rate, of each way that an operation has."""
    trips = 2 if op == AllReduce.op else 1
    between = trips * (slices - 1)
    within = trips * (devices - 1) - between
    for way in RING:
        nvlink = max(way.nvlink, way.network_card if slices > 1 else 0.0)
        if op in (AllToAll.op, Permute.op):  # straight to each: one step
            step = way.network if slices > 1 else way.nvlink
            yield way.start + step, way.share
        else:
            yield way.start + within * nvlink + between * way.network, way.share
    if op == AllReduce.op:
        down = devices // slices - 1
        for way in TREE:
            climb = down * way.nvlink + math.log2(slices) * way.network
            yield way.start + 2 * climb, way.share


def _seconds(way: TransferTime) -> float:
    return way.seconds


def _on_torus(target: Target, op: str, sent: float, coords: Coords) -> TransferTime:
    """On a torus data flows on from chip to chip, so hops wait only for what is
    shorter than them."""
    shape = [int(n) for n in target.topology.rpartition(":")[2].split("x")]
    extents = [len(set(along)) for along in zip(*coords, strict=True)][: len(shape)]
    used = max(sum(extent > 1 for extent in extents), 1)
    links = sent / (target.link_bandwidth * used / len(shape))
    around = 4 if len(shape) == 3 else 16
    hops = sum(
        extent // 2 if extent == size and not size % around else extent - 1
        for extent, size in zip(extents, shape, strict=False)
    )
    trips = 2 if op == AllReduce.op else 1
    return TransferTime(links, max(trips * hops * ICI_HOP - links, 0.0))
