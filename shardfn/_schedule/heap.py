"""What a compiler does with a device's memory.

In: nothing. Out: `Heap`, of which a plan's estimate of memory is made;
`_lowering.heap` knows which compiler does what.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heap:
    """What a compiler does with memory.

    Attributes:
      delays_sums: whether the sums of a loop wait for an iteration, see `delayed_sums`.
      casts_stacks: whether stacks of which a loop casts the slices are cast as a whole
        in front of it, see `cast_stacks`.
      compares: whether a scatter of one number to each row is a comparison of indices,
        made where it is read.
      inlines: whether what a function with a derivative of its own makes, such as a
        ReLU, is written over what it is made of; beside that if not.
      packs_masks: whether the derivative of a ReLU keeps the signs of what it is of in
        place of the numbers, where several go into a byte.
      pads_gathers: whether weights of which a device has less than a tile along the
        dimension that is gathered are gathered with as much padding.
      holes: what its heap takes beyond what lives at once, as a part of that.
      donates: whether new state is written over the old one.
    """

    delays_sums: bool = False
    casts_stacks: bool = False
    compares: bool = False
    inlines: bool = False
    packs_masks: bool = False
    pads_gathers: bool = False
    holes: float = 0
    donates: bool = True
