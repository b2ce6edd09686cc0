"""Reductions that do not ask in which order the elements lie.

In: the equations of a program in order. Out: for a sum of all elements of a reshaped or
concatenated array, such as `vdot(g, g)` or the norm of raveled gradients, the same on
the arrays as they were; also for a reshape back to the shape that an array had.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from shardfn._core import compat
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.program import Atom

_REDUCED = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")


@dataclass(frozen=True, slots=True, eq=False)
class ValuePart:
    """An array of some of the elements of a value, in the value's order.

    Attributes:
      aval: its shape and dtype.
      source: the value that it is; None if it is computed by `eqn`.
      eqn: an elementwise equation.
      operands: what that is applied to: parts, or scalars of the program.
    """

    aval: Any
    source: Atom | None = None
    eqn: JaxprEqn | None = None
    operands: "tuple[ValuePart, ...]" = ()


@dataclass(slots=True)
class Unordered:
    """The values of one program that are other arrays, reshaped and joined."""

    known: dict[int, tuple[ValuePart, ...]] = field(default_factory=dict)

    def equation(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        result: int,
        rule: OpShardingRule | None,
    ) -> None:
        """Notes the value that an equation makes."""
        parts = None
        if eqn.primitive.name == "reshape" and not eqn.params["dimensions"]:
            parts = self.parts(operands[0], eqn.invars[0].aval)
        elif eqn.primitive.name == "concatenate" and _ndim(eqn.outvars[0]) == 1:
            each = zip(operands, eqn.invars, strict=True)
            parts = tuple(p for a, v in each for p in self.parts(a, v.aval))
        elif rule is not None and _is_elementwise(eqn, rule):
            parts = self.computed(eqn, operands)
        if parts:
            self.known[result] = parts

    def parts(self, atom: Atom, aval: Any) -> tuple[ValuePart, ...]:
        found = self.known.get(atom) if isinstance(atom, int) else None
        return found or (ValuePart(aval, atom),)

    def computed(
        self, eqn: JaxprEqn, operands: Sequence[Atom]
    ) -> tuple[ValuePart, ...] | None:
        """The parts of what an elementwise equation makes of equal parts."""
        arrays = [
            self.known.get(atom) if isinstance(atom, int) else None
            for atom, var in zip(operands, eqn.invars, strict=True)
            if _ndim(var)
        ]
        if not arrays or None in arrays:
            return None
        cuts = [p for p in arrays if p is not None]
        if any(_shapes(p) != _shapes(cuts[0]) for p in cuts):
            return None
        made = []
        for k, first in enumerate(cuts[0]):
            each = iter(cuts)
            given = tuple(
                next(each)[k] if _ndim(var) else ValuePart(var.aval, atom)
                for atom, var in zip(operands, eqn.invars, strict=True)
            )
            dtype = _dtype(eqn.outvars[0])
            aval = jax.ShapeDtypeStruct(first.aval.shape, dtype)
            made.append(ValuePart(aval, eqn=eqn, operands=given))
        return tuple(made)

    def ordered_no_more(
        self, eqn: JaxprEqn, operands: Sequence[Atom]
    ) -> tuple[Any, tuple[Atom, ...]] | None:
        """A jaxpr that does what `eqn` does on arrays as they were, and its operands;
        None if it asks for the order of the elements."""
        parts = [self.known.get(a) if isinstance(a, int) else None for a in operands]
        if not parts or None in parts:
            return None
        cuts = [p for p in parts if p is not None]
        run = _whole(eqn, cuts)
        if run is None:
            return None
        leaves: dict[Any, ValuePart] = {}
        for part in (p for cut in cuts for p in cut):
            _find_leaves(part, leaves)

        def program(*values: Any) -> Any:
            env = dict(zip(leaves, values, strict=True))
            return run([[_value(p, env) for p in cut] for cut in cuts])

        avals = [compat.abstract(p.aval) for p in leaves.values()]
        with compat.as_user_code(eqn):
            closed = jax.make_jaxpr(program)(*avals)
        atoms = (p.source for p in leaves.values())
        return closed, tuple(a for a in atoms if a is not None)


def _whole(
    eqn: JaxprEqn, cuts: Sequence[tuple[ValuePart, ...]]
) -> Callable[[list[list[jax.Array]]], jax.Array] | None:
    """What `eqn` does, as a function of the parts of its operands, if it may."""
    name, params, (first, *others) = eqn.primitive.name, eqn.params, cuts
    if name == "reshape" and not params["dimensions"]:
        if len(first) == 1 and first[0].aval.shape == _shape(eqn.outvars[0]):
            return lambda values: values[0][0]
        return None
    if len(first) > 1 and _dtype(eqn.outvars[0]).itemsize < 4:
        return None  # each part's sum would be rounded
    if name in _REDUCED and len(params["axes"]) == _ndim(eqn.invars[0]):
        if name != "reduce_sum" and len(first) > 1:
            return None  # only sums of several are one number on the wire
        return lambda values: _added([_reduced(eqn, x) for x in values[0]])
    if name == "dot_general" and _is_inner(eqn) and others:
        if _shapes(first) != _shapes(others[0]):
            return None
        return lambda values: _added(
            [_inner(eqn, x, y) for x, y in zip(*values, strict=True)]
        )
    return None


def _added(terms: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(lax.add, terms)


def _reduced(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    return eqn.primitive.bind(x, **{**eqn.params, "axes": tuple(range(x.ndim))})


def _inner(eqn: JaxprEqn, x: jax.Array, y: jax.Array) -> jax.Array:
    every = tuple(range(x.ndim))
    numbers = ((every, every), ((), ()))
    return eqn.primitive.bind(x, y, **{**eqn.params, "dimension_numbers": numbers})


def _is_inner(eqn: JaxprEqn) -> bool:
    """Whether it is the inner product of two vectors."""
    contract, batch = eqn.params["dimension_numbers"]
    return tuple(map(tuple, (*contract, *batch))) == ((0,), (0,), (), ()) and (
        _ndim(eqn.invars[0]) == _ndim(eqn.invars[1]) == 1
    )


def _value(part: ValuePart, env: dict[Any, jax.Array]) -> jax.Array:
    """A part, computed once, after what it is computed from."""
    pending = [part]
    while pending:
        found = pending[-1]
        missing = [p for p in found.operands if _key(p) not in env]
        if missing:
            pending += missing
            continue
        pending.pop()
        if _key(found) not in env:
            assert found.eqn is not None
            operands = [env[_key(p)] for p in found.operands]
            with compat.as_user_code(found.eqn):
                value = found.eqn.primitive.bind(*operands, **found.eqn.params)
            env[_key(found)] = value
    return env[_key(part)]


def _find_leaves(part: ValuePart, leaves: dict[Any, ValuePart]) -> None:
    """Collects the values of the program that a part is computed from."""
    pending, seen = [part], set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if part.source is not None:
            leaves.setdefault(_key(part), part)
        pending += part.operands


def _key(part: ValuePart) -> Any:
    return (
        id(part)
        if part.source is None or isinstance(part.source, Literal)
        else (
            "value",
            part.source,
        )
    )


def _is_elementwise(eqn: JaxprEqn, rule: OpShardingRule) -> bool:
    """Whether each element of the one result is made of the elements at its place, in
    an array of whatever shape."""
    if len(rule.results) != 1 or rule.reduce or rule.whole or not any(rule.operands):
        return False
    scales = eqn.primitive.name == "dot_general" and () in rule.operands
    shape = _shape(eqn.outvars[0])
    same = all(
        not dims or (dims == rule.results[0] and _shape(var) == shape)
        for dims, var in zip(rule.operands, eqn.invars, strict=True)
    )
    # These spell out a shape or a sharding of it.
    spelled = eqn.primitive.name in (
        "broadcast_in_dim",
        "squeeze",
        "reshape",
        "device_put",
    )
    return same and (rule.flat or scales) and not spelled


def _shapes(parts: Sequence[ValuePart]) -> list[tuple[int, ...]]:
    return [p.aval.shape for p in parts]


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _ndim(var: Any) -> int:
    return len(_shape(var))


def _dtype(var: Any) -> Any:
    return var.aval.dtype
