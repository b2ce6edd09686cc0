"""The derivative of a maximum or minimum over a dimension that devices split.

In: a local block, its local maximum, and the collective that makes the global one.
Out: the global one, with the derivative of JAX's own reduction: shared evenly by all
elements that are tied, on whichever device they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.plan import Apply
from shardfn._core.program import Node
from shardfn._core.sharding import Axes, Unreduced


@dataclass(frozen=True, slots=True)
class Extreme:
    """A local maximum or minimum that is still to be reduced over devices.

    Attributes:
      block: the local block it was taken of.
      dims: the dimensions it was taken over.
      names: the mesh axes that split them, as `shard_map` binds them.
      moves: how many moves reduce over these.
    """

    block: jax.Array
    dims: tuple[int, ...]
    names: tuple[str, ...]
    moves: int

    def reduced(
        self, local: jax.Array, collective: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """`collective(local)`, the maximum over devices, with its derivative."""

        dims, names = self.dims, self.names  # a closure over `block` would leak it

        @jax.custom_jvp
        def reduce(block: jax.Array, local: jax.Array) -> jax.Array:
            del block  # read by the derivative alone
            return collective(local)

        @reduce.defjvp
        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            block, change = primals[0], tangents[0]
            out = reduce(*primals)
            is_tied = block == lax.expand_dims(out, dims)
            tied = lax.stop_gradient(is_tied.astype(block.dtype))
            total, count = (
                lax.psum(jnp.sum(x, dims, dtype=_summed_in(x.dtype)), names)
                for x in (change * tied, tied)
            )
            return out, (total / count).astype(block.dtype)

        return reduce(self.block, local)


def _summed_in(dtype: Any) -> Any:
    """The dtype to sum terms over devices in: no narrow one, which not all can."""
    return jnp.float32 if dtype.itemsize < 4 else dtype


def extreme_of(
    node: Node, step: Apply, operands: Sequence[jax.Array], axes: Axes
) -> Extreme | None:
    """What `node` leaves to be reduced over devices, if it is a reduction to a maximum
    or minimum of values that have derivatives."""
    if node.eqn.primitive.name not in ("reduce_max", "reduce_min"):
        return None
    (sharding,), (block,) = step.result_shardings, operands
    over = [a for a, state in enumerate(sharding) if isinstance(state, Unreduced)]
    names = tuple(name for axis in over for name in axes.bound(axis))
    if not names or not jnp.issubdtype(block.dtype, jnp.floating):
        return None
    return Extreme(block, tuple(node.eqn.params["axes"]), names, len(over))
