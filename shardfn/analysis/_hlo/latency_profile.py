"""What each instruction of a compiled program takes, as XLA's scheduler reads it.

In: seconds by the name of an instruction. Out: a profile as a profiler would write it,
for `jax.jit(compiler_options={"fdo_profile": ...})`.

XLA for GPUs orders a program by what its instructions take, so that transfers run
beside enough work. Without a profile it goes by figures of its own: for the network on
Hopper and Blackwell, for each kind of instruction, whatever its size, on other GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardfn.analysis._latency import US


def latency_profile(durations: Iterable[tuple[str, float]]) -> bytes:
    """The profile.

    Args:
      durations: names and seconds, as in `Timeline.durations`.

    Returns:
      The text proto `tensorflow.profiler.ProfiledInstructionsProto`, sorted by name.
    """
    costs = (
        f'costs {{ name: "{name}" cost_us: {seconds / US!r} }}\n'
        for name, seconds in sorted(durations)
    )
    return "".join(costs).encode()
