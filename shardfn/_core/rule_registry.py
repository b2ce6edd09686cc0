"""The op sharding rules of all primitives.

In: a `JaxprEqn`. Out: its rule, one per primitive, and how one device runs the op.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive

from shardfn._core import compat
from shardfn._core.op_sharding_rule import (
    Dim,
    OpShardingRule,
    flat_factor_start,
    is_flat_factor,
)


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

    def with_own_groups(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands, with the sizes that groups have in this device's block."""
        own = list(operands)
        for factor, i in self.rule.groups:
            start = self.start(factor)
            if isinstance(start, int):
                continue
            sizes = own[i].astype(np.int32)
            ends = jnp.cumsum(sizes, axis=-1) - start
            inside = jnp.clip(jnp.stack([ends - sizes, ends]), 0, self.size(factor))
            own[i] = (inside[1] - inside[0]).astype(own[i].dtype)
        return own

    @property
    def is_flat(self) -> bool:
        """Whether the operands are blocks of flattened arrays."""
        return any(is_flat_factor(name) for name, _, _ in self.parts)

    @property
    def flat_axes(self) -> tuple[int, ...]:
        """All dimensions of the local operands, where those are flattened."""
        (start,) = (flat_factor_start(name) for name, _, _ in self.parts)
        return tuple(range(start + 1))


RuleFn = Callable[[JaxprEqn], OpShardingRule | None]
"""The rule of an equation; None of one that has to see all of its operands."""

AnyRule = TypeVar("AnyRule", bound=RuleFn)


LocalFn = Callable[..., Sequence[jax.Array]]


@dataclass(frozen=True, slots=True)
class _Entry:
    rule: RuleFn
    local: LocalFn


_registry: dict[Primitive, _Entry] = {}
_by_name: dict[str, _Entry] = {}
"""Those of primitives in modules of JAX that nobody may have imported."""


def register_rule(
    *primitives: Primitive, local: LocalFn = LocalOp.bind
) -> Callable[[AnyRule], AnyRule]:
    """Registers the op sharding rule of some primitives.

    Args:
      primitives: the primitives that share the rule.
      local: how one device runs the op, `(op: LocalOp, *local_operands) -> results`.
        The default binds the primitive with unchanged parameters; give one if a
        parameter spells out a shape or the result depends on where the block lies.

    Returns:
      A decorator for a function from an equation to its `OpShardingRule`; or to None,
      and the equation runs on whole operands.

    Example:
      >>> from jax.extend.core import Primitive
      >>> distances_p = Primitive("distances")  # [B, D], [N, D] -> [B, N]
      >>> @register_rule(distances_p)
      ... def rule(eqn):
      ...     return make_rule(eqn, ["bd", "nd"], ["bn"], reduce="d")
    """

    def register(rule: AnyRule) -> AnyRule:
        for primitive in primitives:
            _registry[primitive] = _Entry(rule, local)
        return rule

    return register


def register_rule_of(
    name: str, local: LocalFn = LocalOp.bind
) -> Callable[[AnyRule], AnyRule]:
    """The same of a primitive by its name: its module is not imported for it.

    Args:
      name: of the primitive.
      local: as of `register_rule`.

    Returns:
      A decorator, as `register_rule` does.
    """

    def register(rule: AnyRule) -> AnyRule:
        _by_name[name] = _Entry(rule, local)
        return rule

    return register


def _entry_of(primitive: Primitive) -> _Entry | None:
    return _registry.get(primitive) or _by_name.get(primitive.name)


def rule_of(eqn: JaxprEqn) -> OpShardingRule | None:
    """Looks up what is registered.

    Args:
      eqn: an equation, such as one of `jax.make_jaxpr(f)(x).eqns`.

    Returns:
      The rule of the equation, or None if it has none.
    """
    entry = _entry_of(eqn.primitive)
    return entry.rule(eqn) if entry else None


def is_registered(primitive: Primitive) -> bool:
    """Whether equations of a primitive have rules, though perhaps not all of them."""
    return _entry_of(primitive) is not None


def run_local(op: LocalOp, *operands: jax.Array) -> Sequence[jax.Array]:
    """Runs one op on one device's blocks."""
    entry = _entry_of(op.eqn.primitive)
    assert entry is not None
    return entry.local(op, *op.with_own_groups(operands))
