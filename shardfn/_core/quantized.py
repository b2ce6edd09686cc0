"""Blocks of a value that cross the wire in eight bits an element, each with a scale.

In: a shard's shape, and how many elements are asked to share a scale. Out: `Quantized`,
a frozen value that knows along which dimension the blocks lie, and what they take.
Shards are cut on the edges of blocks: to quantize a shard is to quantize the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from shardfn._core.limits import BLOCK_PART
from shardfn._core.sharding import Axes, Sharding, is_flat, local_shape, stored_shape

DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Those that values are scaled to: one byte an element."""

SCALE_DTYPE = "bfloat16"
"""Of a scale. It has float32's range, and its product with an element of `DTYPES` is
exact in float32."""

SCALE_BYTES = jnp.dtype(SCALE_DTYPE).itemsize
SCALE_BITS = f"uint{8 * SCALE_BYTES}"

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a value is written in blocks.

    Attributes:
      dtype: of an element.
      block: how many neighbours share a scale.
      dim: the dimension along which they are neighbours.
      rounding: to the nearest element, or up and down by chance, to the value on
        average.
    """

    dtype: str
    block: int
    dim: int
    rounding: Rounding = "nearest"

    def packed(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in bytes of a value of `shape`: along `dim`, the elements of each
        shard are followed by their scales."""
        blocks, rest = divmod(shape[self.dim], self.block)
        assert not rest, f"blocks of {self.block} do not divide {tuple(shape)}"
        bytes_ = blocks * (self.block + SCALE_BYTES)
        return (*shape[: self.dim], bytes_, *shape[self.dim + 1 :])

    def scales(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a value of `shape`."""
        blocks = shape[self.dim] // self.block
        return (*shape[: self.dim], blocks, *shape[self.dim + 1 :])


def is_quantized(dtype: str | None) -> bool:
    """Whether values are scaled to this dtype, not cast."""
    return dtype in DTYPES


def find_blocks(
    shape: Sequence[int], sharding: Sharding, axes: Axes, most: int
) -> tuple[int, int] | None:
    """Along which dimension blocks lie, and of how many elements they are: as near to
    `most` as divides a dimension on each device, the last if several; None if none."""
    if is_flat(sharding):
        return None
    local = local_shape(shape, sharding, axes)
    padded = stored_shape(shape, sharding, axes)
    dims = [d for d, n in enumerate(shape) if n and n == padded[d]]
    for block in range(most, 0, -1):
        for dim in reversed(dims):
            if block >= most * BLOCK_PART and local[dim] % block == 0:
                return dim, block
    return None
