"""Looks elements up before what is computed of each element, not behind it.

In: a program, for a compiler that writes to memory whatever elements are picked from.
Out: the program, in which a label's `log_softmax(logits.astype(float32))` is that of
its logit: looked up first, then cast and normalized. It is the same number, and no
array has all of them in float32.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.equation_key import equation_key
from shardfn._core.leaves import Names
from shardfn._core.program import LITERAL, VALUE, Atom, Node, Program, aval_of, live
from shardfn._core.rule_registry import rule_of
from shardfn._core.sizes import itemsize

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
    moved = _Moved(program, list(program.avals), list(program.leaves))
    for node in program.nodes:
        bodies = tuple(map(look_up_early, node.bodies))
        if any(a is not b for a, b in zip(bodies, node.bodies, strict=True)):
            node = replace(node, bodies=bodies)
        moved.add(node)
    same = len(moved.nodes) == len(program.nodes) and all(
        a is b for a, b in zip(moved.nodes, program.nodes, strict=True)
    )
    if same:
        return program
    nodes, constants = live(moved.nodes, program.constants, program.outputs)
    return replace(
        program,
        avals=tuple(moved.avals),
        leaves=tuple(moved.leaves),
        nodes=nodes,
        constants=constants,
    )


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
    """A pointwise operation on an array, rows and numbers.

    Attributes:
      node: the operation.
      at: which operand is the array.
      rows: by position, the operands that are rows.
    """

    node: Node
    at: int
    rows: Mapping[int, _Row]

    @property
    def source(self) -> int:
        atom = self.node.inputs[self.at]
        assert isinstance(atom, int)
        return atom


@dataclass(slots=True)
class _Moved:
    """A program while lookups are moved in it.

    Attributes:
      program: as it was.
      avals: of its values, and of new ones.
      leaves: their names.
      nodes: its nodes so far.
      makers: per value, the node that makes it.
      readers: per value, the nodes that read it.
    """

    program: Program
    avals: list[Any]
    leaves: list[Names]
    nodes: list[Node] = field(default_factory=list)
    makers: dict[int, Node] = field(default_factory=dict)
    readers: dict[int, list[Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.program.nodes:
            self.makers.update(dict.fromkeys(node.outputs, node))
            for atom in node.inputs:
                if isinstance(atom, int):
                    self.readers.setdefault(atom, []).append(node)

    def add(self, node: Node) -> None:
        links, views = self.chain(node) if _is_lookup(node) else ([], [])
        if not links:
            self.nodes.append(node)
            return
        value = links[-1].source
        for view in reversed(views):
            value = self.bind(node, view.eqn, [value])
        value = self.bind(node, node.eqn, [value, *node.inputs[1:]])
        for link in reversed(links):
            operands = list(link.node.inputs)
            operands[link.at] = value
            for at, row in link.rows.items():
                operands[at] = self.spread(row, node, self.avals[value].shape)
            value = self.bind(node, link.node.eqn, operands)
        self.nodes[-1] = replace(self.nodes[-1], outputs=node.outputs)

    def chain(self, lookup: Node) -> tuple[list[_Link], list[Node]]:
        """The pointwise operations that make what a lookup reads, the last one first,
        and the reshapes among them; none if it is not better to look up before them."""
        links, views, kept = list[_Link](), list[Node](), (0, 0)
        value, shared = lookup.inputs[0], _shared(lookup)
        least, reduced = itemsize(aval_of(self.program, value)), False
        while isinstance(value, int):
            reduced = reduced or any(map(_reduces, self.readers[value]))
            node = self.makers.get(value)
            if node is None:
                break
            if node.eqn.primitive is lax.reshape_p and len(node.inputs) == 1:
                views.append(node)
                (value,), shared = node.inputs, {}
                continue
            link = self.link(node, shared)
            if link is None or self.program.leaf(link.source):
                break
            links.append(link)
            value = link.source
            size = itemsize(self.program.avals[value])
            if size <= least:
                least, kept = size, (len(links), len(views))
        # Otherwise what is looked up in might be in memory for the lookup alone.
        if not reduced:
            return [], []
        return links[: kept[0]], views[: kept[1]]

    def link(self, node: Node, shared: Mapping[int, int]) -> _Link | None:
        """A node as a link; None if it is none, or has rows of other dimensions."""
        if node.kind != "op" or node.eqn.primitive not in POINTWISE:
            return None
        whole, rows = list[int](), dict[int, _Row]()
        shape = aval_of(self.program, node.outputs[0]).shape
        for at, atom in enumerate(node.inputs):
            aval = aval_of(self.program, atom)
            if not jnp.issubdtype(aval.dtype, jnp.floating):
                return None
            row = self.row(atom, shape)
            if row is not None and aval.shape:
                of = aval_of(self.program, row.of).shape
                if not _spreads(row, of, shared):
                    return None
                rows[at] = row
            elif row is None:
                whole.append(at)
        return _Link(node, whole[0], rows) if len(whole) == 1 else None

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

    def spread(self, row: _Row, lookup: Node, shape: Sequence[int]) -> Atom:
        """A row for each element that is looked up; one number is for all."""
        own, shared = aval_of(self.program, row.of).shape, _shared(lookup)
        if not own:
            return row.of
        pairs = zip(own, row.dims, strict=True)
        kept = [(size, shared[d]) for size, d in pairs if size > 1]
        sizes, dims = [size for size, _ in kept], [d for _, d in kept]
        value = row.of
        if tuple(sizes) != own:
            value = self.run(lookup, lambda x: lax.reshape(x, sizes), [value])
        if tuple(sizes) == tuple(shape):
            return value
        return self.run(lookup, lambda x: lax.broadcast_in_dim(x, shape, dims), [value])

    def bind(self, lookup: Node, eqn: JaxprEqn, operands: Sequence[Atom]) -> int:
        """What an equation makes of other operands, in the place of a lookup."""
        call = functools.partial(eqn.primitive.bind, **eqn.params)
        return self.run(lookup, call, operands, eqn)

    def run(
        self,
        lookup: Node,
        call: Callable[..., Any],
        operands: Sequence[Atom],
        like: JaxprEqn | None = None,
    ) -> int:
        """What one operation makes of operands, in the place of a lookup, for the line
        of code of an equation."""
        avals = [self.avals[a] if isinstance(a, int) else a.aval for a in operands]
        eqn = compat.traced_equation(call, like or lookup.eqn, avals)
        eqn_key, _ = equation_key(eqn, operands)
        self.avals.append(eqn.outvars[0].aval)
        self.leaves.append(())
        node = replace(
            lookup,
            eqn=eqn,
            inputs=tuple(operands),
            outputs=(len(self.avals) - 1,),
            kinds=tuple(VALUE if isinstance(a, int) else LITERAL for a in operands),
            rule=rule_of(eqn),
            eqn_key=eqn_key,
        )
        self.nodes.append(node)
        return node.outputs[0]


def _shapes(lookup: Node) -> tuple[Sequence[int], Sequence[int]]:
    """Of what a lookup reads, and of what it makes."""
    array, made = lookup.eqn.invars[0].aval, lookup.eqn.outvars[0].aval
    return array.shape, made.shape  # pyright: ignore


def _is_lookup(node: Node) -> bool:
    """Whether a node looks up some floats of an array, and NaN where there are none."""
    if node.kind != "op" or node.eqn.primitive is not lax.gather_p:
        return False
    fill = node.eqn.params["fill_value"]
    dtype = node.eqn.outvars[0].aval.dtype  # pyright: ignore
    array, made = _shapes(node)
    is_float = jnp.issubdtype(dtype, jnp.floating) and (fill is None or fill != fill)
    return is_float and math.prod(made) <= math.prod(array)


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
