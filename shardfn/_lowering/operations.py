"""Evaluates one equation on one device's blocks, by its op sharding rule.

In: an equation that calls no other program, its line of the plan, local operands. Out:
local results. Padding along what is reduced counts as the reduction's neutral value.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardfn._core import compat
from shardfn._core.barrier import unfused_on_tpus
from shardfn._core.neutral import neutral
from shardfn._core.op_sharding_rule import (
    OpShardingRule,
    flat_factor_start,
    is_flat_factor,
)
from shardfn._core.plan import Apply
from shardfn._core.program import Node, Program, aval_of
from shardfn._core.rule_registry import LocalOp, run_local
from shardfn._core.sharding import Axes, Unreduced, local_shape
from shardfn._lowering.extremum_jvp import Extreme, extreme_of
from shardfn.storage._padding import is_inside

Arrays = Sequence[jax.Array]


@dataclass(frozen=True, slots=True)
class Cut:
    """How local values are cut into blocks: along `dim`, into so many."""

    dim: int
    blocks: int

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a block."""
        rows = shape[self.dim] // self.blocks
        return (*shape[: self.dim], rows, *shape[self.dim + 1 :])


def run_op(
    program: Program,
    step: Apply,
    node: Node,
    operands: Arrays,
    axes: Axes,
    cut: Cut | None = None,
) -> tuple[Arrays, Extreme | None]:
    """Evaluates an equation.

    Args:
      program: the step.
      step: what the plan says of the equation.
      node: the equation.
      operands: local operands.
      axes: the mesh axes.
      cut: how the operands of a pointwise operation are cut, if they are blocks of
        what the plan says.

    Returns:
      Its local results, and how the first is reduced over devices if it is a maximum
      or minimum along a split dimension.
    """
    rule = node.rule
    if node.eqn.effects:
        return _run_once(node, operands, axes), None
    if rule is None:
        return _run_whole(node, operands), None
    local = _local_op(program, step, node, rule, axes)
    if cut is not None:
        local = replace(local, result_shapes=tuple(map(cut.of, local.result_shapes)))
    operands = [
        _masked(local, dims, x, aval_of(program, atom).shape)
        for dims, x, atom in zip(rule.operands, operands, node.inputs, strict=True)
    ]
    extreme = extreme_of(node, step, operands, axes)
    results = run_local(local, *compat.varying_alike(operands))
    if node.eqn.primitive is lax.reduce_max_p:
        results = [*map(unfused_on_tpus, results)]
    return results, extreme


def is_picked(step: Apply, node: Node) -> bool:
    """Whether each element of the sum that `node` makes lies on one device, the others
    having zeros. Terms that pass through a selection are a sum like any other."""
    rule = node.rule
    if rule is None or not rule.picks:
        return False
    over = {axis for factor, axis in step.parts if rule.reducer(factor)}
    states = enumerate(step.result_shardings[0])
    unreduced = {a for a, state in states if isinstance(state, Unreduced)}
    return bool(over) and over == unreduced


def _run_whole(node: Node, operands: Arrays) -> Arrays:
    """Runs a node on whole operands, on every device. JAX calls back to the host only
    where all mesh axes are manual."""
    primitive = node.eqn.primitive

    def run(*operands: jax.Array) -> Arrays:
        out = primitive.bind(*operands, **node.eqn.params)
        return list(out) if primitive.multiple_results else [out]

    operands, others = compat.varying_alike(operands), compat.automatic_axes()
    if primitive.name == "pure_callback" and others:
        whole = PartitionSpec()
        run = jax.shard_map(run, in_specs=whole, out_specs=whole, axis_names=others)
    return run(*operands)


def _run_once(node: Node, operands: Arrays, axes: Axes) -> Arrays:
    """Runs a node for its effect, such as printing, on the first device alone."""
    bind = functools.partial(node.eqn.primitive.bind, **node.eqn.params)
    each = range(len(axes.names))
    first = lax.axis_index(tuple(n for a in each for n in axes.bound(a))) == 0
    lax.cond(first, lambda *xs: list(bind(*xs)), lambda *_: [], *operands)
    return []


def _local_op(
    program: Program, step: Apply, node: Node, rule: OpShardingRule, axes: Axes
) -> LocalOp:
    split: dict[str, list[int]] = {}
    for factor, axis in step.parts:
        split.setdefault(factor, []).append(axis)
    return LocalOp(
        eqn=node.eqn,
        rule=rule,
        parts=tuple(
            (
                factor,
                tuple(name for a in sorted(on) for name in axes.bound(a)),
                math.prod(axes.sizes[a] for a in on),
            )
            for factor, on in split.items()
        ),
        result_shapes=tuple(
            local_shape(program.avals[v].shape, s, axes)
            for v, s in zip(node.outputs, step.result_shardings, strict=True)
        ),
    )


def _masked(op: LocalOp, dims: Any, x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` with its padding along reduced factors replaced by what does not count."""
    for factor, names, count in op.parts:
        if is_flat_factor(factor):
            if not op.rule.reduce or not dims:
                continue
            reducer, dim = op.rule.reduce[0][1], flat_factor_start(factor)
            size = math.prod(shape[dim:])
        else:
            reducer, dim = op.rule.reducer(factor), op.rule.dim_of(dims, factor)
            size = op.rule.size(factor)
            if reducer is None or dim is None:
                continue
        if size % count == 0:
            continue
        inside = is_inside(x.shape, dim, size, names)
        x = jnp.where(inside, x, neutral(reducer, x.dtype))
    return x
