"""Quantizes moves: eight bits an element on the wire, in blocks that have a scale each.

In: moves of a plan and what is asked of their leaves. Out: moves that say over which
mesh axes they are quantized, into which blocks; sums that every device gets whole are
then made in parts that are gathered.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from shardfn._core.control import Control
from shardfn._core.errors import ShardingError, called, listed
from shardfn._core.limits import QUANTIZED_ELEMENTS
from shardfn._core.moves import AllGather, AllReduce, ReduceScatter, moves_of
from shardfn._core.option_values import WireDtype
from shardfn._core.phases import UPDATE
from shardfn._core.plan import BodyPlan, Ref, Reshard
from shardfn._core.program import Names, Program
from shardfn._core.quantized import Quantized, find_blocks, is_quantized
from shardfn._core.quantized_leaf import dequantize_p, written_as
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    axes_of,
    is_flat,
    local_shape,
    on_axis,
    stored_shape,
)
from shardfn._schedule.bodies import inside
from shardfn._schedule.wire_dtypes import is_floating, sums_gradient

GATHER, REDUCE = "gather_dtype", "reduce_dtype"

SMALL = (
    f"exact: fewer than {QUANTIZED_ELEMENTS} elements (limits.QUANTIZED_ELEMENTS), and "
    "{option} does not name this leaf"
)
UNDIVIDED = (
    "exact: {option} asks for blocks of {block}, and no dimension of a shard can be "
    "cut into equal blocks of that or down to half of it (limits.BLOCK_PART)"
)
FLATTENED = (
    "exact: {option} quantizes along a dimension, and shards are cut out of the "
    "flattened value, as the devices divide none"
)
AS_STORED = "moves in the eight bits that its leaf is stored in"
WRITTEN = "quantized over {axis} to {dtype}, {block} along dimension {dim} to a scale"


def quantize(
    program: Program, body: BodyPlan, control: Control, axes: Axes
) -> BodyPlan:
    """Quantizes moves of a plan, and of the plans in it.

    Args:
      program: the program.
      body: its plan, its moves in the dtypes that they are rounded from.
      control: the dtypes and blocks asked for.
      axes: the mesh axes.

    Returns:
      The plan.
    """
    body = inside(program, body, lambda p, b: quantize(p, b, control, axes))
    read = {
        Ref(node.outputs[0]): written_as(node.eqn)
        for node in program.nodes
        if node.kind == "op" and node.eqn.primitive is dequantize_p
    }
    steps = []
    for step in body.steps:
        if isinstance(step, Reshard) and (how := read.get(step.source)):
            step = _as_stored(step, how, axes)
        elif isinstance(step, Reshard):
            step = _chosen(program, step, control, axes)
        steps.append(step)
    return replace(body, steps=tuple(steps))


def _as_stored(step: Reshard, how: Quantized, axes: Axes) -> Reshard:
    """A gather of a leaf that is stored quantized, in the bytes that it is stored in,
    where devices hold whole blocks of it."""
    start, shape = step.path[0], step.part_shape
    if is_flat(start) or stored_shape(shape, start, axes)[how.dim] != shape[how.dim]:
        return step
    divides = local_shape(shape, start, axes)[how.dim] % how.block == 0
    if not divides or not all(isinstance(m, AllGather) for m in moves_of(step.path)):
        return step
    gathered = {move.axis for move in moves_of(step.path)}
    written = tuple(how if a in gathered else None for a in range(len(axes.names)))
    return replace(_noted(step, AS_STORED), written=written)


def _chosen(program: Program, step: Reshard, control: Control, axes: Axes) -> Reshard:
    asked = control.of(*program.leaf(step.source.value))
    if step.gathers_state and step.phase != UPDATE:
        return _quantized(program, step, control, axes, GATHER, asked.gather_dtype)
    if sums_gradient(program, step):
        return _quantized(program, step, control, axes, REDUCE, asked.reduce_dtype)
    return step


def _quantized(
    program: Program,
    step: Reshard,
    control: Control,
    axes: Axes,
    option: str,
    wire: WireDtype,
) -> Reshard:
    """The move with the moves quantized that `option` asks for."""
    leaf = program.leaf(step.source.value)
    asked = control.of(*leaf)
    dtypes = by_axis(wire, axes)
    if not any(dtypes) or not is_floating(step.dtype) or step.itemsize == 1:
        return step
    is_small = math.prod(step.shape) < QUANTIZED_ELEMENTS
    if is_small and not control.is_named(option, leaf):
        return _noted(step, SMALL.format(option=option))
    if option == REDUCE:
        step = _scattered(step, dtypes, axes, asked.quantize_block)
    written: list[Quantized | None] = [None] * len(dtypes)
    for move in moves_of(step.path):
        dtype = dtypes[move.axis]
        if dtype is None or not isinstance(move, (AllGather, ReduceScatter)):
            continue
        smallest = step.path[0] if option == GATHER else _split_end(step, move.axis)
        found = find_blocks(step.part_shape, smallest, axes, asked.quantize_block)
        if found is None and control.is_named(option, leaf):
            raise _cannot(option, leaf, step, smallest, asked.quantize_block)
        if found is None:
            text = FLATTENED if is_flat(smallest) else UNDIVIDED
            text = text.format(option=option, block=asked.quantize_block)
            return _noted(step, text)
        dim, block = found
        rounding = "nearest" if option == GATHER else asked.reduce_rounding
        written[move.axis] = Quantized(dtype, block, dim, rounding)
        axis = axes.names[move.axis]
        text = WRITTEN.format(axis=axis, dtype=dtype, block=block, dim=dim)
        step = _noted(step, f"{text}: {option} asks for it")
    return replace(step, written=tuple(written)) if any(written) else step


def _cannot(
    option: str, leaf: Names, step: Reshard, smallest: Sharding, block: int
) -> ShardingError:
    """What a leaf is refused with that a user named, and why."""
    if is_flat(smallest):
        return ShardingError(
            f"{option} names {listed(leaf)}, which cannot be quantized: blocks lie "
            "along a dimension, and shards of it are cut out of the flattened value.\n"
            f"{called()}What moves has the shape {step.shape}. The devices divide no "
            "dimension of that: do not name it."
        )
    return ShardingError(
        f"{option} names {listed(leaf)}, which cannot be quantized: no dimension of a "
        f"shard can be cut into equal blocks of {block}, or down to half of it.\n"
        f"{called()}What moves has the shape {step.shape}. Pass a quantize_block that "
        "divides a dimension of a shard of it, or do not name it."
    )


def by_axis(asked: WireDtype, axes: Axes) -> list[str | None]:
    """What moves over each mesh axis are quantized to."""
    if isinstance(asked, tuple):
        return [dict(asked).get(name) for name in axes.names]
    return [asked if is_quantized(asked) else None] * len(axes.names)


def _scattered(
    step: Reshard, dtypes: Sequence[str | None], axes: Axes, most: int
) -> Reshard:
    """The move with sums that every device gets whole made in parts, and then gathered,
    over axes where terms are quantized."""
    path = [step.path[0]]
    for move in moves_of(step.path):
        if isinstance(move, AllReduce) and dtypes[move.axis]:
            part = _part(step, move, axes, most)
            path += [part] if part else []
        path.append(move.after)
    return replace(step, path=tuple(path))


def _part(step: Reshard, move: AllReduce, axes: Axes, most: int) -> Sharding | None:
    """Equal parts of a sum in which blocks lie, split on a dimension that is whole if
    there is one."""
    after, count = move.after, axes.sizes[move.axis]
    local = local_shape(step.part_shape, after, axes)
    dims = sorted(range(len(local)), key=lambda d: (bool(axes_of(after, d)), d))
    for dim in dims:
        part = on_axis(after, move.axis, Split(dim))
        divides = not is_flat(after) and local[dim] and local[dim] % count == 0
        if divides and find_blocks(step.part_shape, part, axes, most):
            return part
    return None


def _split_end(step: Reshard, axis: int) -> Sharding:
    """The sharding of a path in which `axis` first splits the value."""
    return next(s for s in step.path if isinstance(s[axis], Split))


def _noted(step: Reshard, text: str) -> Reshard:
    return replace(step, notes=noted(step, Note("quantize_moves", text)))
