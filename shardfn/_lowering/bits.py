"""Values that stay in eight bits until they are used, inside `shard_map`.

In: elements and scales of a local block, as they were gathered or as their leaf is
stored. Out: `Bits`, a pytree node that loops carry and stack, and what a use reads.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardfn._core.barrier import barrier
from shardfn._core.quantize import dequantize
from shardfn._core.quantized import Quantized


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["elements", "scales"],
    meta_fields=["how", "dtype"],
)
@dataclass(frozen=True)
class Bits:
    """A value as its elements and scales.

    Attributes:
      elements: as int8.
      scales: as `SCALE_BITS`.
      how: how they are written.
      dtype: in which the value is read.
    """

    elements: jax.Array
    scales: jax.Array
    how: Quantized
    dtype: Any

    def behind(self, after: jax.Array | None) -> "Bits":
        """The same, made no earlier than `after`."""
        rest = () if after is None else (after,)
        elements, scales, *_ = barrier(self.elements, self.scales, *rest)
        return replace(self, elements=elements, scales=scales)

    def read(self) -> jax.Array:
        return dequantize(self.elements, self.scales, self.how, jnp.dtype(self.dtype))


def whole(x: Any, made: dict[Any, jax.Array], key: Any) -> jax.Array:
    """`x`, read if it is in bits: once for each `key`, as `made` remembers, and behind
    a barrier, or the compiler would make one of the reads and keep what is read."""
    if not isinstance(x, Bits):
        return x
    if key not in made:
        made[key] = x.behind(None).read()
    return made[key]
