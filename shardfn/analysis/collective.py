"""One line of a plan: a collective as users read it.

In: nothing. Out: `Collective`, a frozen value.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Collective:
    """One line of the plan.

    Attributes:
      op: "all_gather", "psum_scatter", "all_reduce", "all_to_all", "ppermute".
      axis: mesh axis name; several, with commas, where rows move through the blocks
        of all axes that split a dimension.
      phase: "forward", "backward" or "update".
      shape: global shape of the value; of one part, if it is split over other mesh
        axes, too.
      dtype: dtype name on the wire.
      wire_bytes: bytes that each device sends, each time.
      scale_bytes: those of them that are scales of quantized blocks.
      block: elements that share a scale; 0 if the value is not quantized.
      times: runs per step; None inside a while loop.
      each: runs per step, of while loops in one iteration.
      path: the state leaf it belongs to, or "".
      place: the user's source line that needs it.
      fallback: the primitive without a rule that caused it, or "".
      name: the name scope that its operations are emitted under (see `line_name`).
      elements: of the value on one device where it is larger, padding included: after
        an all-gather, before a reduce-scatter. Of a quantized one bytes, with scales
        unless these have a collective of their own; of PRNG keys their words.
      scales: elements of that collective; 0 if there is none.
      devices: how many talk to each other; fewer than the axis has within a group.
      gradient: which gradient of the step it is part of, counted from 0.
      parts: state leaves that move together, and the wire bytes of each; empty if only
        one moves. The shape is then that of their concatenation.
      undelayed: whether the compiler may not delay it into a loop's next iteration.
      used_first: of a gather in a loop, whether an iteration's first products use it;
        see `prefetch="first"`.
      ahead: how many iterations before that which uses it a loop gathers it.
      value: which value of the program is moved: the same for moves of it in several
        bodies.
      alike: the first value of its body that is computed as it is; see
        `_computed_alike`.
      body: which body of the plan it is in.
      hoisted: how often it would run in front of a loop around it in which it is the
        same in every iteration, or of several of them; empty if there is none.
      unrolled: how often it would run once for all iterations that are written out
        beside each other; empty if it is not the same in them, or there are none.
      why: what it is for, of each move that it is; see `Plan.explain`.
      reduces: what a reduction reduces with: "sum", "max", "min", "and", "or"; else "".
    """

    op: str
    axis: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    wire_bytes: int
    times: int | None
    path: str = ""
    place: str = field(default="", compare=False)
    fallback: str = ""
    name: str = field(default="", compare=False)
    elements: int = field(default=0, compare=False)
    scales: int = field(default=0, compare=False)
    devices: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    scale_bytes: int = 0
    block: int = 0
    reduces: str = ""
    gradient: int = 0
    undelayed: bool = False
    used_first: bool = False
    ahead: int = 0
    value: tuple[int, ...] = field(default=(), compare=False)
    alike: tuple[int, ...] = field(default=(), compare=False, repr=False)
    body: tuple[int, ...] = field(default=(), compare=False)
    hoisted: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    unrolled: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    why: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    each: int = field(default=1, repr=False)

    @property
    def total_bytes(self) -> int:
        """Wire bytes per device and step; of a while loop one iteration counts."""
        return self.wire_bytes * self.each
