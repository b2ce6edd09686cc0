"""Op sharding rules: what may be split in an operation, as a frozen value.

In: a `JaxprEqn`. Out: its `OpShardingRule`, from the registry, one per primitive. A
rule names one *factor* per dimension, as in Shardy: equal names are split together.
`propagate` reads a rule to choose what is split, `emit` to make the op local.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive

from shardfn._core import compat
from shardfn._core.errors import where
from shardfn._core.sharding import flat_start

Dim = tuple[str, ...]
"""The factors that one dimension is made of, major to minor; usually one."""

REDUCERS = ("sum", "max", "min", "prod", "and", "or")


@dataclass(frozen=True, slots=True)
class OpShardingRule:
    """What may be split in one operation.

    Attributes:
      operands: per operand and dimension, the factors it is made of.
      results: the same for the results.
      sizes: `(factor, size)` for every factor.
      reduce: `(factor, reducer)`: with the factor split, results are unreduced.
      whole: factors that must not be split.
      linear: groups of operands. The op is linear in the operands of a group taken
        together, the others held fixed: unreduced terms may pass through.
      flat: the op may run on blocks of the flattened operands (elementwise ops, and
        reductions of every dimension).
      picks: the sums that `reduce` names have one term, on the device that holds the
        element, and zeros.
      shifts: `(factor, rows)`: with the factor split, the operands that have it are
        needed in blocks that begin so many rows earlier, around the ends.
      regroups: the op may run on blocks of the minor one of two factors of an operand's
        dimension, the blocks of each run of it one after the other.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: tuple[tuple[str, int], ...]
    reduce: tuple[tuple[str, str], ...] = ()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    flat: bool = False
    picks: bool = False
    shifts: tuple[tuple[str, int], ...] = ()
    regroups: bool = False

    def size(self, factor: str) -> int:
        """Elements of `factor`."""
        return dict(self.sizes)[factor]

    def reducer(self, factor: str) -> str | None:
        """How `factor` is reduced, or None if it is not."""
        return dict(self.reduce).get(factor)

    def major(
        self, dims: tuple[Dim, ...], dim: int, filled: frozenset[str] = frozenset()
    ) -> str | None:
        """The factor whose blocks are contiguous blocks of dimension `dim`.

        Args:
          dims: the factors of an operand or result.
          dim: the dimension.
          filled: factors that more major mesh axes split down to single elements.

        Returns:
          The factor, or None if none is left.
        """
        return _major(dims[dim], dict(self.sizes), filled)

    def dim_of(self, dims: tuple[Dim, ...], factor: str) -> int | None:
        """The dimension in which `factor` stands, or None."""
        return next((d for d, dim in enumerate(dims) if factor in dim), None)

    def is_splittable(self, factor: str, filled: frozenset[str] = frozenset()) -> bool:
        """Whether a block of `factor` is a block of every dimension it stands in, the
        factors in `filled` being split down to single elements already."""
        if factor in self.whole:
            return False
        sizes = dict(self.sizes)
        for dims in (*self.operands, *self.results):
            for dim in dims:
                if factor in dim and _major(dim, sizes, filled) != factor:
                    return False
        reduced = self.reducer(factor) is not None
        return reduced or all(
            self.dim_of(dims, factor) is not None for dims in self.results
        )

    def stands_alone(self, factor: str) -> bool:
        """Whether no dimension mixes `factor` with others, and no rows move along it:
        its blocks may be padded."""
        if factor in dict(self.shifts):
            return False
        sizes = dict(self.sizes)
        return all(
            factor not in dim or all(f == factor or sizes[f] == 1 for f in dim)
            for dims in (*self.operands, *self.results)
            for dim in dims
        )

    def __str__(self) -> str:
        def value(dims: tuple[Dim, ...]) -> str:
            return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)

        text = ", ".join(map(value, self.operands))
        text = f"{text} -> {', '.join(map(value, self.results))}"
        if self.reduce:
            names = (f if op == "sum" else f"{f}:{op}" for f, op in self.reduce)
            text += f"  reduce={{{', '.join(names)}}}"
        if self.whole:
            text += f"  whole={{{', '.join(sorted(self.whole))}}}"
        if self.shifts:
            names = (f"{f}: {rows}" for f, rows in self.shifts)
            text += f"  shift={{{', '.join(names)}}}"
        return text.strip()


def _major(dim: Dim, sizes: Mapping[str, int], filled: frozenset[str]) -> str | None:
    for factor in dim:
        if sizes[factor] != 1 and factor not in filled:
            return factor
    return None


