"""Pads sums to the tiles of TPUs.

In: a plan. Out: the plan, in which sums are larger, by whole tiles. What a device keeps
of a reduce-scatter fills tiles, unless it is less than one: libtpu makes larger parts
itself, and sends rows on to the devices that they belong to. And rows are longer in
loops: over a slice of v5ps that is four long in each direction libtpu reduce-scatters
rows in pieces, on cores that nothing else waits for. Where the tiles of a row have a
large prime factor, such as the 43 x 2 of 11008 columns, it has no pieces for that, and
all-reduces the value on the core that multiplies: twice the bytes, with nothing beside
them. A few more tiles cost less.
"""

import math
from dataclasses import replace

from shardfn._core import compat
from shardfn._core.limits import CHAINED_BYTES
from shardfn._core.moves import ReduceScatter
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Axes, Split, along, local_shape
from shardfn._core.tile_limits import (
    PIECES_DEVICES,
    PIECES_MOST,
    PIECES_PADDING,
    TILED_BYTES,
    TPU_TILE,
)
from shardfn._schedule.balanced_loops import scattered_sums
from shardfn._schedule.bodies import inside, rewritten, with_nodes


def pad_sums(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Makes parts of sums fill tiles, and rows of sums that a loop stacks longer where
    that lets them be scattered.

    Args:
      program: the program.
      body: its plan.
      axes: the mesh axes.

    Returns:
      The plan; the same where the compiler reduce-scatters any rows.
    """
    if axes.sums_in_pieces:
        body = _in_pieces(program, body, axes)
    if not compat.scatters_tiles(axes.platform):
        return body
    return _in_tiles(program, body, axes)


def _in_tiles(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    body = inside(program, body, lambda p, b: _in_tiles(p, b, axes))
    steps = (_filled(s, axes) if isinstance(s, Reshard) else s for s in body.steps)
    return replace(body, steps=tuple(steps))


def _filled(step: Reshard, axes: Axes) -> Reshard:
    """A sum of which each device keeps whole tiles."""
    has_rows = _row(step, axes) is not None
    goal = step.path[-1][step.moves[0].axis] if has_rows else None
    size = math.prod(step.shape) * step.itemsize
    if not isinstance(goal, Split) or step.padded is not None:
        return step
    if not CHAINED_BYTES <= size <= TILED_BYTES:
        return step
    dim = goal.dim
    if dim < len(step.shape) - 2:  # no dimension of a tile
        return step
    devices = along(step.path[-1], step.moves[0].axis, axes)
    tile = TPU_TILE[0]
    rows, rest = divmod(step.shape[dim], devices)
    filled = -(-rows // tile) * tile
    if filled == rows or rest or rows < tile:  # fewer are laid out otherwise
        return step
    shape = (*step.shape[:dim], filled * devices, *step.shape[dim + 1 :])
    text = (
        f"each device sums {filled} rows for the {rows} that it keeps, in tiles of "
        f"{tile} (limits.TPU_TILE), as of a sum of at most {TILED_BYTES >> 20} MiB "
        "(limits.TILED_BYTES)"
    )
    notes = noted(step, Note("pad_sums", text))
    return replace(step, shape=shape, padded=dim, notes=notes)


def _in_pieces(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    body = inside(program, body, lambda p, b: _in_pieces(p, b, axes))

    def with_padded(node: Node, loop: Apply) -> Apply:
        sums = scattered_sums(node, loop)
        if not sums:
            return loop
        (inner,) = loop.bodies
        inner = rewritten(inner, sums.keys(), lambda step: _padded(step, axes))
        return replace(loop, bodies=(inner,))

    return with_nodes(program, body, with_padded)


def _padded(step: Reshard, axes: Axes) -> Reshard:
    """A sum, with rows that can be cut into pieces."""
    dim = _row(step, axes)
    if dim is None:
        return step
    devices = along(step.path[-1], step.moves[0].axis, axes)
    size = math.prod(step.shape) * step.itemsize
    if devices < PIECES_DEVICES or size < CHAINED_BYTES:
        return step
    tile = TPU_TILE[-1]
    least = -(-step.shape[dim] // tile)
    most = least + int(PIECES_PADDING * least)
    fitting = (n for n in range(least, most + 1) if fits_pieces(n, devices))
    tiles = next(fitting, least)
    if tiles == least:
        return step
    shape = (*step.shape[:dim], tiles * tile, *step.shape[dim + 1 :])
    text = (
        f"is padded from {step.shape[dim]} to {shape[dim]} along dimension {dim} "
        f"(limits.PIECES_PADDING: {PIECES_PADDING} at most): over {devices} TPUs "
        f"(limits.PIECES_DEVICES: {PIECES_DEVICES} or more) rows of {least} tiles, "
        f"with the prime factor {_largest_prime(least)}, cannot be summed in pieces "
        f"(limits.PIECES_MOST: {PIECES_MOST})"
    )
    notes = noted(step, Note("pad_sums", text))
    return replace(step, shape=shape, padded=dim, notes=notes)


def fits_pieces(tiles: int, devices: int) -> bool:
    """Whether rows of so many tiles are reduce-scattered over so many devices."""
    return devices * _largest_prime(tiles) <= PIECES_MOST


def _row(step: Reshard, axes: Axes) -> int | None:
    """The last dimension that the one reduce-scatter of a sum does not split, if no
    device splits it; what is scattered flattened has no rows."""
    if step.together is not None or step.auto:
        return None
    if len(step.moves) != 1 or type(step.moves[0]) is not ReduceScatter:
        return None
    goal, whole = step.moves[0].goal, local_shape(step.shape, step.path[0], axes)
    assert isinstance(goal, Split)
    rows = [d for d in range(len(step.shape)) if d != goal.dim]
    if goal.dim < 0 or not rows or whole != step.shape:
        return None
    return rows[-1]


def _largest_prime(n: int) -> int:
    """The largest prime factor of a number; 1 of 1."""
    largest, factor = 1, 2
    while factor * factor <= n:
        if n % factor:
            factor += 1
        else:
            n, largest = n // factor, factor
    return max(n, largest)
