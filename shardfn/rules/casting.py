"""Rules of ops that read the same bytes under another type or another annotation.

In: an equation whose result is its operand, reinterpreted or moved. Out: its rule.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfn._core.compat import primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule, factor_names
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn.rules._factors import result_shape, shape_of
from shardfn.rules.elementwise import elementwise_rule


@register_rule(*primitives("bitcast_convert_type"))
def _bitcast_convert_type(eqn: JaxprEqn) -> OpShardingRule:
    """`a -> a`, `a -> a b  whole={b}` to a narrower and `a b -> a` to a wider dtype."""
    shape, result = shape_of(eqn), result_shape(eqn)
    names = factor_names(max(len(shape), len(result)))
    common = min(len(shape), len(result))
    return make_rule(
        eqn,
        [names[: len(shape)]],
        [names[: len(result)]],
        whole=names[common:],
        flat=shape == result,
    )


def _constraint_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    """Keeps the part of the constraint that is about the mesh's automatic axes."""
    sharding = op.eqn.params["sharding"]
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(sharding, NamedSharding):
        return [operand]
    spec = [_only(entry, mesh.auto_axes) for entry in sharding.spec]
    if all(entry is None or entry is P.UNCONSTRAINED for entry in spec):
        return [operand]
    local = NamedSharding(mesh, P(*spec))
    return [jax.lax.with_sharding_constraint(operand, local)]


def _only(entry: Any, axes: Sequence[str]) -> Any:
    """The mesh axes of one PartitionSpec entry that stand in `axes`."""
    if entry is None or entry is P.UNCONSTRAINED:
        return entry
    kept = tuple(
        a for a in ((entry,) if isinstance(entry, str) else entry) if a in axes
    )
    return kept or None


@register_rule(*primitives("sharding_constraint"), local=_constraint_local)
def _sharding_constraint(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a b`: the split of each dimension is propagated, not taken from here."""
    rule = elementwise_rule(eqn, "each")
    return make_rule(eqn, rule.operands, rule.results, linear="each")


@register_rule(*primitives("reshard"), local=lambda op, operand: [operand])
def _reshard(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a b`: as `sharding_constraint`; our mesh axes have no types inside."""
    return _sharding_constraint(eqn)


@register_rule(*primitives("layout_constraint"))
def _layout_constraint(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a b`."""
    rule = elementwise_rule(eqn, "each")
    return make_rule(eqn, rule.operands, rule.results, linear="each")


def _device_put_local(op: LocalOp, *operands: jax.Array) -> Sequence[jax.Array]:
    """Moves blocks between memories. Devices are those of the mesh."""
    targets = zip(operands, op.eqn.params["devices"], strict=True)
    return [_to_memory(x, target) for x, target in targets]


def _to_memory(x: jax.Array, target: Any) -> jax.Array:
    """`x` in the memory that `target`, a space or a sharding, names, if any."""
    space = jax.memory.Space
    if isinstance(target, jax.sharding.Sharding) and target.memory_kind:
        on_host = target.memory_kind.endswith("host")
        target = space.Host if on_host else space.Device
    return jax.device_put(x, target) if isinstance(target, space) else x


@register_rule(*primitives("device_put"), local=_device_put_local)
def _device_put(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a b`."""
    return elementwise_rule(eqn, "each")
