"""The op sharding rule of a whole function: what may be split in all of its operations.

In: a jaxpr. Out: factors of its arguments and results, which stay what they are from
operation to operation. A factor may be summed over once, if what follows is linear.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal

from shardfn._core import compat
from shardfn._core.equation_key import literal_key
from shardfn._core.errors import nested
from shardfn._core.op_sharding_rule import Dim, OpShardingRule, factor_names
from shardfn._core.rule_registry import rule_of

_PLACED = compat.primitives(
    *("iota", "gather", "pad", "dynamic_update_slice", "random_bits", "random_split"),
    *("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "tile"),
)
"""Operations whose results depend on where a block lies: what they read or make stays
whole."""

_CUT = compat.primitives("slice", "dynamic_slice", "concatenate", "split")
"""The same of the dimensions that they change."""


Traced = Callable[[Sequence[Any]], Any]
"""Traces a function of arrays like these."""


def composed_rule(trace: Traced, avals: Sequence[Any]) -> OpShardingRule:
    """The rule of a function.

    A factor stays whole if the function, traced with twice as many elements of it, does
    anything else: a mean divides by a number of elements, and one of a block by that of
    the block.

    Args:
      trace: traces the function.
      avals: of its arguments.

    Returns:
      A rule with a factor for each dimension, those that not all operations let be
      split being whole. Blocks of factors that are summed over are not padded.
    """
    closed, composer = trace(avals), _Composer()
    inputs = [composer.fresh(v.aval) for v in compat.open_jaxpr(closed)[0].invars]
    composer.arguments = inputs
    rule = composer.rule(inputs, composer.run(closed, inputs))
    by_size = {
        factor
        for factor, size in rule.sizes
        if size > 1 and factor not in rule.whole
        if not _is_alike_on_blocks(trace, rule, factor, closed, avals)
    }
    kept = tuple(pair for pair in rule.reduce if pair[0] not in by_size)
    return replace(rule, whole=rule.whole | by_size, reduce=kept)


def _is_alike_on_blocks(
    trace: Traced, rule: OpShardingRule, factor: str, closed: Any, avals: Sequence[Any]
) -> bool:
    """Whether the function does the same with twice as many elements of a factor, and
    returns as many more."""

    def doubled(values: Sequence[Any], sides: Sequence[tuple[Dim, ...]]) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(
                tuple(
                    size * (2 if factor in dim else 1)
                    for size, dim in zip(x.shape, dims, strict=True)
                ),
                x.dtype,
            )
            for x, dims in zip(values, sides, strict=True)
        ]

    try:
        other = trace(doubled(avals, rule.operands))
    except Exception:  # of the user's: shapes that it does not take
        return False
    expected = doubled(closed.out_avals, rule.results)
    shapes = [x.shape for x in other.out_avals] == [x.shape for x in expected]
    return shapes and _constants(other) == _constants(closed)


def _constants(jaxpr: Any) -> list[Any]:
    """What a jaxpr does: its operations, and the numbers that are written in it."""
    return [
        (
            eqns[-1].primitive.name,
            *(literal_key(a) for a in eqns[-1].invars if isinstance(a, Literal)),
        )
        for eqns in nested(jaxpr)
    ]


@dataclass(slots=True, eq=False)
class _Value:
    """A value: the factors of its dimensions, and those it is a term of a sum over."""

    dims: tuple[tuple[int, ...], ...]
    terms: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Composer:
    """Factors while they are found to be the same, or to have others in them.

    Attributes:
      sizes: of each factor.
      known_as: the factors that a factor was found to be, major to minor.
      whole: factors that must not be split.
      arguments: the values of the function's arguments.
      read: each value that an operation reads or the function returns, with the factor
        along whose groups it has the sizes, if it is read for these.
    """

    sizes: list[int] = field(default_factory=list)
    known_as: dict[int, tuple[int, ...]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    arguments: list[_Value] = field(default_factory=list)
    read: list[tuple[_Value, int | None]] = field(default_factory=list)

    def factor(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def fresh(self, aval: Any) -> _Value:
        shape = getattr(aval, "shape", ())
        return _Value(tuple((self.factor(size),) for size in shape))

    def found(self, factors: Iterable[int]) -> tuple[int, ...]:
        """What factors are known as by now, without those of one element."""
        out: list[int] = []
        for factor in factors:
            if factor in self.known_as:
                out += self.found(self.known_as[factor])
            elif self.sizes[factor] != 1:
                out.append(factor)
        return tuple(out)

    def keep_whole(self, factors: Iterable[int]) -> None:
        self.whole.update(self.found(factors))

    def is_whole(self, factor: int) -> bool:
        return any(factor in self.found((f,)) for f in self.whole)

    def same(self, a: Iterable[int], b: Iterable[int]) -> None:
        """Finds that two dimensions are the same; where they are cut at other places,
        both stay whole."""
        left, right = list(self.found(a)), list(self.found(b))
        while left and right:
            x, y = left.pop(0), right.pop(0)
            if x == y:
                continue
            if self.sizes[x] == self.sizes[y]:
                self.known_as[x] = (y,)
                continue
            small, large = sorted((x, y), key=self.sizes.__getitem__)
            rest, uneven = divmod(self.sizes[large], self.sizes[small])
            if uneven:
                self.keep_whole((x, y, *left, *right))
                return
            minor = self.factor(rest)
            self.known_as[large] = (small, minor)
            (left if large == x else right).insert(0, minor)

    def run(self, jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """The values that a jaxpr returns. What it has captured stays whole."""
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            env[var] = self.fresh(var.aval)
            self.keep_whole(f for dim in env[var].dims for f in dim)

        def read(atom: Any) -> _Value:
            return self.fresh(atom.aval) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            body = compat.inlined_body(eqn)
            if body is None and eqn.primitive.name in compat.CUSTOM:
                body = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
            if body is not None:
                out = self.run(body, operands)
            else:
                out = self.operation(eqn, operands)
            env.update(zip(eqn.outvars, out, strict=True))
        return list(map(read, jaxpr.outvars))

    def operation(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        rule, results = rule_of(eqn), [self.fresh(v.aval) for v in eqn.outvars]
        every = [*operands, *results]
        if rule is None or eqn.effects or eqn.primitive in _PLACED:
            self.keep_whole(f for v in every for dim in v.dims for f in dim)
            self.stop_sums(operands)
            self.read += [(value, None) for value in operands]
            return results
        own = {name: self.factor(size) for name, size in rule.sizes}
        along = {operand: own[name] for name, operand in rule.groups}
        self.read += [(value, along.get(i)) for i, value in enumerate(operands)]
        sides = (*rule.operands, *rule.results)
        for value, dims in zip(every, sides, strict=True):
            for mine, dim in zip(value.dims, dims, strict=True):
                self.same(mine, (own[name] for name in dim))
        stay = {*rule.whole, *dict(rule.shifts), *dict(rule.blocks)}
        if eqn.primitive in _CUT:
            stay |= _of_one_side(rule)
        stay |= {name for name, kind in rule.reduce if kind != "sum"}
        stay |= {n for n in own if not rule.is_splittable(n)}
        self.keep_whole(own[name] for name in stay)
        summed = [own[name] for name, kind in rule.reduce if kind == "sum"]
        passed = self.passed(rule, every, operands)
        for value in results:
            value.terms = passed.union(self.found(summed))
        return results

    def passed(
        self, rule: OpShardingRule, every: Sequence[_Value], operands: Sequence[_Value]
    ) -> frozenset[int]:
        """The sums whose terms the results are, as operands are."""
        having_terms = [frozenset(self.found(v.terms)) for v in operands]
        through: set[int] = set()
        for term in frozenset().union(*having_terms):
            having = frozenset(
                i for i, terms in enumerate(having_terms) if term in terms
            )
            split = any(term in self.found(dim) for v in every for dim in v.dims)
            if having in rule.linear and not split:
                through.add(term)
            else:
                self.keep_whole((term,))
        return frozenset(through)

    def groups(self) -> dict[int, int]:
        """The factors along which groups follow each other, and the argument that has
        their sizes and is read for nothing else. Others stay whole: what is computed
        from sizes need not be that of a block's."""
        groups: dict[int, int] = {}
        for sizes, factor in self.read:
            if factor is None or not (along := self.found((factor,))):
                continue
            uses = (f for value, f in self.read if value is sizes)
            for_groups = all(f is not None and self.found((f,)) == along for f in uses)
            at = next((i for i, v in enumerate(self.arguments) if v is sizes), None)
            known = groups.setdefault(along[0], -1 if at is None else at)
            if at is None or known != at or len(along) > 1 or not for_groups:
                self.keep_whole(along)
        return groups

    def stop_sums(self, values: Iterable[_Value]) -> None:
        for value in values:
            self.keep_whole(value.terms)

    def rule(
        self, inputs: Sequence[_Value], results: Sequence[_Value]
    ) -> OpShardingRule:
        dims = [[self.found(d) for d in v.dims] for v in (*inputs, *results)]
        used = list(dict.fromkeys(f for v in dims for d in v for f in d))
        names = dict(zip(used, factor_names(len(used)), strict=True))
        sums = [frozenset(self.found(v.terms)) for v in results]
        self.read += [(value, None) for value in results]
        groups = self.groups()
        outs = [{f for d in v for f in d} for v in dims[len(inputs) :]]
        whole, reduce = set(), []
        for factor in used:
            twice = any(
                sum(factor in d for d in v) > 1 or any(d.count(factor) > 1 for d in v)
                for v in dims
            )
            is_term = [factor in terms for terms in sums]
            stands = [factor in out for out in outs]
            each = all(a != b for a, b in zip(is_term, stands, strict=True))
            if self.is_whole(factor) or twice or not each:
                whole.add(names[factor])
            elif any(is_term):
                reduce.append((names[factor], "sum"))
        made = iter(dims)
        ones = {"one": 1} if any(not d for v in dims for d in v) else {}

        def side(values: Sequence[_Value]) -> tuple[tuple[Dim, ...], ...]:
            return tuple(
                tuple(tuple(names[f] for f in d) or (*ones,) for d in next(made))
                for _ in values
            )

        operands, made_dims = side(inputs), side(results)
        sizes = {names[f]: self.sizes[f] for f in used} | ones
        return OpShardingRule(
            operands=operands,
            results=made_dims,
            sizes=tuple(sizes.items()),
            reduce=tuple(reduce),
            whole=frozenset(whole) | frozenset(ones),
            groups=tuple((names[f], i) for f, i in groups.items() if f in names),
            blocks=tuple((name, 1) for name, _ in reduce),
        )


def _of_one_side(rule: OpShardingRule) -> set[str]:
    """The factors that only operands have, or only results."""
    read = {f for v in rule.operands for d in v for f in d}
    made = {f for v in rule.results for d in v for f in d}
    return read ^ made
