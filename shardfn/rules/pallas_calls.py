"""The rule of Pallas kernels: what follows from the blocks of their grid.

In: an equation of `pallas_call`. Out: its rule: along a dimension of the grid whose
programs know nothing of each other, each device runs its part of the programs, on its
part of the arrays. Kernels of which that is not known have none.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from shardfn._core.compat import KernelBlocks, call_on_blocks, kernel_grid
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import Dim, OpShardingRule
from shardfn._core.rule_registry import LocalOp, register_rule_of
from shardfn.rules._factors import fresh_names, operand_shapes, result_shapes
from shardfn.rules.kernels import partition_like_p


def _factor(dim: int) -> str:
    """The programs along one dimension of a grid."""
    return f"p{dim}"


def _local(op: LocalOp, *operands: jax.Array) -> Sequence[jax.Array]:
    """The kernel on a device's blocks, with as much of the grid as it has."""
    grid = kernel_grid(op.eqn)
    assert grid is not None
    split = dict(op.rule.sizes)
    along = [d for d in range(len(grid.sizes)) if _factor(d) in split]
    sizes = {d: op.size(_factor(d)) for d in along}
    shapes = [
        *(x.shape for x in operands[grid.scalars :]),
        *(tuple(map(op.local_size, dims)) for dims in op.rule.results),
    ]
    params = call_on_blocks(op.eqn, sizes, shapes)

    def kernel(*operands: Any) -> Any:
        return op.eqn.primitive.bind(*operands, **params)

    return partition_like_p.bind(*operands, kernel=kernel, reference=kernel)


@register_rule_of("pallas_call", local=_local)
def _pallas_call(eqn: JaxprEqn) -> OpShardingRule | None:
    """`(p0 a) b, c b -> (p0 a) b  whole={a, b, c}` for blocks of `a` rows that follow
    the first dimension of the grid, and blocks that are the same for all."""
    grid = kernel_grid(eqn)
    if grid is None:
        return None
    shapes = [*operand_shapes(eqn)[grid.scalars :], *result_shapes(eqn)]
    results = len(eqn.outvars)
    split = {
        d: count
        for d, count in enumerate(grid.sizes)
        if count is not None
        and d in grid.apart
        and all(
            _follows(d, count, *pair) for pair in zip(grid.blocks, shapes, strict=True)
        )
        and all(d in blocks.along for blocks in grid.blocks[-results:])
        and all(old.along == new.along for old, new in grid.changed)
    }
    if not split:
        return None
    fresh, sizes = fresh_names(), {_factor(d): n for d, n in split.items()}
    whole: set[str] = set()

    def named(blocks: KernelBlocks | None, shape: Sequence[int]) -> list[Dim]:
        dims: list[Dim] = []
        for dim, size in enumerate(shape):
            inner = next(fresh)
            whole.add(inner)
            along = None if blocks is None else blocks.along[dim]
            if blocks is None or along not in split:
                dims.append((inner,))
                continue
            sizes[inner] = blocks.sizes[dim]
            dims.append((_factor(along), inner))
            assert sizes[_factor(along)] * sizes[inner] == size
        return dims

    every = [None] * grid.scalars + list(grid.blocks)
    every_shape = [*operand_shapes(eqn)[: grid.scalars], *shapes]
    dims = [named(*pair) for pair in zip(every, every_shape, strict=True)]
    return make_rule(eqn, dims[:-results], dims[-results:], sizes=sizes, whole=whole)


def _follows(
    dim: int, count: int, blocks: KernelBlocks, shape: tuple[int, ...]
) -> bool:
    """Whether the blocks of an array follow a dimension of the grid, all of them, or
    have nothing to do with it."""
    at = [d for d, along in enumerate(blocks.along) if along == dim]
    if dim in blocks.others or len(at) > 1:
        return False
    return all(blocks.sizes[d] * count == shape[d] for d in at)
