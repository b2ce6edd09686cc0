"""Brute force for op sharding rules: every split of an op against the unsharded op.

In: a function that makes one equation, and its arguments. Out: nothing, or an
AssertionError that names the factor, group or dimension whose rule is wrong or missing.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec as P

import shardfn.rules  # noqa: F401
from shardfn._core.compat import (
    CUSTOM,
    inlined_body,
    open_jaxpr,
    rebind,
    varying_axes,
)
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.rule_registry import LocalOp, rule_of, run_local

Value = Any
COMBINE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "prod": lambda x: x.prod(0, dtype=x.dtype),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "and": lambda x: np.bitwise_and.reduce(x),
    "or": lambda x: np.bitwise_or.reduce(x),
}


def integers(shape: Sequence[int], dtype: Any = jnp.float32, seed: int = 0) -> Value:
    """Small non-zero integers, so that float32 sums and products are exact."""
    rng = np.random.default_rng([seed, *shape])
    low = 1 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -3
    values = rng.integers(low, 4, shape)
    return np.where(values == 0, 2, values).astype(dtype)


def equation_of(
    fn: Callable[..., Any], *args: Value, name: str | None = None
) -> tuple[JaxprEqn, list[Value]]:
    """The only equation of `fn` (or the only one called `name`) and its operands."""
    closed = jax.make_jaxpr(fn)(*args)
    found = [
        (e, v) for e, v in _evaluated(closed, args) if name in (None, str(e.primitive))
    ]
    assert len(found) == 1, [str(e.primitive) for e, _ in found]
    return found[0]


def _evaluated(
    closed: Any, args: Sequence[Value]
) -> Iterator[tuple[JaxprEqn, list[Value]]]:
    """Every equation with the values of its operands; bodies of calls are entered."""
    jaxpr, consts = open_jaxpr(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [
            np.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else env[a]
            for a in eqn.invars
        ]
        body = (
            eqn.params["call_jaxpr"]
            if eqn.primitive.name in CUSTOM
            else inlined_body(eqn)
        )
        if body is None:
            yield eqn, values
        else:
            yield from _evaluated(body, values)
        env.update(zip(eqn.outvars, evaluate(eqn, values), strict=True))


@functools.cache
def _compiled(eqn: JaxprEqn) -> Callable[..., Any]:
    return jax.jit(lambda *v: rebind(eqn, *v))


def evaluate(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """The results of one equation on one device."""
    out = _compiled(eqn)(*values)
    out = out if eqn.primitive.multiple_results else [out]
    return [x if _is_key(x) else np.asarray(x) for x in out]


@dataclasses.dataclass(frozen=True)
class Split:
    """One way to split an op: a factor, or "" for the flattened values."""

    eqn: JaxprEqn
    rule: OpShardingRule
    factor: str
    devices: int

    @property
    def reducer(self) -> str | None:
        if self.factor:
            return self.rule.reducer(self.factor)
        ops = {op for _, op in self.rule.reduce}
        return ops.pop() if ops else None

    @property
    def axes(self) -> tuple[str, ...]:
        return ("x", "y") if self.devices == 4 else ("x",)

    def spec(self, dim: int | None) -> P:
        return P() if dim is None else P(*[None] * dim, self.axes)

    def vary(self, x: Value) -> Value:
        missing = tuple(a for a in self.axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    def dim(self, dims: Sequence[tuple[str, ...]]) -> int | None:
        if self.factor:
            return self.rule.dim_of(tuple(dims), self.factor)
        return 0 if dims else None

    def local_shape(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        if not self.factor and dim is not None:
            shape = (math.prod(shape),)
        return tuple(
            -(-n // self.devices) if d == dim else n for d, n in enumerate(shape)
        )

    def inputs(self, values: Sequence[Value]) -> list[Value]:
        """Operands as global arrays: what is split is padded, terms have a new axis."""
        return [self._input(i, x) for i, x in enumerate(values)]

    def _input(self, i: int, x: Value) -> Value:
        dim = self.dim(self.rule.operands[i])
        if dim is not None:
            x = x if self.factor else x.reshape(-1)
            rows = dict(self.rule.shifts).get(self.factor, 0)
            x = np.roll(x, rows, dim) if rows else x
            size = -(-x.shape[dim] // self.devices) * self.devices
            return padded(x, dim, size, self.reducer)
        if self.is_term(i):
            return np.stack([x, *[np.zeros_like(x)] * (self.devices - 1)])
        return x

    def is_term(self, i: int) -> bool:
        """Whether operand i is added to operands that have a summed factor."""
        if self.reducer != "sum" or self.dim(self.rule.operands[i]) is not None:
            return False
        return any(
            i in group
            and any(self.dim(self.rule.operands[j]) is not None for j in group)
            for group in self.rule.linear
        )

    def has_terms(self, dim: int | None) -> bool:
        """Whether each device has a term of a result that is split along `dim`."""
        return self.reducer is not None and (dim is None or not self.factor)

    def run(self, *inputs: Value) -> list[Value]:
        """Runs every block in shard_map; results that are terms get a leading axis."""
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
        operand_dims = [self.dim(dims) for dims in self.rule.operands]
        result_dims = [self.dim(dims) for dims in self.rule.results]
        shapes = tuple(
            self.local_shape(var.aval.shape, dim)
            for var, dim in zip(self.eqn.outvars, result_dims, strict=True)
        )
        parts = ((self.factor or "*0", self.axes, self.devices),)
        op = LocalOp(self.eqn, self.rule, parts, shapes)

        def body(*blocks: Value) -> list[Value]:
            blocks = [
                x[0] if self.is_term(i) else x
                for i, x in enumerate(map(self.vary, blocks))
            ]
            results = [self.vary(x) for x in run_local(op, *blocks)]
            for x, shape in zip(results, shapes, strict=True):
                assert x.shape == shape, f"local shape {x.shape}, expected {shape}"
            return [
                x[None] if self.has_terms(dim) else x
                for x, dim in zip(results, result_dims, strict=True)
            ]

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(
                self.spec(0 if self.is_term(i) else dim)
                for i, dim in enumerate(operand_dims)
            ),
            out_specs=[self.spec(0 if self.has_terms(d) else d) for d in result_dims],
        )(*inputs)

    def whole(self, results: Sequence[Value]) -> list[np.ndarray]:
        """The results of `run` without padding, terms combined."""
        out = []
        for x, dims, var in zip(
            results, self.rule.results, self.eqn.outvars, strict=True
        ):
            shape, dim = var.aval.shape, self.dim(dims)
            x = as_numpy(x)
            if self.has_terms(dim):
                x = COMBINE[self.reducer or "sum"](x)
            elif self.factor:
                x = np.take(x, range(shape[dim]), axis=dim)
            else:
                x = x[: math.prod(shape)].reshape(shape + x.shape[1:])
            out.append(x)
        return out


def padded(x: Value, dim: int, size: int, reducer: str | None) -> Value:
    """`x` padded along `dim`: with garbage, or with what `reducer` ignores."""
    extra = size - x.shape[dim]
    if not extra:
        return x
    if _is_key(x):
        return jnp.concatenate([x, lax.slice_in_dim(x, 0, extra, axis=dim)], dim)
    shape = [extra if d == dim else n for d, n in enumerate(x.shape)]
    fill = _neutral(reducer, x.dtype) if reducer else _garbage(x.dtype)
    return np.concatenate([x, np.full(shape, fill, x.dtype)], dim)


def _garbage(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return True
    return np.nan if jnp.issubdtype(dtype, jnp.inexact) else 97


def _neutral(reducer: str, dtype: Any) -> Any:
    if reducer in ("sum", "or"):
        return 0
    if reducer == "prod":
        return 1
    if reducer == "and":
        return True if dtype == jnp.bool_ else -1
    floats = jnp.issubdtype(dtype, jnp.inexact)
    info = jnp.finfo(dtype) if floats else jnp.iinfo(dtype)
    return info.min if reducer == "max" else info.max


def _is_key(x: Value) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_numpy(x: Value) -> np.ndarray:
    x = np.asarray(jax.random.key_data(x) if _is_key(x) else x)
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x


def same(a: np.ndarray, b: np.ndarray, rtol: float = 0) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not np.issubdtype(a.dtype, np.inexact):
        return np.array_equal(a, b)
    return np.allclose(a, b, rtol=rtol, atol=rtol, equal_nan=True)


def splits_of(eqn: JaxprEqn, rule: OpShardingRule) -> list[Split]:
    """Every factor that may be split, over four devices (padded) or at least two."""
    splits = []
    for factor, size in rule.sizes:
        if size < 2 or not rule.is_splittable(factor):
            continue
        if size % 4 == 0 or rule.stands_alone(factor):
            splits.append(Split(eqn, rule, factor, 4))
        elif size % 2 == 0:
            splits.append(Split(eqn, rule, factor, 2))
    if rule.flat and any(dims for dims in (*rule.operands, *rule.results)):
        splits.append(Split(eqn, rule, "", 4))
    return splits


def assert_every_factor_matches_unsharded(
    eqn: JaxprEqn, values: Sequence[Value], rtol: float = 0
) -> None:
    """Every split of `eqn`, padding included, gives the results of the unsharded op."""
    assert_all_match_unsharded([(eqn, values)], rtol)


def assert_all_match_unsharded(
    cases: Sequence[tuple[JaxprEqn, Sequence[Value]]], rtol: float = 0
) -> None:
    """The same for several equations, whose splits are compiled as one program."""
    splits = [(s, v) for eqn, v in cases for s in splits_of(eqn, rule_of(eqn))]
    run = jax.jit(lambda xs: [s.run(*x) for (s, _), x in zip(splits, xs, strict=True)])
    results = iter(run([s.inputs(values) for s, values in splits]))
    for eqn, values in cases:
        expected = [as_numpy(x) for x in evaluate(eqn, values)]
        refuse_zeros(values, expected)
        for split in splits_of(eqn, rule_of(eqn)):
            for got, want in zip(split.whole(next(results)), expected, strict=True):
                assert same(got, want, rtol), (
                    f"{eqn.primitive}: factor {split.factor!r} of '{split.rule}' over "
                    f"{split.devices} devices gives\n{got}\nexpected\n{want}"
                )


def refuse_zeros(values: Sequence[Value], expected: Sequence[np.ndarray]) -> None:
    """Zeros hide wrong rules: most wrong sums of zeros are right."""
    floats = [as_numpy(x) for x in values if jnp.issubdtype(x.dtype, jnp.inexact)]
    arrays = [x for x in (*floats, *expected) if x.size > 1]
    assert all(x.any() for x in arrays), "the test's data are all zero"