def factor_names(count: int, start: int = 0) -> tuple[str, ...]:
    """Makes different factor names: a, b, ..., z, a1, b1, ...

    Args:
      count: how many.
      start: how many names at the beginning to leave out.

    Returns:
      The names.
    """
    return tuple(
        chr(ord("a") + i % 26) + (str(i // 26) if i >= 26 else "")
        for i in range(start, start + count)
    )


def make_rule(
    eqn: JaxprEqn,
    operands: Iterable[Sequence[str | Dim]],
    results: Iterable[Sequence[str | Dim]],
    *,
    sizes: Mapping[str, int] | None = None,
    reduce: Mapping[str, str] | Iterable[str] = (),
    whole: Iterable[str] = (),
    linear: str | Iterable[Iterable[int]] = (),
    flat: bool = False,
    picks: bool = False,
    shifts: Mapping[str, int] | None = None,
    regroups: bool = False,
) -> OpShardingRule:
    """Builds the rule of `eqn`, filling in factor sizes from its shapes.

    Args:
      eqn: the equation.
      operands: per operand and dimension, a factor, or factors from major to minor.
      results: the same for the results.
      sizes: sizes of factors that share a dimension with others.
      reduce: factors that the op sums over, or a mapping from factor to reducer.
      whole: factors that must not be split.
      linear: "each" if the op is linear in every operand by itself, "all" if it is
        linear in all operands together, or the groups of operand positions. Groups
        whose dtypes cannot be summed, such as booleans and keys, are left out.
      flat: whether blocks of the flattened operands give blocks of flattened results.
      picks: whether `reduce` sums one term with zeros: bits then stay as they are.
      shifts: how many rows before its own the blocks of a factor have to begin.
      regroups: whether the minor of two factors of a dimension may be split.

    Returns:
      The frozen rule.

    Raises:
      ValueError: the factors do not fit the shapes of `eqn`.
    """
    norm = [
        tuple(tuple((d,) if isinstance(d, str) else tuple(d) for d in v) for v in side)
        for side in (operands, results)
    ]
    known = _sizes(eqn, norm, sizes or {})
    pairs = reduce if isinstance(reduce, Mapping) else dict.fromkeys(reduce, "sum")
    return OpShardingRule(
        operands=norm[0],
        results=norm[1],
        sizes=tuple(known.items()),
        reduce=tuple(pairs.items()),
        whole=frozenset(whole),
        linear=tuple(g for g in _groups(linear, len(norm[0])) if _can_sum(eqn, g)),
        flat=flat,
        picks=picks,
        shifts=tuple((shifts or {}).items()),
        regroups=regroups,
    )


def _sizes(
    eqn: JaxprEqn, sides: Sequence[Sequence[tuple[Dim, ...]]], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The size of each factor; raises if they do not fit the values of `eqn`."""
    known = dict(sizes)
    for side, values, what in zip(
        sides, (eqn.invars, eqn.outvars), ("operand", "result"), strict=True
    ):
        if len(side) != len(values):
            _misfit(eqn, f"{len(side)} {what}s, where it has {len(values)}")
        for i, (dims, var) in enumerate(zip(side, values, strict=True)):
            shape = getattr(var.aval, "shape", ())
            named = f"{_written(dims)} for {what} {i} of shape {shape}"
            if len(dims) != len(shape):
                _misfit(eqn, named)
            for dim, size in zip(dims, shape, strict=True):
                if len(dim) == 1:
                    known.setdefault(dim[0], size)
                if math.prod(known.get(f, 0) for f in dim) != size:
                    _misfit(eqn, f"{named}, with factors of size {known}")
    return known


def _written(dims: tuple[Dim, ...]) -> str:
    return f"({', '.join('*'.join(dim) for dim in dims)})"


def _misfit(eqn: JaxprEqn, what: str) -> NoReturn:
    raise ValueError(
        f"the rule of primitive '{eqn.primitive}' names {what}.\n  at {where(eqn)}\n"
        "A rule names one factor per dimension, or several whose sizes multiply to it, "
        "and a factor has one size everywhere: see make_rule."
    )


def _groups(linear: str | Iterable[Iterable[int]], count: int) -> list[frozenset[int]]:
    if linear == "each":
        return [frozenset([i]) for i in range(count)]
    if linear == "all":
        return [frozenset(range(count))] if count else []
    return [frozenset(group) for group in linear if not isinstance(group, str)]


def _can_sum(eqn: JaxprEqn, group: Iterable[int]) -> bool:
    """Whether sums of these operands are sums of the results, for their dtypes.

    Booleans and keys have no sum. Integers wrap around, at another bound when widened.
    """
    dtypes: set[Any] = {getattr(eqn.invars[i].aval, "dtype", None) for i in group}
    results: set[Any] = {getattr(var.aval, "dtype", None) for var in eqn.outvars}
    if None in dtypes | results:
        return False
    exact = any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes)
    numbers = all(jnp.issubdtype(dtype, jnp.number) for dtype in dtypes | results)
    return numbers and (dtypes == results or not exact)


def flat_factor(dim: int) -> str:
    """The factor `*k` that stands for all dimensions from `k` on, for `dim=flat(k)`."""
    return f"*{flat_start(dim)}"


def is_flat_factor(factor: str) -> bool:
    return factor.startswith("*")


def flat_factor_start(factor: str) -> int:
    """The `k` of the factor `*k`."""
    return int(factor[1:])


@dataclass(frozen=True, slots=True)
class LocalOp:
    """One equation as one device runs it: the equation, its rule, and what is split.

    Attributes:
      eqn: the equation as traced, on global shapes.
      rule: its rule.
      parts: `(factor, (axis name, ...), number of blocks)` for every split factor; the
        factor is `*k` when the dimensions from `k` on are flattened and split.
      result_shapes: local shapes of the results.
    """

    eqn: JaxprEqn
    rule: OpShardingRule
    parts: tuple[tuple[str, tuple[str, ...], int], ...]
    result_shapes: tuple[tuple[int, ...], ...]

    def bind(self, *operands: jax.Array, **params: Any) -> Sequence[jax.Array]:
        """Runs the primitive on local operands, some parameters replaced."""
        operands = tuple(compat.varying_alike(operands))
        out = self.eqn.primitive.bind(*operands, **{**self.eqn.params, **params})
        return out if self.eqn.primitive.multiple_results else [out]

    def size(self, factor: str) -> int:
        """Local size of `factor`."""
        for name, _, count in self.parts:
            if name == factor:
                return -(-self.rule.size(factor) // count)
        return self.rule.size(factor)

    def local_size(self, dim: Dim) -> int:
        """Local size of a dimension made of these factors."""
        return math.prod(map(self.size, dim))

    def start(self, factor: str) -> jax.Array | int:
        """Global index of this device's first element of `factor`; 0 if it is whole."""
        for name, axis_names, _ in self.parts:
            if name == factor:
                return jax.lax.axis_index(axis_names) * self.size(factor)
        return 0

    @property
    def is_flat(self) -> bool:
        """Whether the operands are blocks of flattened arrays."""
        return any(is_flat_factor(name) for name, _, _ in self.parts)

    @property
    def flat_axes(self) -> tuple[int, ...]:
        """All dimensions of the local operands, where those are flattened."""
        (start,) = (flat_factor_start(name) for name, _, _ in self.parts)
        return tuple(range(start + 1))


RuleFn = Callable[[JaxprEqn], OpShardingRule]
LocalFn = Callable[..., Sequence[jax.Array]]


@dataclass(frozen=True, slots=True)
class _Entry:
    rule: RuleFn
    local: LocalFn


_registry: dict[Primitive, _Entry] = {}


def register_rule(
    *primitives: Primitive, local: LocalFn = LocalOp.bind
) -> Callable[[RuleFn], RuleFn]:
    """Registers the op sharding rule of some primitives.

    Args:
      primitives: the primitives that share the rule.
      local: how one device runs the op, `(op: LocalOp, *local_operands) -> results`.
        The default binds the primitive with unchanged parameters; give one if a
        parameter spells out a shape or the result depends on where the block lies.

    Returns:
      A decorator for a function from an equation to its `OpShardingRule`.

    Example:
      >>> from jax.extend.core import Primitive
      >>> distances_p = Primitive("distances")  # [B, D], [N, D] -> [B, N]
      >>> @register_rule(distances_p)
      ... def rule(eqn):
      ...     return make_rule(eqn, ["bd", "nd"], ["bn"], reduce="d")
    """

    def register(rule: RuleFn) -> RuleFn:
        for primitive in primitives:
            _registry[primitive] = _Entry(rule, local)
        return rule

    return register


def rule_of(eqn: JaxprEqn) -> OpShardingRule | None:
    """Looks up what is registered.

    Args:
      eqn: an equation, such as one of `jax.make_jaxpr(f)(x).eqns`.

    Returns:
      The rule of the equation, or None if its primitive has none.
    """
    entry = _registry.get(eqn.primitive)
    return entry.rule(eqn) if entry else None


def run_local(op: LocalOp, *operands: jax.Array) -> Sequence[jax.Array]:
    """Runs one op on one device's blocks."""
    return _registry[op.eqn.primitive].local(op, *operands)


__all__ = [
    "LocalOp",
    "OpShardingRule",
    "factor_names",
    "make_rule",
    "register_rule",
    "rule_of",
]
