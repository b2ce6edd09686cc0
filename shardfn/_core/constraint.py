"""`replicate` and `constrain`: the user overrules propagation at one value.

In: an array inside a step. Out: the same array; `propagate` finds the primitive that
was bound and gives the value the sharding that it asks for. Elsewhere it is the
identity, so the plain step runs as it is.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from shardfn._core.argument_values import SPEC, check_arguments
from shardfn._core.errors import ShardingError, call_site, where
from shardfn._core.sharding import (
    Axes,
    AxisSharding,
    Sharding,
    Split,
    in_order,
    named_twice,
    on_axis,
)

Spec = tuple[tuple[str, ...] | None, ...]
"""Per dimension, the mesh axes that split it; None leaves it as it is."""

constrain_p = Primitive("constrain")


def replicate(x: Any) -> Any:
    """Makes every device hold `x` whole, inside a sharded step.

    A split value is all-gathered at this line and an unreduced one all-reduced,
    whatever propagation would have chosen. Gradients are not constrained: that of `x`
    may be sharded. Outside of a sharded step this is the identity.

    Args:
      x: an array, or a pytree of arrays.

    Returns:
      `x`.

    Example:
      >>> import jax, jax.numpy as jnp, shardfn
      >>> step = shardfn.fully_shard(
      ...     lambda state, x: (state, jnp.sort(shardfn.replicate(x)[::-1])),
      ...     jax.make_mesh((8,), ("data",)),
      ... )
      >>> plan = step.plan(jnp.zeros(3), jnp.zeros(16))
      >>> [(line.op, line.shape) for line in plan.collectives]
      [('all_gather', (16,))]
    """
    return jax.tree.map(lambda leaf: _bind(leaf, ((),) * jax.numpy.ndim(leaf)), x)


def constrain(x: Any, spec: PartitionSpec) -> Any:
    """Fixes how `x` is sharded over the axes of the step, inside a sharded step.

    The value is moved to this sharding at this line if it comes in another, and what
    makes it and what takes it adapt. Gradients are not constrained. Under `jax.vmap`,
    the new dimension keeps its sharding. Outside of a sharded step this is the
    identity.

    Args:
      x: an array, or a pytree of arrays.
      spec: names of mesh axes that `fully_shard` shards over, per dimension: an axis, a
        tuple of axes, None for a dimension that is whole, or
        `PartitionSpec.UNCONSTRAINED` for one that stays as it is. Dimensions that it
        leaves out are whole.

    Returns:
      `x`.

    Raises:
      ValueError: `spec` has more entries than `x` has dimensions, or names an axis
        twice.
      ShardingError: while planning the step: it does not shard over an axis of `spec`,
        the devices do not divide the dimension, or axes of one dimension are not in the
        order of the step's.

    Example:
      >>> import jax, jax.numpy as jnp, shardfn
      >>> from jax.sharding import PartitionSpec as P
      >>> step = shardfn.fully_shard(
      ...     lambda state, x: (state, shardfn.constrain(x.T, P("data"))),
      ...     jax.make_mesh((8,), ("data",)),
      ... )
      >>> plan = step.plan(jnp.zeros(3), jnp.zeros((16, 8)))
      >>> [(line.op, line.shape) for line in plan.collectives]
      [('all_to_all', (8, 16))]
    """

    check_arguments("constrain", spec=(spec, SPEC))
    twice = named_twice(spec)
    if twice is not None:
        raise ValueError(
            f"constrain got {spec}, which names mesh axis '{twice}' twice.\n"
            f"  constrain was called at {call_site()}\n"
            "An axis splits one dimension: name it once."
        )

    def one(leaf: Any) -> Any:
        ndim = jax.numpy.ndim(leaf)
        if len(spec) > ndim:
            raise ValueError(
                f"constrain got {spec} for an array of shape {jax.numpy.shape(leaf)}, "
                f"which has {ndim} dimensions.\n"
                f"  constrain was called at {call_site()}\nLeave out the last entries."
            )
        return _bind(leaf, tuple(map(_entry, (*spec, *[None] * (ndim - len(spec))))))

    return jax.tree.map(one, x)


def _bind(x: Any, spec: Spec) -> Any:
    return constrain_p.bind(jax.numpy.asarray(x), spec=spec, of_state=False)


def split_of_state(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """`x`, part of the update of a leaf, split along one dimension by one mesh axis,
    as leaves are stored: padded if it has to be. Other axes stay as they are."""
    spec = tuple((axis,) if d == dim else None for d in range(x.ndim))
    return constrain_p.bind(x, spec=spec, of_state=True)


def split_rows(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """`x` split along one dimension by these mesh axes, as rows of the batch are."""
    return _bind(x, tuple(axes if d == dim else () for d in range(x.ndim)))


def _entry(entry: Any) -> tuple[str, ...] | None:
    if entry is PartitionSpec.UNCONSTRAINED:
        return None
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def constrained(eqn: JaxprEqn, state: Sharding, axes: Axes) -> Sharding:
    """The sharding that a constraint gives its operand.

    Args:
      eqn: an equation of `constrain_p`.
      state: sharding of the operand so far.
      axes: the mesh axes of the step.

    Returns:
      The sharding.

    Raises:
      ShardingError: the step has no such axis, or cannot split the dimension.
    """
    spec, shape = eqn.params["spec"], eqn.invars[0].aval.shape  # pyright: ignore
    of_state = eqn.params["of_state"]
    unknown = {name for names in spec for name in names or ()}.difference(axes.names)
    if unknown:
        raise ShardingError(
            f"constrain names mesh axis '{min(unknown)}', but the step is sharded over "
            f"{axes.names}.\n  at {where(eqn)}\n"
            "Name one of these, or use jax.lax.with_sharding_constraint for other axes."
        )
    for names in spec:
        if names and (order := in_order(names, axes)) != names:
            raise ShardingError(
                f"constrain splits a dimension over {names}, but the step's axes are "
                f"{axes.names}, major to minor.\n  at {where(eqn)}\n"
                f"Write {order}."
            )
    out = axes.replicated
    for axis, (name, now) in enumerate(zip(axes.names, state, strict=True)):
        dim = next((d for d, names in enumerate(spec) if name in (names or ())), None)
        if dim is not None:
            out = on_axis(out, axis, Split(dim, stored=of_state))
        elif _stays(now, spec):
            out = on_axis(out, axis, now)
    for dim, size in enumerate(shape):
        parts = math.prod(
            n
            for n, s in zip(axes.sizes, out, strict=True)
            if isinstance(s, Split) and s.dim == dim and not s.stored
        )  # of the state, blocks may be padded
        if size % parts:
            raise ShardingError(
                f"constrain splits dimension {dim} of an array of shape {shape} into "
                f"{parts} parts, which do not divide it.\n  at {where(eqn)}\n"
                "Pad the dimension, or constrain another one."
            )
    return out


def _stays(now: AxisSharding, spec: Spec) -> bool:
    """Whether the constraint leaves an axis that it does not name as it is."""
    if isinstance(now, Split) and now.dim >= 0:
        return spec[now.dim] is None
    return bool(spec) and all(names is None for names in spec)


def operand_preference(
    eqn: JaxprEqn, made: Sharding, preferences: Sequence[frozenset[Split | None]]
) -> tuple[frozenset[Any], ...]:
    """What a constraint prefers its operand in, by what is preferred of its result."""
    is_open = None in eqn.params["spec"]
    return tuple(
        opinions if is_open and not isinstance(s, Split) else frozenset({s})
        for s, opinions in zip(made, preferences, strict=True)
    )


def _batched(
    args: Sequence[Any], dims: Sequence[int], *, spec: Spec, of_state: bool
) -> Any:
    """The new dimension of `jax.vmap` is left as it is."""
    (x,), (dim,) = args, dims
    spec = (*spec[:dim], None, *spec[dim:])
    return constrain_p.bind(x, spec=spec, of_state=of_state), dim


constrain_p.def_impl(lambda x, **_: x)
constrain_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(constrain_p, lambda context, x, **_: [x])
ad.deflinear2(constrain_p, lambda cotangent, x, **_: [cotangent])
batching.primitive_batchers[constrain_p] = _batched
