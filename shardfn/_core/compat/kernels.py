"""Pallas kernels, as far as it is said which blocks each program of their grid has.

In: an equation of `pallas_call`. Out: its grid, what lies along it, and the same call
on other shapes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

_IDS = ("program_id", "num_programs")
_SEEDS, _DRAWS = "prng_seed", "prng_random_bits"
"""A TPU's own random numbers go on from program to program, unless they are seeded."""


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """Which blocks of one array the programs of a grid have.

    Attributes:
      sizes: of a block, per dimension.
      along: per dimension, the dimension of the grid whose number is that of the block;
        None where it is none, or the same everywhere.
      others: dimensions of the grid that say in another way which block it is.
    """

    sizes: tuple[int, ...]
    along: tuple[int | None, ...]
    others: frozenset[int]


@dataclass(frozen=True, slots=True)
class KernelGrid:
    """The grid of one call.

    Attributes:
      sizes: of its dimensions; None of one that an operand says.
      scalars: how many operands come first that say such sizes, and where blocks are.
      blocks: of the other operands, and of the results.
      apart: dimensions whose programs know nothing of each other: none asks for its
        number, and what is left in scratch memory is not read by another one.
      changed: blocks of operands that become results in place, each with those of its
        result.
    """

    sizes: tuple[int | None, ...]
    scalars: int
    blocks: tuple[KernelBlocks, ...]
    apart: frozenset[int]
    changed: tuple[tuple[KernelBlocks, KernelBlocks], ...]


def kernel_grid(eqn: JaxprEqn) -> KernelGrid | None:
    """The grid of a call; None if there is none, or blocks are no blocks."""
    params: dict[str, Any] = eqn.params
    mapping = params["grid_mapping"]
    sizes = tuple(n if isinstance(n, int) else None for n in mapping.grid)
    if eqn.effects or params.get("mesh") is not None or not sizes:
        return None
    blocks = [_blocks_of(block, len(sizes)) for block in mapping.block_mappings]
    known = [block for block in blocks if block is not None]
    if len(known) < len(blocks):
        return None
    own = [d for d in range(len(sizes)) if d not in mapping.vmapped_dims]
    inside = list(_equations(params["jaxpr"]))
    read = {own[e.params["axis"]] for e in inside if e.primitive.name in _IDS}
    names = {e.primitive.name for e in inside}
    if _DRAWS in names and _SEEDS not in names:
        return None
    parallel = _said_parallel(params["compiler_params"], own)
    apart = {*mapping.vmapped_dims, *(parallel if mapping.scratch_avals else own)}
    apart = {d for d in apart - read if sizes[d] is not None}
    first = mapping.num_index_operands  # aliases do not count sizes that come before
    of_results = known[len(known) - len(eqn.outvars) :]
    changed = tuple(
        (known[i - first], of_results[k])
        for i, k in params["input_output_aliases"]
        if i >= first
    )
    scalars = mapping.num_dynamic_grid_bounds + first
    return KernelGrid(sizes, scalars, tuple(known), frozenset(apart), changed)


def _blocks_of(block: Any, rank: int) -> KernelBlocks | None:
    sizes = [_size_of(dim) for dim in block.block_shape]
    if None in sizes or block.transforms:
        return None
    closed = block.index_map_jaxpr
    jaxpr = closed.jaxpr
    ids = dict(zip(jaxpr.invars[:rank], range(rank), strict=True))
    made_of: dict[Any, frozenset[int]] = {v: frozenset({i}) for v, i in ids.items()}
    for eqn in jaxpr.eqns:
        read = [made_of.get(v, frozenset()) for v in eqn.invars if not _is_literal(v)]
        made_of |= dict.fromkeys(eqn.outvars, frozenset[int]().union(*read))
    along, others = [], set[int]()
    for atom in jaxpr.outvars:
        own = None if _is_literal(atom) else ids.get(atom)
        along.append(own)
        if own is None and not _is_literal(atom):
            others |= made_of.get(atom, frozenset())
    whole = tuple(n for n in sizes if n is not None)
    return KernelBlocks(whole, tuple(along), frozenset(others))


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def _size_of(dim: Any) -> int | None:
    """Of a block that is one of several of its size; None of what begins anywhere."""
    kind = type(dim).__name__
    return dim.block_size if kind == "Blocked" else 1 if kind == "Squeezed" else None


def _equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Those of a kernel, and of bodies in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in jaxprs_in_params(eqn.params):
            yield from _equations(body)


def _said_parallel(given: Any, own: Sequence[int]) -> set[int]:
    """The dimensions of which the author says that their order does not matter, of
    those that are not `jax.vmap`'s."""
    said = getattr(given, "dimension_semantics", None) or ()
    if len(said) != len(own):
        return set()
    pairs = zip(own, said, strict=True)
    return {d for d, kind in pairs if str(kind).lower().endswith("parallel")}


def call_on_blocks(
    eqn: JaxprEqn, grid: Mapping[int, int], shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """The parameters of a call on other shapes, with another grid.

    Args:
      eqn: the call.
      grid: sizes of dimensions of the grid; the others are as they are.
      shapes: of the operands that have blocks, and of the results.

    Returns:
      The parameters.
    """
    params: dict[str, Any] = dict(eqn.params)
    mapping = params["grid_mapping"]
    blocks = tuple(
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    sizes = tuple(grid.get(d, size) for d, size in enumerate(mapping.grid))
    results = shapes[len(shapes) - len(params["out_avals"]) :]
    return params | {
        "grid_mapping": mapping.replace(grid=sizes, block_mappings=blocks),
        "out_avals": tuple(
            aval.update(shape=shape)
            for aval, shape in zip(params["out_avals"], results, strict=True)
        ),
        # It is of the whole call, and only an estimate.
        "cost_estimate": None,
    }
