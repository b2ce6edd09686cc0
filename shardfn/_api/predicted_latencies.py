"""Tells XLA's scheduler what each instruction of a step takes on its machine.

In: a step that is lowered for GPUs, and their mesh. Out: the option of the compiler
with which it is compiled again, scheduled by these figures.
"""

from typing import Any, Literal

import jax
from jax.sharding import Mesh

from shardfn._core import processes
from shardfn._core.errors import ShardingError, called
from shardfn._lowering.xla_options import device_and_platform
from shardfn.analysis._hlo.latency_profile import latency_profile
from shardfn.analysis._hlo.play import play
from shardfn.analysis._rates import KINDS, gpus_of, rates_of

Latencies = Literal["xla", "predicted"]
LATENCIES: tuple[Latencies, ...] = ("xla", "predicted")
"""Whose figures XLA's scheduler goes by: its own, or those of this package."""


def are_predicted(latencies: Latencies, mesh: Mesh) -> bool:
    """Whether a step is compiled twice: where that is asked, for GPUs. The compilers of
    other platforms take no such figures."""
    _, platform = device_and_platform(tuple(mesh.devices.flat))
    return latencies == "predicted" and platform == "gpu"


def predicted_latencies(lowered: jax.stages.Lowered, mesh: Mesh) -> dict[str, Any]:
    """Compiles a step to see its instructions, and predicts what each takes.

    Args:
      lowered: the step, lowered for the GPUs of `mesh`.
      mesh: its mesh.

    Returns:
      An option for `jax.jit(compiler_options=)`. The same program gives the same; of
      several processes all have that of the first, so that their schedules agree.

    Raises:
      ShardingError: no data sheet is known of these GPUs.
    """
    target = gpus_of(mesh)
    if target is None:
        raise ShardingError(
            "latencies='predicted' needs the data sheet of "
            f"{mesh.devices.flat[0].device_kind}, and has those of {', '.join(KINDS)}."
            f"\n{called()}"
            "Leave latencies out, or set JAX_ENABLE_PGLE=1 to measure them."
        )
    text = lowered.compile().as_text() or ""
    timeline = play(text, rates_of(target, mesh))
    profile = processes.of_the_first(
        "predicted what its instructions take",
        latency_profile(timeline.durations).decode(),
        processes.of(mesh.devices.flat),
    )
    return {"fdo_profile": profile.encode()}
