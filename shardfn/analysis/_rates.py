"""What the devices of a mesh do per second.

In: a mesh of devices, and the data sheet of their machine, which GPUs tell by their
kind. Out: `Rates`, at which `play` runs programs on that mesh.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import Mesh

from shardfn._core.device_coords import coords_of
from shardfn.analysis._data_sheets import DATA_SHEETS, Target
from shardfn.analysis._gpus import GPUS
from shardfn.analysis._hlo import HloCollective
from shardfn.analysis._hlo.timeline import Rates
from shardfn.analysis._latency import KERNEL_GAP, TransferTime, transfer

KINDS = {
    kind: name
    for name, gpu in GPUS.items()
    for kind in (gpu.description, gpu.driver_name or gpu.description)
}
"""Names of chips by the `device_kind` of GPUs."""


def gpus_of(mesh: Mesh) -> Target | None:
    """The figures of the GPUs of a mesh, there or not; None if no data sheet has their
    kind. Their topology is in their coordinates."""
    chip = KINDS.get(mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    return replace(DATA_SHEETS[chip], platform="cuda", num_devices=mesh.size)


def rates_of(target: Target, mesh: Mesh) -> Rates:
    """The target's rates for programs on `mesh`, a mesh of its devices."""
    coords = [coords_of(device) for device in mesh.devices.flat]

    def of_program(together: Sequence[HloCollective]) -> TransferTime:
        sent = sum(c.wire_bytes for c in together)
        group = [coords[d] for d in together[0].groups[0]]
        return transfer(target, together[0].op, sent, group)

    return Rates(
        target.matmul_rate,
        target.memory_bandwidth,
        of_program,
        target.host_bandwidth,
        KERNEL_GAP[target.platform],
    )
