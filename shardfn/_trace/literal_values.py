"""Values that are made of literals alone: each device makes what it needs of them.

In: the equations of a program in order, then its nodes. Out: which values are zero;
zeros in place of a value that is sure to be, or that has no elements; and nodes of
their own for what needs such a value whole where others may split it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.program import LITERAL, VALUE, ZERO, Atom, Node, number_of
from shardfn._core.sizes import elements

_PASS_ON = ("broadcast_in_dim", "convert_element_type", "reshape", "copy")
_OF_SHAPE = ("iota", *_PASS_ON)


@dataclass(slots=True)
class Zeros:
    """The values of one program that are known to be zero."""

    known: set[int] = field(default_factory=set)

    def kind(self, atom: Atom) -> str:
        """What an operand is: VALUE, ZERO or LITERAL."""
        if isinstance(atom, int):
            return ZERO if atom in self.known else VALUE
        value = np.asarray(atom.val)
        return ZERO if value.ndim == 0 and _is_zero(value) else LITERAL

    def equation(
        self, eqn: JaxprEqn, operands: Sequence[Atom], results: Sequence[int]
    ) -> None:
        """Notes what an equation makes."""
        if eqn.primitive.name in _PASS_ON and operands:
            if self.kind(operands[0]) == ZERO:
                self.known.update(results)

    def selected(
        self, eqn: JaxprEqn, operands: Sequence[Atom]
    ) -> tuple[Any, tuple[Atom, ...]] | None:
        """A jaxpr of zeros for a selection among zeros, as a scatter's derivative has:
        XLA sees that it depends on nothing."""
        if eqn.primitive.name != "select_n":
            return None
        if any(self.kind(atom) != ZERO for atom in operands[1:]):
            return None
        with compat.as_user_code(eqn):
            return zeros_like(eqn.outvars[0].aval), ()


def is_empty(aval: Any) -> bool:
    """Whether a value is an array of numbers without elements."""
    plain = isinstance(aval, ShapedArray)
    return plain and not elements(aval) and isinstance(aval.dtype, np.dtype)


def zeros_like(aval: Any) -> Any:
    """A closed jaxpr that makes zeros of the shape and dtype of `aval`."""

    def made() -> jax.Array:
        zeros = lax.full(aval.shape, 0, aval.dtype)
        return compat.with_weak_type(zeros, getattr(aval, "weak_type", False))

    return jax.make_jaxpr(made)()


def made_whole_apart(
    nodes: Sequence[Node],
    outputs: Sequence[Atom],
    new: Callable[[Any], int],
    avals: Sequence[Any],
) -> list[Node]:
    """Nodes in which values of literals alone are made again for what needs them whole,
    such as the updates of a scatter, if something else may split them.

    Args:
      nodes: the nodes of a program.
      outputs: what it returns.
      new: numbers a new value of an aval.
      avals: the avals of all values.

    Returns:
      The nodes, with those that make them again in front of what needs them.
    """
    makers: dict[int, Node] = {}
    split, whole = {a for a in outputs if isinstance(a, int)}, set[int]()
    for node in nodes:
        read = _values_read(node, avals)
        given = {atom for atom in node.inputs if isinstance(atom, int)}
        if _is_of_literals(node) and given <= makers.keys():
            makers.update(dict.fromkeys(node.outputs, node))
            continue
        needed = _needed_whole(node, avals) & makers.keys()
        whole |= needed
        split |= read - needed
    # What is split splits what it is made of, and that what is made of it.
    for value in reversed(makers):
        split |= _values_read(makers[value], avals) if value in split else set()
    for value, node in makers.items():
        split |= {value} if split & _values_read(node, avals) else set()
    copies: dict[int, int] = {}
    made: list[Node] = []

    def copy_of(value: Atom) -> Atom:
        if not isinstance(value, int):
            return value
        if value not in copies:
            node = makers[value]
            copies[value] = new(avals[value])
            inputs = tuple(map(copy_of, node.inputs))
            made.append(replace(node, inputs=inputs, outputs=(copies[value],)))
        return copies[value]

    for node in nodes:
        own = _needed_whole(node, avals) & whole & split
        if own:
            inputs = tuple(
                copy_of(a) if number_of(a) in own else a for a in node.inputs
            )
            node = replace(node, inputs=inputs)
        made.append(node)
    return made


def _values_read(node: Node, avals: Sequence[Any]) -> set[int]:
    """The operands of a node that are no literals and no scalars."""
    found = (atom for atom in node.inputs if isinstance(atom, int))
    return {value for value in found if elements(avals[value]) > 1}


def _is_of_literals(node: Node) -> bool:
    """Whether a node makes one value, element by element of what it is given."""
    if node.kind != "op" or node.eqn.effects or len(node.outputs) != 1:
        return False
    rule = node.rule
    alike = rule is not None and rule.flat and not rule.reduce
    return alike or node.eqn.primitive.name in _OF_SHAPE


def _needed_whole(node: Node, avals: Sequence[Any]) -> set[int]:
    """The operands of an operation of which no dimension may be split."""
    rule = node.rule
    if node.kind != "op" or rule is None or not rule.whole:
        return set()
    found = set[int]()
    for atom, dims in zip(node.inputs, rule.operands, strict=True):
        if isinstance(atom, int) and elements(avals[atom]) > 1:
            names = [f for dim in dims for f in dim if rule.size(f) > 1]
            if any(f in rule.whole for f in names):
                found.add(atom)
    return found


def _is_zero(value: np.ndarray) -> bool:
    """Whether a scalar is zero, not minus zero: another one takes its place."""
    parts = [float(np.real(value)), float(np.imag(value))]
    return parts == [0, 0] and not np.signbit(parts).any()
