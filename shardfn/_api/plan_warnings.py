"""What users are warned of when a step is planned.

In: a planned step. Out: warnings, or an error in place of one if the user asked for it.
"""

from shardfn._api.planner import describe
from shardfn._api.residual_notes import warn_of_unused
from shardfn._core.errors import (
    InexactSignWarning,
    ReplicatedComputeWarning,
    ShardingError,
    UnsupportedPrimitiveWarning,
    UnusedAxisWarning,
    called,
    listed,
    warn,
    where,
)
from shardfn._core.limits import REPLICATED_FLOPS, REPLICATED_SHARE
from shardfn._lowering.planned_program import Planned
from shardfn._schedule.inexact_signs import inexact_signs
from shardfn.analysis._replicated import work_of
from shardfn.analysis.collective import Collective


def warn_of(planned: Planned, strict: bool) -> None:
    """Warns of what a plan costs or changes beyond what is asked; `strict` refuses
    operations that run on gathered operands."""
    _of_fallbacks(planned, strict)
    _of_replicated(planned)
    _of_axes(planned)
    _of_signs(planned)
    warn_of_unused(planned)


def _of_fallbacks(planned: Planned, strict: bool) -> None:
    """Warns once per primitive and line that runs on gathered operands, or refuses
    it."""
    if not planned.body.falls_back:
        return
    lines: dict[tuple[str, str], list[Collective]] = {}
    for line in describe(planned, fingerprint=False).fallbacks:
        lines.setdefault((line.fallback, line.place), []).append(line)
    for (primitive, place), group in lines.items():
        sent = sum(line.total_bytes for line in group)
        message = (
            f"primitive '{primitive}' has no op sharding rule, so its operands are "
            f"gathered: {sent} bytes per device and step.\n  at {place}\n"
            "Register one with shardfn.register_rule, or accept the cost."
        )
        if strict:
            raise ShardingError(f"{message} strict=True refuses it.")
        warn(message, UnsupportedPrimitiveWarning)


def _of_replicated(planned: Planned) -> None:
    """Warns if most of a device's work is the same on every device."""
    work = work_of(planned.program, planned.body, planned.axes)
    if work.share > REPLICATED_SHARE and work.replicated >= REPLICATED_FLOPS:
        warn(
            f"{work.share:.0%} of a device's FLOPs are the same on every device: "
            f"{work.replicated:.1e} per step, most of them\n  at {work.place}\n"
            "Nothing in them is split. Pass what they work on as a batch, or split it "
            "by shardfn.constrain, or accept the cost.",
            ReplicatedComputeWarning,
        )


def _of_axes(planned: Planned) -> None:
    """Warns of mesh axes that the batch is not split over, nor anything else."""
    for name, size in planned.unused:
        over = (*(n for n, _ in planned.unused if n == name), *planned.axes.names)
        warn(
            f"nothing is split over mesh axis '{name}': its {size} devices all compute "
            f"the same.\n{called()}Pass axis={over} to fully_shard to split the batch "
            "over it, too, or make a mesh without it.",
            UnusedAxisWarning,
        )


def _of_signs(planned: Planned) -> None:
    """Warns of signs that the update takes of gradients whose terms are quantized."""
    for names, node in inexact_signs(planned.program, planned.body):
        warn(
            f"the update takes the sign of the gradient of {listed(names)}, whose "
            f"terms reduce_dtype quantizes: what is rounded to zero has no sign.\n"
            f"  at {where(node.eqn)}\n{called()}Keep these sums exact, "
            f"reduce_dtype={{{names[0]!r}: None, '*': ...}}, or accept it.",
            InexactSignWarning,
        )
