"""Programs of many GPUs on the one GPU that is here, the others of which do not exist.

In: how many GPUs a program is for. Out: `jax.devices()` is as long; one of them is this
machine's. XLA's stand-in for NCCL copies what this device has to the place where it
would arrive, and leaves the others' places as the memory was. So a program computes as
much as it does on a machine with all of them, and waits for no link; its numbers mean
nothing, and may be NaN.

Uses what JAX keeps to itself: each process of a cluster tells the others its devices
through a store of keys and values. Here one process tells for all.
"""

import os
import socket
import threading

FLAGS = (
    "--xla_gpu_collectives_implementation=loopback",  # from JAX 0.11 on
    "--xla_gpu_shard_autotuning=false",  # no process but this one times kernels
)
PER_HOST = 8
PROCESS, HOST = 1, 2
"""Fields of XLA's `LocalTopologyProto` that processes differ by."""


def stand_in(devices: int) -> None:
    """Makes JAX see `devices` GPUs, one to a process, eight processes to a host.

    Args:
      devices: how many; the first is this machine's.
    """
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))
    import jax
    from jax._src import distributed

    jax.config.update("jax_platforms", "cuda")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", 1, 0, local_device_ids=[0])
    distributed.global_state.num_processes = devices
    store = distributed.global_state.client
    key = "cuda:local_topology/cuda/"

    def tell() -> None:
        own = store.blocking_key_value_get_bytes(f"{key}0", 120_000)
        for process in range(1, devices):
            store.key_value_set_bytes(f"{key}{process}", topology_of(process, own))

    threading.Thread(target=tell, daemon=True).start()


def topology_of(process: int, first: bytes) -> bytes:
    """What a process would tell of its devices.

    Args:
      process: its number.
      first: what the first one tells. Of two fields of a protocol buffer with the same
        number the last counts.
    """
    other = first + _varint(8 * PROCESS) + _varint(process)
    if host := process // PER_HOST:
        name = f"host {host}".encode()
        other += _varint(8 * HOST + 2) + _varint(len(name)) + name
    return other


def _varint(value: int) -> bytes:
    parts = [value & 127]
    while value := value >> 7:
        parts[-1] |= 128
        parts.append(value & 127)
    return bytes(parts)
