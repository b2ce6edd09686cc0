"""GPUs that XLA can compile for without having one.

In: a name. Out: the description that XLA's compiler reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """What XLA's cost model and code generator need to know of a GPU.

    Attributes:
      description: the `device_kind` of one that is not there.
      driver_name: that of one that is there, where it is another.
      xla_network: bytes per second of each GPU between slices, by which XLA schedules;
        None where it does not go by one.
    """

    description: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    core_shared_memory: int
    block_shared_memory: int
    l2_cache: int
    clock_ghz: float
    memory: int
    memory_bandwidth: int
    cudnn: tuple[int, int, int]
    driver_name: str = ""
    xla_network: float | None = 50e9


# As the driver reports them: github.com/openxla/xla,
# xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200,gb200}.txtpb.
# `xla_network`: nic_speed_gbps in xla/service/gpu/model/sol_gpu_cost_model.cc, where an
# H100 has half of the others' figure; XLA does not use that model before Hopper.
GPUS = {
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 166912, 41943040, 1.41),
        *(85100068864, 2039040000000, (8, 9, 4)),
        xla_network=None,
    ),
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 232448, 52428800, 1.98),
        *(84978434048, 3352320000000, (9, 1, 1)),
        xla_network=25e9,
    ),
    "h200": Gpu(
        *("NVIDIA H200 141GB HBM3e", (9, 0), 132, 128, 233472, 232448, 52428800, 1.98),
        *(151397597184, 4800000000000, (9, 10, 0), "NVIDIA H200"),
    ),
    "b200": Gpu(
        *("NVIDIA B200", (10, 0), 148, 128, 233472, 232448, 132644864, 1.965),
        *(191514411008, 7672320000000, (9, 7, 0)),
    ),
    "gb200": Gpu(
        *("NVIDIA GB200", (10, 0), 152, 128, 233472, 232448, 135528448, 2.062),
        *(197897748480, 7928064000000, (9, 15, 0)),
    ),
}


def target_config(gpu: Gpu) -> str:
    """The text proto `stream_executor.GpuTargetConfigProto`."""
    (major, minor), cudnn = gpu.capability, gpu.cudnn
    return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      core_count: {gpu.cores} fpus_per_core: {gpu.fpus_per_core}
      shared_memory_per_block: 49152
      shared_memory_per_core: {gpu.core_shared_memory}
      shared_memory_per_block_optin: {gpu.block_shared_memory}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      l2_cache_size: {gpu.l2_cache} clock_rate_ghz: {gpu.clock_ghz}
      device_memory_size: {gpu.memory} memory_bandwidth: {gpu.memory_bandwidth}
      cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: {cudnn[0]} minor: {cudnn[1]} patch: {cudnn[2]} }}
    device_description_str: "{gpu.description}"
    """
