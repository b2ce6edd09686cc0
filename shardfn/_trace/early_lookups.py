"""Looks elements up before what is computed of each element, not behind it.

In: a program, for a compiler that writes to memory whatever elements are picked from.
Out: the program, in which a label's `log_softmax(logits.astype(float32))` is that of
its logit: looked up first, then cast and normalized. It is the same number, and no
array has all of them in float32. Derivatives are those of the lookup as it was.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn._core.program import Atom, Node, Program, aval_of
from shardfn._core.sizes import itemsize
from shardfn._trace.inlined import Inlined

POINTWISE = (
    *(lax.convert_element_type_p, lax.neg_p, lax.exp_p, lax.log_p, lax.tanh_p),
    *(lax.add_p, lax.sub_p, lax.mul_p, lax.div_p, lax.max_p, lax.min_p),
)
"""What a lookup is moved over. All make NaN of NaN, which it gives out of bounds."""


def look_up_early(program: Program) -> Program:
    """Moves lookups in front of pointwise operations, also in control flow.

    Args:
      program: the program, its values named.

    Returns:
      The program; the same one if there is nothing to move.
    """
    moved = _Moved(program)
    for node in program.nodes:
        bodies = tuple(map(look_up_early, node.bodies))
        if any(a is not b for a, b in zip(bodies, node.bodies, strict=True)):
            node = replace(node, bodies=bodies)
        moved.add(node)
    nodes = moved.inlined.nodes
    same = len(nodes) == len(program.nodes) and all(
        a is b for a, b in zip(nodes, program.nodes, strict=True)
    )
    return program if same else moved.inlined.finished()


@dataclass(frozen=True, slots=True)
class _Row:
    """An operand that is the same for all elements that a lookup chooses from.

    Attributes:
      of: what it is broadcast from: a value, or one number.
      dims: the dimension of the whole that each of its dimensions is.
    """

    of: Atom
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Link:
    """A pointwise operation on an array, rows and numbers; or a reshape of an array.

    Attributes:
      node: the operation.
      shape: of what it makes.
      at: which operand is the array.
      rows: by position, the operands that are rows.
    """

    node: Node
    shape: tuple[int, ...]
    at: int = 0
    rows: Mapping[int, _Row] = field(default_factory=dict)

    @property
    def source(self) -> int:
        atom = self.node.inputs[self.at]
        assert isinstance(atom, int)
        return atom

    @property
    def is_view(self) -> bool:
        return self.node.eqn.primitive is lax.reshape_p

    def of(self, array: Any, row: Callable[[_Row], Any]) -> Any:
        """What it makes of an array, and of rows as they are to be."""
        operands = [getattr(atom, "val", None) for atom in self.node.inputs]
        operands[self.at] = array
        for at, each in self.rows.items():
            operands[at] = row(each)
        return _bind(self.node, *operands)


def _bind(node: Node, *operands: Any) -> Any:
    return node.eqn.primitive.bind(*operands, **node.eqn.params)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A lookup, and what makes the array that it reads.

    Attributes:
      node: the lookup.
      links: from the array that it is to read to the one that it reads.
      shared: see `_shared`.
    """

    node: Node
    links: tuple[_Link, ...]
    shared: Mapping[int, int]

    @property
    def operands(self) -> list[Atom]:
        """What was read, the array, what says where to look, and the rows."""
        each = (row.of for link in self.links for row in link.rows.values())
        array = self.links[0].source
        return [self.node.inputs[0], array, *self.node.inputs[1:], *dict.fromkeys(each)]

    def early(self, array: Any, indices: Any, *rows: Any) -> Any:
        """What is looked up, before the pointwise operations."""
        known = dict(zip(self.operands[3:], rows, strict=True))
        for link in self.links:
            array = _bind(link.node, array) if link.is_view else array
        made = _bind(self.node, array, indices)

        def spread(row: _Row) -> Any:
            value = known[row.of]
            pairs = zip(value.shape, row.dims, strict=True)
            kept = [(size, self.shared[d]) for size, d in pairs if size > 1]
            value = value.reshape([size for size, _ in kept])
            return lax.broadcast_in_dim(value, made.shape, [d for _, d in kept])

        for link in self.links:
            made = made if link.is_view else link.of(made, spread)
        return made

    @property
    def run(self) -> Callable[..., Any]:
        """What is looked up early, also given what was read, and with the derivative of
        reading that: through a cast, gradients would add up in the narrow dtype."""

        def early(read: Any, *given: Any) -> Any:
            return self.early(*given)

        def along(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            read, _, indices, *_ = primals
            reading = functools.partial(_bind, self.node)
            change = jax.jvp(lambda x: reading(x, indices), [read], [tangents[0]])[1]
            return run(*primals), change

        run: Any = jax.custom_jvp(early)
        run.defjvp(along)
        return run


@dataclass(slots=True)
class _Moved:
    """A program while lookups are moved in it.

    Attributes:
      program: as it was.
      inlined: what becomes of it.
      makers: per value, the node that makes it.
      readers: per value, the nodes that read it.
    """

    program: Program
    inlined: Inlined = field(init=False)
    makers: dict[int, Node] = field(default_factory=dict)
    readers: dict[int, list[Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inlined = Inlined(self.program)
        for node in self.program.nodes:
            self.makers.update(dict.fromkeys(node.outputs, node))
            for atom in node.inputs:
                if isinstance(atom, int):
                    self.readers.setdefault(atom, []).append(node)

    def add(self, node: Node) -> None:
        links = self.chain(node) if _is_lookup(node) else []
        if not links:
            self.inlined.nodes.append(node)
            return
        lookup = _Lookup(node, tuple(reversed(links)), _shared(node))
        self.inlined.inline(node, lookup.run, lookup.operands, node.outputs)

    def chain(self, lookup: Node) -> list[_Link]:
        """The pointwise operations that make what a lookup reads, the last one first,
        and the reshapes among them; none if it is not better to look up before them."""
        links, kept = list[_Link](), 0
        value, shared = lookup.inputs[0], _shared(lookup)
        least, reduced = itemsize(aval_of(self.program, value)), False
        while isinstance(value, int):
            reduced = reduced or any(map(_reduces, self.readers[value]))
            node = self.makers.get(value)
            if node is None:
                break
            link = self.link(node, shared)
            if link is None or self.program.leaf(link.source):
                break
            links.append(link)
            value = link.source
            if link.is_view:
                shared = {}
                continue
            size = itemsize(self.program.avals[value])
            if size <= least:
                least, kept = size, len(links)
        # Otherwise what is looked up in might be in memory for the lookup alone.
        return links[:kept] if reduced else []

    def link(self, node: Node, shared: Mapping[int, int]) -> _Link | None:
        """A node as a link; None if it is none, or has rows of other dimensions."""
        shape = aval_of(self.program, node.outputs[0]).shape
        if node.eqn.primitive is lax.reshape_p and len(node.inputs) == 1:
            return _Link(node, shape) if isinstance(node.inputs[0], int) else None
        if node.kind != "op" or node.eqn.primitive not in POINTWISE:
            return None
        whole, rows = list[int](), dict[int, _Row]()
        for at, atom in enumerate(node.inputs):
            aval = aval_of(self.program, atom)
            if not _has_nan(aval.dtype):
                return None
            row = self.row(atom, shape)
            if row is None:
                whole.append(at)
            elif isinstance(row.of, int):
                if not _spreads(row, self.program.avals[row.of].shape, shared):
                    return None
                rows[at] = row
            elif aval.shape:
                return None  # one number, as an array
        return _Link(node, shape, whole[0], rows) if len(whole) == 1 else None

    def row(self, atom: Atom, shape: Sequence[int]) -> _Row | None:
        """An operand of a pointwise operation as a row; None if it has this shape."""
        own = aval_of(self.program, atom).shape
        if own != shape and len(own) in (0, len(shape)):
            return _Row(atom, tuple(range(len(own))))
        maker = self.makers.get(atom) if isinstance(atom, int) else None
        if maker is None or maker.eqn.primitive is not lax.broadcast_in_dim_p:
            return None
        dims = map(int, maker.eqn.params["broadcast_dimensions"])
        return _Row(maker.inputs[0], tuple(dims))


def _has_nan(dtype: Any) -> bool:
    """Whether it is a dtype of floats, NaN among them."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    return bool(np.isnan(np.asarray(np.nan).astype(dtype).astype(np.float32)))


def _shapes(lookup: Node) -> tuple[Sequence[int], Sequence[int]]:
    """Of what a lookup reads, and of what it makes."""
    array, made = lookup.eqn.invars[0].aval, lookup.eqn.outvars[0].aval
    return array.shape, made.shape  # pyright: ignore


def _is_lookup(node: Node) -> bool:
    """Whether a node looks up some floats of an array, and NaN where there are none."""
    if node.kind != "op" or node.eqn.primitive is not lax.gather_p:
        return False
    fill = node.eqn.params["fill_value"]
    array, made = _shapes(node)
    is_float = _has_nan(node.eqn.outvars[0].aval.dtype)  # pyright: ignore
    fills = fill is None or fill != fill
    return is_float and fills and math.prod(made) <= math.prod(array)


def _shared(lookup: Node) -> Mapping[int, int]:
    """The dimensions of the array in which a lookup chooses nothing, and the dimensions
    of its result that they are: those that the indices have, too, and whole ones."""
    array, made = _shapes(lookup)
    params: dict[str, Any] = lookup.eqn.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batching, left_out = numbers.operand_batching_dims, numbers.collapsed_slice_dims
    rows = [d for d in range(len(made)) if d not in numbers.offset_dims]
    pairs = zip(batching, numbers.start_indices_batching_dims, strict=True)
    shared = {d: rows[i] for d, i in pairs}
    cut = [d for d in range(len(array)) if d not in (*left_out, *batching)]
    for d, at in zip(cut, numbers.offset_dims, strict=True):
        if sizes[d] == array[d] and d not in numbers.start_index_map:
            shared[d] = at
    return shared


def _spreads(row: _Row, shape: Sequence[int], shared: Mapping[int, int]) -> bool:
    """Whether a row of this shape is the same for all elements that a lookup chooses
    from, and has its dimensions in the result's order."""
    pairs = zip(shape, row.dims, strict=True)
    kept = [shared.get(d, -1) for size, d in pairs if size > 1]
    return -1 not in kept and kept == sorted(kept)


def _reduces(node: Node) -> bool:
    """Whether a node reduces its one operand."""
    is_op = node.kind == "op" and len(node.inputs) == 1
    return is_op and node.rule is not None and bool(node.rule.reduce)
