"""How quantized terms are summed: no collective can, so the devices exchange them.

In: a device's terms of a value, and a move to parts of their sum. Out: its part, summed
in float32 from terms that were rounded once each, and what rounding took if asked.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.moves import ExchangeTerms
from shardfn._core.quantize import pack, unpack
from shardfn._core.quantized import Quantized
from shardfn._core.sharding import Axes, along, local_shape, on_axis, viewed
from shardfn._lowering.move_lowerings import (
    Block,
    cut_to,
    dim_of,
    end_to_end,
    joined,
    lowering,
    names_of,
    parted,
    to_scatter,
    varying,
)


@lowering(ExchangeTerms)
def _exchange_terms(
    x: jax.Array, shape: Sequence[int], move: ExchangeTerms, axes: Axes
) -> jax.Array:
    """Sends each device the terms of its part, and sums what comes."""
    terms = _packed(x, shape, move, axes)
    terms = lax.all_to_all(terms, names_of(move, axes), 0, 0, tiled=True)
    return _sum(terms, move, x.dtype)


@joined(ExchangeTerms)
def _exchange_together(blocks: Sequence[Block], axes: Axes) -> list[jax.Array]:
    first = blocks[0].move
    name, n = names_of(first, axes), first.devices(blocks[0].shape, axes)
    each = [_packed(b.x, b.shape, b.move, axes) for b in blocks]
    rows = [terms.reshape(n, -1) for terms in each]
    sent = lax.all_to_all(end_to_end(rows), name, 0, 0, tiled=True)
    parts = parted(sent, [row.shape[1] for row in rows])
    return [
        _sum(part.reshape(terms.shape), b.move, b.x.dtype)
        for part, terms, b in zip(parts, each, blocks, strict=True)
    ]


def exchange_leaving(
    x: jax.Array, shape: Sequence[int], move: ExchangeTerms, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """The same, and what rounding took from the parts: `[devices, *part]`."""
    terms = _parts(x, shape, move, axes)
    sent = _written(terms, move, axes)
    left = terms - unpack(sent, _of_terms(move), terms.dtype)
    came = lax.all_to_all(sent, names_of(move, axes), 0, 0, tiled=True)
    return _sum(came, move, x.dtype), left


def of_parts(
    parts: jax.Array, shape: Sequence[int], move: ExchangeTerms, axes: Axes
) -> jax.Array:
    """The local block that was cut into these parts."""
    full = local_shape(shape, on_axis(move.before, move.axis, None), axes)
    view, dim = viewed(full, dim_of(move.goal))
    x = jnp.moveaxis(parts, 0, dim)
    x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
    return cut_to(x, dim, view[dim]).reshape(full)


def _packed(
    x: jax.Array, shape: Sequence[int], move: ExchangeTerms, axes: Axes
) -> jax.Array:
    """A device's terms of the parts of all devices, in bytes."""
    return _written(_parts(x, shape, move, axes), move, axes)


def _parts(
    x: jax.Array, shape: Sequence[int], move: ExchangeTerms, axes: Axes
) -> jax.Array:
    """A device's terms of the parts of all devices: `[devices, *part]`."""
    name, count = names_of(move, axes), along(move.after, move.axis, axes)
    x, dim = to_scatter(varying(x, *name), shape, move, axes)
    parts = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def _written(parts: jax.Array, move: ExchangeTerms, axes: Axes) -> jax.Array:
    """Such terms in bytes."""
    return pack(parts, _of_terms(move), lax.axis_index(names_of(move, axes)))


def _sum(terms: jax.Array, move: ExchangeTerms, dtype: Any) -> jax.Array:
    """The sum of such terms, in `dtype`."""
    read = unpack(terms, _of_terms(move), jnp.dtype(jnp.float32))
    return read.sum(axis=0).astype(dtype)


def _of_terms(move: ExchangeTerms) -> Quantized:
    """How a value is quantized that has the terms' dimension in front."""
    assert move.quantized is not None
    return replace(move.quantized, dim=move.quantized.dim + 1)
