"""Are rules as permissive as they can be? Tries what they forbid.

In: an equation and its operands. Out: the factors that are whole though naive splitting
works, and the groups of operands that are (or are not) linear.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Split, Value, as_numpy, evaluate, same
from jax.extend.core import JaxprEqn

from shardfn._core.op_sharding_rule import REDUCERS, OpShardingRule
from shardfn._core.rule_registry import rule_of


def needlessly_whole(eqn: JaxprEqn, values: Sequence[Value]) -> list[str]:
    """`factor` or `factor:reducer` of the whole factors that can be split after all."""
    rule, programs = rule_of(eqn), Programs()
    expected = [as_numpy(x) for x in evaluate(eqn, values)]
    return [
        name
        for factor in sorted(rule.whole)
        for name, freed in _freed(rule, factor)
        if _works(eqn, freed, factor, values, expected, programs)
    ]


class Programs:
    """What is compiled once: rules that only differ in their reducer run the same."""

    def __init__(self) -> None:
        self.compiled = dict[str, Any]()

    def run(self, lowered: Any, inputs: Sequence[Value]) -> list[Value]:
        text = lowered.as_text()
        if text not in self.compiled:
            self.compiled[text] = lowered.compile()
        return self.compiled[text](*inputs)


def _freed(rule: OpShardingRule, factor: str) -> list[tuple[str, OpShardingRule]]:
    """Rules that allow `factor` to be split, if its place in the results does."""
    freed = dataclasses.replace(rule, whole=rule.whole - {factor})
    standing = [rule.dim_of(dims, factor) is not None for dims in rule.results]
    if all(standing):
        return [(factor, freed)]
    if any(standing):
        return []
    return [
        (
            f"{factor}:{op}",
            dataclasses.replace(freed, reduce=(*rule.reduce, (factor, op))),
        )
        for op in REDUCERS
    ]


def _works(
    eqn: JaxprEqn,
    rule: OpShardingRule,
    factor: str,
    values: Sequence[Value],
    expected: Sequence[np.ndarray],
    programs: Programs,
) -> bool:
    size = rule.size(factor)
    devices = next((n for n in (4, 2) if size % n == 0), 0)
    if not devices or not rule.is_splittable(factor):
        return False
    split = Split(eqn, rule, factor, devices)
    try:
        inputs = split.inputs(values)
        lowered = jax.jit(split.run).lower(*inputs)
    except Exception:  # noqa: BLE001
        return False
    ran = programs.run(lowered, inputs)
    try:
        results = split.whole(ran)
    except TypeError:  # "and" and "or" combine no floats
        return False
    return all(same(a, b) for a, b in zip(results, expected, strict=True))


def wrongly_linear(
    eqn: JaxprEqn, values: Sequence[Value], rtol: float = 0
) -> list[frozenset[int]]:
    """The groups of operands that the rule calls linear and that are not."""
    rule = rule_of(eqn)
    return [g for g in rule.linear if not is_linear(eqn, values, g, rtol, integer=True)]


def needlessly_nonlinear(eqn: JaxprEqn, values: Sequence[Value]) -> list[int]:
    """The floating-point operands in which the op is linear though in no group."""
    rule = rule_of(eqn)
    numbers = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.outvars]
    grouped = frozenset().union(*rule.linear)
    return [
        i
        for i, x in enumerate(values)
        if all(numbers)
        and i not in grouped
        and jnp.issubdtype(x.dtype, jnp.inexact)
        and x.size
        and is_linear(eqn, values, {i}, 1e-4, integer=False)
    ]


def is_linear(
    eqn: JaxprEqn,
    values: Sequence[Value],
    group: frozenset[int] | set[int],
    rtol: float,
    *,
    integer: bool,
) -> bool:
    """Whether the op on three summed terms is the sum of the op on each term.

    Signs are mixed unless integers are asked for, and a result without one finite
    number shows nothing.
    """
    rng = np.random.default_rng(7)
    terms = [list(values) for _ in range(3)]
    total = list(values)
    for i in group:
        shape, dtype = jnp.shape(values[i]), values[i].dtype
        for term in terms:
            real = rng.uniform(0.3, 0.9, shape) * rng.choice([-1, 1], shape)
            draw = rng.integers(1, 5, shape) if integer else real
            term[i] = np.asarray(draw).astype(dtype)
        total[i] = sum(term[i] for term in terms[1:]) + terms[0][i]
    at_sum = [as_numpy(x) for x in evaluate(eqn, total)]
    each = zip(*(map(as_numpy, evaluate(eqn, term)) for term in terms), strict=True)
    return any(np.isfinite(a).any() for a in at_sum) and all(
        same(a, np.sum(t, axis=0, dtype=a.dtype), rtol)
        for a, t in zip(at_sum, each, strict=True)
    )
