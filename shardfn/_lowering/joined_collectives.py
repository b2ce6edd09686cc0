"""How moves of several values are done as one collective, inside `shard_map`.

In: local blocks, the global shapes of their values and their moves, all of a kind. Out:
the local blocks after them, with the elements that each move by itself would make.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    Move,
    ReduceScatter,
)
from shardfn._core.sharding import Axes, local_shape, viewed
from shardfn._lowering.collectives import run_move
from shardfn._lowering.move_lowerings import (
    JOINED,
    Block,
    cut_to,
    dim_of,
    end_to_end,
    in_one_row,
    joined,
    names_of,
    parted,
    to_exchange,
    to_scatter,
    varying,
)


def run_together(
    blocks: Sequence[jax.Array],
    shapes: Sequence[Sequence[int]],
    moves: Sequence[Move],
    axes: Axes,
) -> list[jax.Array]:
    """Moves of the same kind, as one collective if they use the wire; or one move.

    Args:
      blocks: local blocks, of one dtype.
      shapes: global shapes of their values.
      moves: of each.
      axes: the mesh axes.

    Returns:
      The blocks moved, their elements as `run_move` makes them.
    """
    if len(moves) == 1 or not moves[0].joins:
        each = zip(blocks, shapes, moves, strict=True)
        return [run_move(*b, axes) for b in each]
    dtype = blocks[0].dtype
    sent = compat.sent_as(dtype)
    if sent != dtype:
        blocks = [x.astype(sent) for x in blocks]
    each = zip(blocks, shapes, moves, strict=True)
    made = JOINED[type(moves[0])]([Block(*b) for b in each], axes)
    return made if sent == dtype else [x.astype(dtype) for x in made]


@joined(AllGather)
def _gather_together(blocks: Sequence[Block], axes: Axes) -> list[jax.Array]:
    first = blocks[0].move
    name, n = names_of(first, axes), first.devices(blocks[0].shape, axes)
    flat = varying(in_one_row([b.x for b in blocks]), *name)
    parts = lax.all_gather(flat, name, axis=0, tiled=True, to="invarying")
    whole = []
    for part, b in zip(parted(parts, [b.x.size for b in blocks]), blocks, strict=True):
        full = local_shape(b.shape, b.move.after, axes)
        view, along = viewed(full, b.move.state.dim)
        part = jnp.moveaxis(part.reshape(n, *b.x.shape), 0, along)
        size = n * b.x.shape[along]
        part = part.reshape(*b.x.shape[:along], size, *b.x.shape[along + 1 :])
        whole.append(cut_to(part, along, view[along]).reshape(full))
    return whole


@joined(AllReduce)
def _reduce_together(blocks: Sequence[Block], axes: Axes) -> list[jax.Array]:
    name = names_of(blocks[0].move, axes)
    sums = lax.psum(varying(in_one_row([b.x for b in blocks]), *name), name)
    parts = parted(sums, [b.x.size for b in blocks])
    return [part.reshape(b.x.shape) for part, b in zip(parts, blocks, strict=True)]


@joined(ReduceScatter)
def _scatter_together(blocks: Sequence[Block], axes: Axes) -> list[jax.Array]:
    first = blocks[0].move
    name, n = names_of(first, axes), first.devices(blocks[0].shape, axes)
    whole = [to_scatter(b.x, b.shape, b.move, axes) for b in blocks]
    terms, made = _in_parts(whole, n)
    sums = lax.psum_scatter(
        varying(terms, *name), name, scatter_dimension=0, tiled=True
    )
    parts = parted(sums, list(map(math.prod, made)))
    return [part.reshape(shape) for part, shape in zip(parts, made, strict=True)]


@joined(AllToAll)
def _exchange_together(blocks: Sequence[Block], axes: Axes) -> list[jax.Array]:
    first = blocks[0].move
    name, n = names_of(first, axes), first.devices(blocks[0].shape, axes)
    padded = [to_exchange(b.x, b.shape, b.move, axes) for b in blocks]
    terms, sent = _in_parts(padded, n)
    came = lax.all_to_all(varying(terms, *name), name, 0, 0, tiled=True)
    made = []
    parts = parted(came, list(map(math.prod, sent)))
    for part, shape, b in zip(parts, sent, blocks, strict=True):
        dim = dim_of(b.move.state)
        x = jnp.moveaxis(part.reshape(n, *shape), 0, dim)
        x = x.reshape(*shape[:dim], n * shape[dim], *shape[dim + 1 :])
        made.append(cut_to(x, dim, local_shape(b.shape, b.move.after, axes)[dim]))
    return made


def _in_parts(
    blocks: Sequence[tuple[jax.Array, int]], n: int
) -> tuple[jax.Array, list[tuple[int, ...]]]:
    """Blocks whose dimensions are cut into `n` parts each: a row of all first parts,
    one of all second ones and so on, and the shape of a part of each block."""
    rows, shapes = [], []
    for x, dim in blocks:
        local = x.shape[dim] // n
        x = x.reshape(*x.shape[:dim], n, local, *x.shape[dim + 1 :])
        parts = jnp.moveaxis(x, dim, 0)
        rows.append(parts.reshape(n, -1))
        shapes.append(parts.shape[1:])
    return end_to_end(rows), shapes
