"""Runs pointwise operations block by block, what lives on the host with them.

In: a `BlockLoop` of the plan, and the arrays that it reads. Out: those that it makes,
written block by block over those that they replace.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
from jax import lax

from shardfn._core import compat
from shardfn._core.memories import HOST, is_on_host, space_of
from shardfn._core.plan import BlockLoop, Ref, Transfer
from shardfn._core.sharding import Axes
from shardfn.storage._padding import zero_padding

Arrays = Mapping[Ref, jax.Array]


def transfer(step: Transfer, x: jax.Array, axes: Axes) -> jax.Array:
    """A copy in the other memory. What the host stores has zeros in its padding."""
    if step.memory == HOST:
        x = zero_padding(x, step.shape, step.sharding, axes)
    return jax.device_put(x, space_of(step.memory))


def run_blocks(
    loop: BlockLoop,
    given: Arrays,
    empty: Callable[[Ref], jax.Array],
    run: Callable[[Arrays], Arrays],
) -> Sequence[jax.Array]:
    """Runs a block loop.

    Args:
      loop: what it runs.
      given: the versions that it reads.
      empty: makes an array to write to, for a version that replaces no other.
      run: one iteration: from blocks of what is sliced and the rest whole to blocks of
        what is made.

    Returns:
      The versions that it makes.
    """
    places = [
        _strong(empty(made) if old is None else given[old])
        for made, old in zip(loop.made, loop.into, strict=True)
    ]
    at = {old: k for k, old in enumerate(loop.into) if old is not None}
    whole = {ref: x for ref, x in given.items() if ref not in at}

    def block(x: jax.Array, i: jax.Array) -> jax.Array:
        rows = x.shape[loop.dim] // loop.blocks
        return lax.dynamic_slice_in_dim(x, i * rows, rows, loop.dim)

    def body(i: jax.Array, places: list[jax.Array]) -> list[jax.Array]:
        now = {**whole, **{ref: places[k] for ref, k in at.items()}}
        cut = {ref: block(now[ref], i) for ref in loop.sliced}
        made = run({**now, **cut})
        return [
            lax.dynamic_update_slice_in_dim(
                place, _strong(made[ref]), i * made[ref].shape[loop.dim], loop.dim
            )
            for place, ref in zip(places, loop.made, strict=True)
        ]

    return lax.fori_loop(0, loop.blocks, body, places)


def _strong(x: jax.Array) -> jax.Array:
    """`x` without a weak type, as a loop carries it; nothing may touch it on the
    host."""
    return x if is_on_host(x) else compat.with_weak_type(x, False)
