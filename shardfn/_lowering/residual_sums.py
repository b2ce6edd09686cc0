"""How a quantized sum leaves its residual, inside `shard_map`.

In: a device's term, and a move that exchanges quantized terms first. Out: what the move
makes, and what quantizing took: from the term, and from the device's part of the sum
where that is gathered quantized, too. All residuals together are what the sum lacks.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.automatic_axes import auto_names, auto_spec
from shardfn._core.line_names import line_name
from shardfn._core.moves import ExchangeTerms
from shardfn._core.plan import Place, Reshard
from shardfn._core.quantize import quantize
from shardfn._core.sharding import Axes
from shardfn._lowering.bits import Bits
from shardfn._lowering.move_lowerings import names_of
from shardfn._lowering.quantized_sums import exchange_leaving, of_parts
from shardfn._lowering.reshards import follow_moves


def move_leaving(
    step: Reshard, rows: int, x: jax.Array, place: Place, axes: Axes
) -> list[jax.Array]:
    """Follows the moves of a sum.

    Args:
      step: the move.
      rows: how many rows the residual has; the first of a device takes it all.
      x: the device's term.
      place: where the plan stands in the plan that it is part of.
      axes: the mesh axes.

    Returns:
      What the move makes, and the device's rows of the residual.
    """
    first, *behind = step.moves
    assert isinstance(first, ExchangeTerms)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope(line_name(place, step.result, 0)):
            y, left = exchange_leaving(x, step.part_shape, first, axes)
        if behind:
            if how := behind[0].packed_as:
                bits = Bits(*quantize(y, how), how, y.dtype)
                own = lax.axis_index(names_of(first, axes))
                left, y = left.at[own].add(y - bits.read()), bits
            every = range(1, len(step.moves))
            ((y,),) = follow_moves([step], [y], every, place, axes)
        return y, of_parts(left, step.part_shape, first, axes)

    if step.auto:
        spec, names = auto_spec(step.auto), auto_names(step.auto)
        both = (spec, spec)
        run = jax.shard_map(run, in_specs=spec, out_specs=both, axis_names=names)
    y, left = run(x)
    others = rows // axes.sizes[first.axis] - 1
    low_high = [(0, others, 0), *[(0, 0, 0)] * left.ndim]
    return [y, lax.pad(left[None], jnp.zeros((), left.dtype), low_high)]
