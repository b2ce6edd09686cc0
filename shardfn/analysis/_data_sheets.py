"""What accelerators can do, as their makers publish it.

In: nothing. Out: a `Target` per chip: FLOP/s, bytes of memory, bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True, slots=True)
class Target:
    """A number of equal accelerators and what one of them can do at most.

    Attributes:
      name: as given to `target`.
      platform: `cuda` or `tpu`.
      topology: slices x hosts x GPUs per host, where NVLink connects a slice; or the
        TPU slice such as `v5e:2x4`.
      num_devices: how many there are.
      flops: peak bfloat16 floating-point operations per second, dense.
      memory: bytes of HBM.
      memory_bandwidth: bytes per second to and from HBM.
      link_bandwidth: bytes per second that one device sends over all its NVLink or ICI
        links together; it receives as much at the same time.
      network_bandwidth: bytes per second per device and direction between hosts that no
        such link connects.
      host_bandwidth: bytes per second and direction between a device and its host.
      host_memory: bytes of the host's memory per device.
      cores: devices of a TPU chip.
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
    host_bandwidth: float
    host_memory: int
    cores: int = 1

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


def _chip(
    flops: float,
    memory: int,
    bandwidth: float,
    link: float,
    network: float,
    host: tuple[float, int],
    **others: int,
) -> Target:
    figures = flops, memory, bandwidth, link, network, *host
    return Target("", "", "", 0, *figures, **others)


# GPUs: NVIDIA's data sheets, whose NVLink and PCIe rates are the sum of both directions
# and whose rates marked "with sparsity" are twice the dense ones. Networks, and an
# eighth of the host's memory: the data sheet of that generation's DGX.
# TPUs: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}, whose ICI rates in GBps sum
# up both directions, and whose memory of a host or virtual machine is shared by 8
# chips, or 4 of v5p and tpu7x. Data-centre networks there are per host of 8 chips or
# per chip. PCIe: jax-ml.github.io/scaling-book/tpus, 16 GB/s for most TPUs and 32 GB/s
# for v6e.
DATA_SHEETS = {
    # A100 80GB SXM: 312 TFLOPS, 80 GB, 2,039 GB/s, NVLink 600 GB/s, PCIe 64 GB/s;
    # DGX A100 200 Gb/s, 2 TB.
    "a100": _chip(312e12, 80 * GB, 2.039e12, 300e9, 25e9, (32e9, 256 * GB)),
    # H100 SXM: 1,979 TFLOPS sparse, 80 GB, 3.35 TB/s, 900 GB/s, PCIe 128 GB/s;
    # DGX H100 400 Gb/s, 2 TB.
    "h100": _chip(989.5e12, 80 * GB, 3.35e12, 450e9, 50e9, (64e9, 256 * GB)),
    # H200 SXM: 1,979 TFLOPS sparse, 141 GB, 4.8 TB/s, 900 GB/s, PCIe 128 GB/s;
    # DGX H200 400 Gb/s, 2 TB.
    "h200": _chip(989.5e12, 141 * GB, 4.8e12, 450e9, 50e9, (64e9, 256 * GB)),
    # DGX B200, eighth parts: 36 PFLOPS sparse, 1,440 GB, 64 TB/s, 14.4 TB/s; 400 Gb/s,
    # 2 TB; PCIe of the fifth generation as H100's.
    "b200": _chip(2.25e15, 180 * GB, 8e12, 900e9, 50e9, (64e9, 256 * GB)),
    # GB200 NVL72, seventy-second parts: 360 PFLOPS sparse, 13.4 TB, 576 TB/s, NVLink
    # 130 TB/s between all of a rack; 400 Gb/s per GPU. Two share a Grace of 480 GB, and
    # NVLink-C2C of 900 GB/s to it.
    "gb200": _chip(*(2.5e15, 186 * GB, 8e12, 900e9, 50e9, (225e9, 240 * GB))),
    # v5e: 197 TFLOPs, 16 GB, 819 GBps, ICI 1600 Gbps each way, 2 x 100 Gbps per host
    # of 512 GiB.
    "v5e": _chip(197e12, 16 * GB, 819e9, 200e9, 3.125e9, (16e9, 64 * 2**30)),
    # v5p: 459 TFLOPs, 95 GiB, 2765 GBps, ICI 1200 GBps, DCN 50 Gbps per chip; 448 GB.
    "v5p": _chip(459e12, 95 * 2**30, 2.765e12, 600e9, 6.25e9, (16e9, 112 * GB)),
    # v6e: 918 TFLOPs, 32 GB, 1600 GBps, ICI 800 GBps, 4 x 200 Gbps per host of
    # 1536 GiB.
    "v6e": _chip(918e12, 32 * GB, 1.6e12, 400e9, 12.5e9, (32e9, 192 * 2**30)),
    # TPU7x, whose chips are two devices each: 2307 TFLOPs, 192 GiB, 7380 GBps, ICI 1200
    # GBps, DCN 100 Gbps per chip; 960 GB. PCIe is taken to be v6e's.
    "tpu7x": _chip(
        *(1153.5e12, 96 * 2**30, 3.69e12, 300e9, 6.25e9, (16e9, 120 * GB)), cores=2
    ),
}
