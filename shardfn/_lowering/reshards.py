"""Follows the moves of a plan on one device's blocks, inside `shard_map`.

In: one planned move, or several that are one collective, and local blocks. Out: the
local blocks in the sharding that the moves end in.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.automatic_axes import auto_names, auto_spec
from shardfn._core.barrier import barrier
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.line_names import line_name
from shardfn._core.moves import Slice
from shardfn._core.plan import Apply, BodyPlan, Place, Reshard
from shardfn._core.quantize import as_bytes, dequantize, of_bytes, quantize
from shardfn._core.quantized import SCALE_BYTES, Quantized
from shardfn._core.sharding import Axes, Sharding, Split, along, local_shape
from shardfn._lowering.bits import Bits
from shardfn._lowering.joined_collectives import run_together
from shardfn._lowering.move_lowerings import cut_to, pad_parts


def reads_of(step: Reshard, plan: BodyPlan, axes: Axes) -> int:
    """How often what a move makes is to be read out of its bytes: once for each operand
    that it is where compilers read inside of matmuls, or else once."""
    if not any(step.written) or not axes.reads_apart or step.in_bits:
        return 1
    steps = (s for s in plan.run[0] if isinstance(s, Apply))
    return max(1, sum(s.operands.count(step.result) for s in steps))


Run = Callable[..., list[Any]]
"""From blocks to what moves make of them."""


def move_along(
    step: Reshard,
    start: int,
    end: int,
    x: jax.Array,
    place: Place,
    axes: Axes,
    picked: bool = False,
    copies: int = 1,
) -> list[Any]:
    """`x` after the moves `start` to `end` of a path, made in the dtype that the step
    names.

    Where automatic axes split the value, one part moves: XLA would gather the parts in
    front of a collective, so those axes are manual here too. Of a sum that is `picked`,
    each element lies on one device, the others having zeros. Of a quantized value there
    are `copies`, alike, for uses that are each to read it from the bytes; what stays
    quantized is one.
    """
    if step.padded is not None:
        dim = step.padded
        axis = step.moves[0].axis
        goal = step.path[end][axis]
        is_split = isinstance(goal, Split) and goal.dim == dim
        count = along(step.path[end], axis, axes) if is_split else 1
        rows = pad_parts(x, dim, count, step.shape[dim])
        inner = replace(step, padded=None)
        made = move_along(inner, start, end, rows, place, axes, picked, copies)
        return [cut_to(y, dim, x.shape[dim] // count) for y in made]
    moves = step.moves[start:end]
    copies = copies if moves and moves[-1].packed_as else 1

    def followed(step: Reshard, copies: int = copies) -> Run:
        return lambda x: follow_moves(
            [step], [x], range(start, end), place, axes, copies
        )[0]

    def exact(x: jax.Array) -> list[jax.Array]:
        return followed(_exact(step), 1)(x) * copies

    as_planned = run = followed(step)
    moved = _on_wire(step, x)
    if isinstance(x, Bits):
        return as_planned(x)
    if any(move.quantized for move in moves):
        run = _with_derivative(run, _refused if step.in_bits else exact)
    elif picked and jnp.issubdtype(moved.dtype, jnp.floating):
        pairs = _in_pairs(step, step.path[start : end + 1], moved.dtype, axes)
        bits = _as_bits(as_planned) if pairs is None else _as_pairs(followed(pairs))
        run = _with_derivative(bits, as_planned)
    if step.auto:
        spec, names = auto_spec(step.auto), auto_names(step.auto)
        run = jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names=names)
    return [_off_wire(y, x) for y in run(moved)]


def _as_bits(run: Run) -> Run:
    """`run` on the bits of floats: a sum with zeros would make -0.0 to 0.0."""

    def moved(x: jax.Array) -> list[jax.Array]:
        bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return [lax.bitcast_convert_type(y, x.dtype) for y in run(bits)]

    return moved


def _in_pairs(
    step: Reshard, path: Sequence[Sharding], dtype: jnp.dtype, axes: Axes
) -> Reshard | None:
    """The move with pairs of elements in place of each; None if they are not of 16 bits
    or if a device has half a pair."""
    shape = step.shape
    if dtype.itemsize != 2 or not shape or shape[-1] % 2 or step.auto:
        return None
    half = (*shape[:-1], shape[-1] // 2)
    for sharding in path:
        *others, last = local_shape(half, sharding, axes)
        if local_shape(shape, sharding, axes) != (*others, 2 * last):
            return None
    return replace(step, shape=half)


def _as_pairs(run: Run) -> Run:
    """`run` on the bits of pairs of 16: NCCL sums no integers of 16 bits, which
    compilers then make 32 bits each."""

    def moved(x: jax.Array) -> list[jax.Array]:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        made = run(lax.bitcast_convert_type(pairs, jnp.uint32))
        parts = [lax.bitcast_convert_type(y, x.dtype) for y in made]
        return [y.reshape(*y.shape[:-2], 2 * y.shape[-2]) for y in parts]

    return moved


def _with_derivative(run: Run, linear: Run) -> Run:
    """`run`, whose derivative is `linear`."""
    moved = jax.custom_jvp(run)

    @moved.defjvp
    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return moved(*primals), linear(*tangents)

    return moved


def move_together(
    steps: Sequence[Reshard], blocks: Sequence[jax.Array], place: Place, axes: Axes
) -> list[jax.Array]:
    """Blocks after moves that are one collective."""
    every = range(len(steps[0].path) - 1)

    def following(steps: Sequence[Reshard]) -> Run:
        return lambda *blocks: [
            x for (x,) in follow_moves(steps, blocks, every, place, axes)
        ]

    run = following(steps)
    if any(move.quantized for step in steps for move in step.moves):
        stays = any(step.in_bits for step in steps)
        exact = following([_exact(step) for step in steps])
        run = _with_derivative(run, _refused if stays else exact)
    moved = run(*(_on_wire(step, x) for step, x in zip(steps, blocks, strict=True)))
    return [_off_wire(y, x) for y, x in zip(moved, blocks, strict=True)]


def follow_moves(
    steps: Sequence[Reshard],
    blocks: Sequence[Any],
    indices: Iterable[int],
    place: Place,
    axes: Axes,
    copies: int = 1,
) -> list[list[Any]]:
    """Blocks after some moves of paths alike, each of them one collective.

    What is quantized is written in front of the first move that takes it so, and read
    behind the last, `copies` times at the end.
    """
    first, moved = steps[0], [[x] for x in blocks]
    if isinstance(blocks[0], Bits) and isinstance(first.moves[0], Slice):
        return [[_sliced(x, first, place, axes)] for x in blocks]
    for packed, group in itertools.groupby(indices, lambda i: first.moves[i].packed_as):
        given, run = [x for x, *_ in moved], (steps, [*group], place, axes)
        if packed:
            moved = _in_bits(given, *run, copies)
        else:
            moved = [[x] for x in _as_they_are(given, *run)]
    return moved


def _as_they_are(
    moved: list[jax.Array],
    steps: Sequence[Reshard],
    group: Sequence[int],
    place: Place,
    axes: Axes,
) -> list[jax.Array]:
    shapes = [step.part_shape for step in steps]
    for index in group:
        moves = [step.moves[index] for step in steps]
        with jax.named_scope(line_name(place, steps[0].result, index)):
            moved = run_together(moved, shapes, moves, axes)
    return moved


def _in_bits(
    given: list[Any],
    steps: Sequence[Reshard],
    group: Sequence[int],
    place: Place,
    axes: Axes,
    copies: int,
) -> list[list[Any]]:
    """Blocks of which elements and scales are moved: of one value by a collective each,
    of which compilers make one; of several, all in one as bytes."""
    hows = [how for step in steps if (how := step.moves[group[0]].packed_as)]
    made = [
        (x.elements, x.scales) if isinstance(x, Bits) else quantize(x, how)
        for x, how in zip(given, hows, strict=True)
    ]
    elements, scales = [e for e, _ in made], [s for _, s in made]
    shapes = [step.part_shape for step in steps]
    few = [how.scales(shape) for how, shape in zip(hows, shapes, strict=True)]
    joins = len(steps) > 1
    if joins:
        few = [(*shape, SCALE_BYTES) for shape in few]
        scales = [as_bytes(s) for s in scales]
    for index in group:
        moves = [step.moves[index] for step in steps]
        with jax.named_scope(line_name(place, steps[0].result, index)):
            if joins:
                both = run_together(
                    elements + scales, [*shapes, *few], moves + moves, axes
                )
                elements, scales = both[: len(steps)], both[len(steps) :]
            else:
                elements = run_together(elements, shapes, moves, axes)
                scales = run_together(scales, few, moves, axes)
    if joins:
        scales = [of_bytes(s) for s in scales]
    return [
        [Bits(e, s, how, x.dtype)]
        if step.in_bits
        else _read(e, s, how, x.dtype, copies)
        for e, s, how, x, step in zip(elements, scales, hows, given, steps, strict=True)
    ]


def _sliced(x: Bits, step: Reshard, place: Place, axes: Axes) -> Bits:
    """A device's part of a value in bits."""
    shapes = step.part_shape, x.how.scales(step.part_shape)
    with jax.named_scope(line_name(place, step.result, 0)):
        elements, scales = (
            run_together([y], [shape], step.moves, axes)[0]
            for y, shape in zip((x.elements, x.scales), shapes, strict=True)
        )
    return replace(x, elements=elements, scales=scales)


