"""Options that change results, or need another memory: tried only where a user asks.

In: what a step takes on a target, and the names of options. Out: a row of `Advice` per
value that may save time there, or make the step fit.
"""

from collections.abc import Collection, Iterator
from typing import Literal, get_args

import jax.numpy as jnp

from shardfn._core.moves import AllGather, ReduceScatter
from shardfn._core.option_values import AUTO
from shardfn.analysis._figures import Figures
from shardfn.analysis._text import seconds_text, size_text
from shardfn.analysis.advice import Advice

MOVED = {"gather_dtype": AllGather.op, "reduce_dtype": ReduceScatter.op}
"""The collectives whose dtype an option says."""

NARROWER = ("bfloat16", "int8")
"""What they may move in, the one that rounds less first."""

Also = Literal["offload", "gather_dtype", "reduce_dtype"]
"""An option that a user may ask for."""

ALSO: tuple[Also, ...] = get_args(Also)


def asked_rows(
    figures: Figures, memory: int, also: Collection[str]
) -> Iterator[Advice]:
    """The rows of the options asked for.

    Args:
      figures: of the step, compiled for the target.
      memory: bytes that the step may take on each device.
      also: names of `ALSO`.
    """
    for option in ALSO:
        if option in also:
            rows = _offload if option == "offload" else _narrower
            yield from rows(figures, memory, option)


def _offload(figures: Figures, memory: int, option: str) -> Iterator[Advice]:
    """As little of the state in the host's memory as makes the step fit."""
    lacks = figures.memory.peak - memory
    if lacks <= 0 or any(figures.plan.control.asked(option)):
        return
    whole = memory == figures.target.memory
    bound = AUTO if whole else f"{max(memory >> 10, 1)}KiB"
    there = size_text(figures.target.host_memory)
    why = f"{size_text(lacks)} are lacking; the host has {there} per device"
    yield Advice("state in the host's memory", ((option, bound),), 0.0, -lacks, why)


def _narrower(figures: Figures, memory: int, option: str) -> Iterator[Advice]:
    """Transfers in dtypes of fewer bytes than they move in, of a step that fits."""
    op, asked = MOVED[option], figures.plan.control.asked(option)
    lines = [c for c in figures.plan.collectives if c.op == op and c.path]
    waits = figures.timeline.exposed_by_op.get(op, 0.0)
    if not waits or any(asked) or figures.memory.peak > memory:
        return
    sent = sum(c.total_bytes for c in lines)
    for dtype in NARROWER:
        size = jnp.dtype(dtype).itemsize
        wider = [c for c in lines if jnp.dtype(c.dtype).itemsize > size]
        if wider:
            share = sum(c.total_bytes for c in wider) / sent
            waited = f"the device waits {seconds_text(waits)} for {op}"
            why = f"{waited}, {share:.0%} of whose bytes are wider"
            yield Advice(f"{op} in {dtype}", ((option, dtype),), waits, 0, why)
