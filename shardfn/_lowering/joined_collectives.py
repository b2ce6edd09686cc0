"""How moves of several values are done as one collective, inside `shard_map`.

In: local blocks, the global shapes of their values and their moves, all of a kind. Out:
the local blocks after them, with the elements that each move by itself would make.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.moves import (
    AllGather,
    AllReduce,
    Move,
    ReduceScatter,
    move_of,
)
from shardfn._core.sharding import (
    Axes,
    Sharding,
    local_shape,
    viewed,
)
from shardfn._lowering.collectives import (
    LOWERINGS,
    cut_to,
    dim_of,
    names_of,
    to_scatter,
    varying,
)

Joined = Callable[[Sequence["Block"], Axes], list[jax.Array]]
"""Moves several blocks by one collective."""


JOINED: dict[type[Move], Joined] = {}


@dataclass(frozen=True, slots=True)
class Block:
    """A local block, the global shape of its value, and its move."""

    x: jax.Array
    shape: Sequence[int]
    move: Any


def joined(kind: type[Move]) -> Callable[[Joined], Joined]:
    """Registers how several moves of a kind are done by one collective."""

    def register(run: Joined) -> Joined:
        JOINED[kind] = run
        return run

    return register


def run_together(
    blocks: Sequence[jax.Array],
    shapes: Sequence[Sequence[int]],
    ends: Sequence[Sequence[Sharding]],
    axes: Axes,
) -> list[jax.Array]:
    """Moves of the same kind, as one collective if they use the wire.

    Args:
      blocks: local blocks, of one dtype.
      shapes: global shapes of their values.
      ends: the shardings before and after, of each.
      axes: the mesh axes.

    Returns:
      The blocks moved, their elements as `run_move` makes them.
    """
    each = [
        Block(x, shape, move_of(*end))
        for x, shape, end in zip(blocks, shapes, ends, strict=True)
    ]
    kind = type(each[0].move)
    if kind.joins:
        return JOINED[kind](each, axes)
    return [LOWERINGS[kind](b.x, b.shape, b.move, axes) for b in each]


@joined(AllGather)
def _gather_together(blocks: Sequence[Block], axes: Axes) -> list[jax.Array]:
    first = blocks[0].move
    name, n = names_of(first, axes), first.devices(blocks[0].shape, axes)
    flat = varying(_in_one_row([b.x for b in blocks]), *name)
    parts = lax.all_gather(flat, name, axis=0, tiled=True, to="invarying")
    whole = []
    for part, b in zip(_parted(parts, [b.x.size for b in blocks]), blocks, strict=True):
        full = local_shape(b.shape, b.move.after, axes)
        view, along = viewed(full, dim_of(b.move.state))
        part = jnp.moveaxis(part.reshape(n, *b.x.shape), 0, along)
        size = n * b.x.shape[along]
        part = part.reshape(*b.x.shape[:along], size, *b.x.shape[along + 1 :])
        whole.append(cut_to(part, along, view[along]).reshape(full))
    return whole


@joined(AllReduce)
def _reduce_together(blocks: Sequence[Block], axes: Axes) -> list[jax.Array]:
    name = names_of(blocks[0].move, axes)
    sums = lax.psum(varying(_in_one_row([b.x for b in blocks]), *name), name)
    parts = _parted(sums, [b.x.size for b in blocks])
    return [part.reshape(b.x.shape) for part, b in zip(parts, blocks, strict=True)]


@joined(ReduceScatter)
def _scatter_together(blocks: Sequence[Block], axes: Axes) -> list[jax.Array]:
    first = blocks[0].move
    name, n = names_of(first, axes), first.devices(blocks[0].shape, axes)
    rows, made = [], []
    for b in blocks:
        x, dim = to_scatter(b.x, b.shape, b.move, axes)
        local = x.shape[dim] // n
        x = x.reshape(*x.shape[:dim], n, local, *x.shape[dim + 1 :])
        rows.append(jnp.moveaxis(x, dim, 0).reshape(n, -1))
        made.append((*x.shape[:dim], *x.shape[dim + 1 :]))
    terms = varying(_joined(rows), *name)
    sums = lax.psum_scatter(terms, name, scatter_dimension=0, tiled=True)
    parts = _parted(sums, [row.shape[1] for row in rows])
    return [part.reshape(shape) for part, shape in zip(parts, made, strict=True)]


def _in_one_row(blocks: Sequence[jax.Array]) -> jax.Array:
    return _joined([x.reshape(1, -1) for x in blocks])


def _joined(rows: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(compat.varying_alike(rows), axis=1)


def _parted(joined: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    ends = list(itertools.accumulate(sizes))
    return [
        lax.slice_in_dim(joined, end - size, end, axis=1)
        for size, end in zip(sizes, ends, strict=True)
    ]