def _exact(step: Reshard) -> Reshard:
    return replace(step, written=(), in_bits=False)


def _refused(*_: Any) -> NoReturn:
    raise ShardingError(
        f"{step_name()} is differentiated through a parameter that stays in eight bits "
        "between its forward and its backward pass, which have no derivative.\n"
        f"{called()}"
        "Pass reshard_after_forward=True and prefetch=0 for what is differentiated "
        "from outside, or gather_dtype=None."
    )


def _read(
    elements: jax.Array,
    scales: jax.Array,
    how: Quantized,
    dtype: jnp.dtype,
    copies: int,
) -> list[jax.Array]:
    """The value as often as asked: a compiler reads bytes inside of a matmul if nothing
    else uses what it reads, and would make one of equal reads that no barrier parts."""
    made = [dequantize(elements, scales, how, dtype)]
    while len(made) < copies:
        elements, scales = barrier(elements, scales)
        made.append(dequantize(elements, scales, how, dtype))
    return made


def _on_wire(step: Reshard, x: Any) -> Any:
    if isinstance(x, Bits) or str(x.dtype) == step.dtype:
        return x
    return lax.convert_element_type(x, step.dtype)


def _off_wire(moved: Any, like: Any) -> Any:
    """What was moved, in the dtype that it had before."""
    if moved.dtype == like.dtype:
        return moved
    weak = getattr(like, "weak_type", False)
    return compat.with_weak_type(lax.convert_element_type(moved, like.dtype), weak)
