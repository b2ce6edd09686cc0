"""How much of a device's memory a step takes, by its plan.

In: a program and its plan, and how a compiler uses memory. Out: bytes. An estimate: the
compiler's own schedule and how it packs its buffers are not known to it.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program
from shardfn._core.sharding import Axes
from shardfn._core.sizes import local_bytes, nbytes
from shardfn._schedule.heap import Heap
from shardfn._schedule.liveness import Liveness


def peak_bytes(program: Program, body: BodyPlan, axes: Axes, heap: Heap) -> int:
    """Bytes that one device takes for a whole step: arguments, the arrays that the step
    captures, and the most of what lives at once besides.

    Args:
      program: the step.
      body: its plan, with the copies between the memories if it has any.
      axes: the mesh axes.
      heap: how the compiler uses memory.

    Returns:
      The bytes.
    """
    arguments = sum(
        local_bytes(program.avals[value], sharding, axes)
        for i, (value, sharding) in enumerate(
            zip(program.inputs, body.inputs, strict=True)
        )
        if i not in body.on_host
    )
    if not heap.donates:
        body = replace(body, aliased=frozenset())
    most = max(Liveness(program, body, axes, heap).profile())
    return arguments + captured_bytes(program) + most + int(most * heap.holes)


def captured_bytes(program: Program) -> int:
    """Bytes of the arrays that a step captures, which every device has."""
    return sum(dict(_captured(program)).values())


def _captured(program: Program) -> Iterator[tuple[int, int]]:
    """Which arrays a program and the bodies in it capture, and the bytes of each, which
    every device has."""
    for value, array in program.constants:
        yield id(array), nbytes(program.avals[value])
    for node in program.nodes:
        for body in node.bodies:
            yield from _captured(body)
