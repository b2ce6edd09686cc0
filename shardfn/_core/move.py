"""What a move is: what takes a value from one sharding to the next on a path.

In: nothing. Out: `Move`, the frozen value that all kinds of moves in `moves` are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardfn._core.quantized import SCALE_BYTES, Quantized
from shardfn._core.sharding import (
    Axes,
    AxisSharding,
    Sharding,
    Split,
    Unreduced,
    along,
    local_shape,
)


@dataclass(frozen=True, slots=True)
class Message:
    """What one collective of a move takes.

    Attributes:
      op: the collective, in JAX's words.
      elements: of the larger side on one device, padding included.
      devices: how many talk to each other.
      sent: elements that each device sends, each time.
      times: how many collectives of this kind there are.
    """

    op: str
    elements: int
    devices: int
    sent: float
    times: int = 1


@dataclass(frozen=True, slots=True)
class Move:
    """A move between neighbours of a path.

    Attributes:
      before: the sharding it starts from.
      after: the one it ends in.
      axis: index of the mesh axis in which they differ, or the first of several.
      quantized: how the value is written on the wire, if not as it is.

    Of the class:
      name: what the move is called.
      op: the collective in plans, in JAX's words; "" if nothing is sent.
      hlo_ops: the opcodes of that collective in compiled programs.
      outcome: what becomes of the value, in words for people.
      joins: whether moves of several values can be one collective.
      sums: whether the collective reduces terms.
      trips: how often a ring over the devices sends the value.
      packs: whether it moves elements as they are, so that it may move quantized ones
        and their scales.
    """

    before: Sharding
    after: Sharding
    axis: int
    quantized: Quantized | None = None

    name: ClassVar[str] = ""
    op: ClassVar[str] = ""
    hlo_ops: ClassVar[tuple[str, ...]] = ()
    outcome: ClassVar[str] = ""
    joins: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    trips: ClassVar[int] = 0
    packs: ClassVar[bool] = False

    @property
    def state(self) -> AxisSharding:
        """How the axis splits the value before."""
        return self.before[self.axis]

    @property
    def goal(self) -> AxisSharding:
        """How the axis splits the value after."""
        return self.after[self.axis]

    @property
    def over(self) -> tuple[int, ...]:
        """Indices of all mesh axes that it is over, major to minor: several for what
        moves through all blocks of a dimension that they split together."""
        pairs = enumerate(zip(self.before, self.after, strict=True))
        return tuple(axis for axis, (state, goal) in pairs if state != goal)

    @property
    def communicates(self) -> bool:
        """Whether devices talk to each other."""
        return bool(self.op)

    @property
    def reduces(self) -> str:
        """What the collective reduces terms by; "" if it does not reduce."""
        return self.state.op if self.sums and isinstance(self.state, Unreduced) else ""

    def fits(self, shape: Sequence[int], axes: Axes) -> bool:
        """Whether a path may take it with a value of global `shape`; the way around is
        by a whole value."""
        return True

    @classmethod
    def arrivals(cls, goal: Split, size: int) -> tuple[Split, ...]:
        """The splits to go through, `goal` the last, from blocks of `size` rows to such
        a goal as this kind of move alone reaches; none to others."""
        return ()

    @property
    def packed_as(self) -> Quantized | None:
        """How the elements and scales are written that it takes; None if it takes the
        value."""
        return self.quantized if self.packs else None

    def devices(self, shape: Sequence[int], axes: Axes) -> int:
        """How many devices talk to each other about a value of global `shape`."""
        return min(
            along(self.before, self.axis, axes), along(self.after, self.axis, axes)
        )

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        """Elements of the larger side on one device, padding included, of a value of
        global `shape`."""
        return math.prod(local_shape(shape, self.before, axes))

    def wire_elements(self, shape: Sequence[int], axes: Axes) -> float:
        """Elements that each device sends, by a ring over the devices."""
        n = self.devices(shape, axes)
        return self.trips * self.elements(shape, axes) * (n - 1) / n

    def sent_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape of what a collective takes, of a value of global `shape`:
        of its elements, and of their scales if these are not sent by themselves."""
        if self.quantized is None or self.packs:
            return tuple(shape)
        return self.quantized.packed(shape)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The global shape of scales that are sent by themselves, `SCALE_BYTES` each;
        None if there are none."""
        return self.quantized.scales(shape) if self.quantized and self.packs else None

    def messages(self, shape: Sequence[int], axes: Axes) -> tuple[Message, ...]:
        """The collectives that it is, for a value of global `shape`: one, of most."""
        taken, devices = self.sent_shape(shape), self.devices(shape, axes)
        elements, sent = self.elements(taken, axes), self.wire_elements(taken, axes)
        return (Message(self.op, elements, devices, sent),)

    def sent_itemsize(self, itemsize: int) -> int:
        """Bytes of an element on the wire, of one that has `itemsize` before."""
        return itemsize if self.quantized is None else 1

    def wire_bytes(self, shape: Sequence[int], axes: Axes, itemsize: int) -> float:
        """Bytes that each device sends of a value of global `shape`, whose elements
        have `itemsize` bytes where they are not quantized."""
        each = self.sent_itemsize(itemsize)
        sent = each * sum(m.sent * m.times for m in self.messages(shape, axes))
        alone = self.scales_shape(shape) is not None
        return sent + (self.scale_bytes(shape, axes) if alone else 0)

    def scale_bytes(self, shape: Sequence[int], axes: Axes) -> float:
        """Those of them that are scales."""
        if self.quantized is None:
            return 0
        scales = self.quantized.scales(shape)
        return self.wire_elements(scales, axes) * SCALE_BYTES
