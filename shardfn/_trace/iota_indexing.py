"""Indexing by a count: `x[arange(n), i]` as the batched lookup that it is.

In: the equations of a program in order. Out: for a gather or scatter whose indices
count along one of their own dimensions, the same with a batching dimension there, which
may be split: each device looks up its own rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from shardfn._core import compat
from shardfn._core.program import Atom
from shardfn._core.regions import Region

Counting = tuple[int | None, ...]
"""Along which of its dimensions each argument of a body counts, if it does."""

# Of the dimension numbers of a gather and of a scatter: operand dimensions left out of
# the result, those that the indices count in, and the batching ones of both.
_FIELDS = {
    lax.GatherDimensionNumbers: (
        "collapsed_slice_dims",
        "start_index_map",
        "operand_batching_dims",
        "start_indices_batching_dims",
    ),
    lax.ScatterDimensionNumbers: (
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "operand_batching_dims",
        "scatter_indices_batching_dims",
    ),
}


@dataclass(slots=True)
class Counts:
    """What is known of the values of one program.

    Attributes:
      along: integers that are everywhere equal to their index along this dimension.
      false: booleans that are False everywhere.
      parts: values that are such integers and others, joined along the last dimension.
    """

    along: dict[Any, int] = field(default_factory=dict)
    false: set[Any] = field(default_factory=set)
    parts: dict[Any, tuple[Any, ...]] = field(default_factory=dict)

    def constant(self, value: int, constant: Any) -> None:
        """Notes a captured array, if its values are at hand."""
        known = _known(constant)
        if known is None:
            return
        if known.dtype == bool and not known.any():
            self.false.add(value)
        if not _is_integer(known.dtype):
            return
        for dim, size in enumerate(known.shape):
            count = np.arange(size).reshape(-1, *[1] * (known.ndim - dim - 1))
            if np.array_equal(known, np.broadcast_to(count, known.shape)):
                self.along[value] = dim

    def inside(self, region: Region, operands: Sequence[Atom]) -> Counting:
        """Along which dimension each argument of a body counts that is the same each
        time that it runs; nothing if none does."""
        entering = region.entering(operands)
        found = tuple(
            self.along.get(atom)
            if i in region.constants and isinstance(atom, int)
            else None
            for i, atom in enumerate(entering)
        )
        return found if any(dim is not None for dim in found) else ()

    def entering(self, inputs: Sequence[int], counting: Counting) -> None:
        """Notes the arguments of a body."""
        pairs = zip(inputs, counting, strict=False)
        self.along.update((v, dim) for v, dim in pairs if dim is not None)

    def equation(self, eqn: JaxprEqn, operands: Sequence[Atom], result: int) -> None:
        """Notes the value that an equation makes."""
        atoms = [a if isinstance(a, int) else None for a in operands]
        dim = self.along.get(atoms[0]) if atoms else None
        aval: Any = eqn.outvars[0].aval
        match eqn.primitive.name:
            case "iota" if _counts_to(aval.dtype, aval.shape[eqn.params["dimension"]]):
                self.along[result] = eqn.params["dimension"]
            case "lt" if dim is not None and _is_zero(operands[1]):
                self.false.add(result)
            case "select_n" if atoms[0] in self.false and atoms[1] in self.along:
                self.along[result] = self.along[atoms[1]]
            case "broadcast_in_dim" if dim is not None:
                new = eqn.params["broadcast_dimensions"][dim]
                if _shape(eqn, 0)[dim] == aval.shape[new]:
                    self.along[result] = new
            case "convert_element_type" if dim is not None:
                if _counts_to(aval.dtype, aval.shape[dim]):
                    self.along[result] = dim
            case "concatenate" if eqn.params["dimension"] == aval.ndim - 1:
                if any(a in self.along for a in atoms) and None not in atoms:
                    if aval.shape[-1] == len(atoms):
                        self.parts[result] = tuple(atoms)

    def batched(
        self, eqn: JaxprEqn, operands: Sequence[Atom]
    ) -> tuple[Any, tuple[Atom, ...]] | None:
        """A jaxpr that does what `eqn` does with more batching dimensions, and its
        operands; None if the indices do not count, or do nothing else."""
        numbers = eqn.params.get("dimension_numbers")
        if type(numbers) not in _FIELDS or not isinstance(operands[1], int):
            return None
        parts = self.parts.get(operands[1], ())
        counting = _counting(numbers, _shape(eqn, 0), _shape(eqn, 1), parts, self.along)
        if not counting or len(counting) == len(parts):
            return None
        kept = [part for k, part in enumerate(parts) if k not in counting]
        params = {**eqn.params, "dimension_numbers": _with(numbers, counting)}

        def run(operand: Any, updates: Sequence[Any], *parts: Any) -> Any:
            indices = lax.concatenate(parts, parts[0].ndim - 1)
            return eqn.primitive.bind(operand, indices, *updates, **params)

        operand, indices, *updates = (_aval(v) for v in eqn.invars)
        part = jax.ShapeDtypeStruct((*indices.shape[:-1], 1), indices.dtype)
        with compat.as_user_code(eqn):
            closed = jax.make_jaxpr(run)(operand, updates, *[part] * len(kept))
        return closed, (operands[0], *operands[2:], *kept)


def _counting(
    numbers: Any,
    shape: Sequence[int],
    index_shape: Sequence[int],
    parts: Sequence[Any],
    along: Mapping[Any, int],
) -> dict[int, int]:
    """The parts of the indices that count along one of their own dimensions, as long
    as the dimension of the operand that they index; each with its dimension."""
    dropped, indexed, _, batching = (
        getattr(numbers, f) for f in _FIELDS[type(numbers)]
    )
    found: dict[int, int] = {}
    for k, part in enumerate(parts):
        dim = along.get(part)
        if dim is None or dim in (*batching, *found.values(), len(index_shape) - 1):
            continue
        if indexed[k] in dropped and shape[indexed[k]] == index_shape[dim]:
            found[k] = dim
    return found


def _with(numbers: Any, counting: Mapping[int, int]) -> Any:
    """`numbers` with the parts in `counting` made batching dimensions."""
    names = _FIELDS[type(numbers)]
    dropped, indexed, batch, batching = (getattr(numbers, name) for name in names)
    new = {indexed[k]: dim for k, dim in counting.items()}
    pairs = sorted({**dict(zip(batch, batching, strict=True)), **new}.items())
    values = (
        tuple(d for d in dropped if d not in new),
        tuple(d for d in indexed if d not in new),
        tuple(d for d, _ in pairs),
        tuple(dim for _, dim in pairs),
    )
    return numbers._replace(**dict(zip(names, values, strict=True)))


def _known(constant: Any) -> np.ndarray | None:
    """The values of captured booleans or integers, unless they are still to be computed
    or lie on devices of other processes.

    Nothing is asked of the array itself: a step may be planned while its caller is
    traced, and what JAX computes then has no values.
    """
    dtype, size = getattr(constant, "dtype", None), getattr(constant, "size", 0)
    if not size or not (dtype == jnp.bool_ or _is_integer(dtype)):
        return None
    if compat.is_traced(constant):
        return None
    if isinstance(constant, jax.Array) and not constant.is_fully_addressable:
        return None
    return np.asarray(constant)


def _aval(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _shape(eqn: JaxprEqn, operand: int) -> tuple[int, ...]:
    return _aval(eqn.invars[operand]).shape


def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer)


def _counts_to(dtype: Any, size: int) -> bool:
    """Whether integers of this dtype count `size` elements without a repeat."""
    return _is_integer(dtype) and size - 1 <= jnp.iinfo(dtype).max


def _is_zero(atom: Atom) -> bool:
    if not isinstance(atom, Literal):
        return False
    value = np.asarray(atom.val)
    return value.ndim == 0 and bool(value == 0)
