"""Functions that `jax.pmap` has wrapped already.

In: a step, perhaps so wrapped, and the mesh axes of `fully_shard`. Out: the step as the
user wrote it, and how `in_axes` splits its batch; or an error that says what `pmap` was
asked to do that a sharded step cannot.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import PartitionSpec

from shardfn._core import compat
from shardfn._core.errors import ShardingError, call_site


def unwrapped(
    step: Any, names: Sequence[str], argnums: Sequence[int], batch_spec: Any
) -> tuple[Any, Any]:
    """The function in a `jax.pmap`, and its `batch_spec`; others are as they are.

    Args:
      step: what `fully_shard` was given.
      names: the mesh axes to shard over.
      argnums: positions of the state.
      batch_spec: the caller's, which counts; None is filled in from `in_axes`.

    Returns:
      The step for one device, and the PartitionSpecs of its batch.

    Raises:
      ShardingError: the `pmap` names no axis, another one, or static arguments.
    """
    mapped = compat.pmapped(step)
    if mapped is None:
        return step, batch_spec
    name = getattr(step, "__name__", "the step")
    axis = mapped.axis_name
    if axis is None or axis not in names:
        _refuse_axis(name, axis, names)
    if mapped.static_argnums:
        given = ", ".join(map(str, mapped.static_argnums))
        raise ShardingError(
            f"jax.pmap of {name} has static_broadcasted_argnums={given}, which a "
            "sharded step does not take.\n"
            f"  fully_shard was called at {call_site()}\n"
            "Bind these arguments: fully_shard(functools.partial(step, option=...), "
            "...), with the function that jax.pmap was given."
        )
    if batch_spec is None:
        batch_spec = _batch_spec(mapped.in_axes, axis, argnums)
    return step.__wrapped__, batch_spec


def _refuse_axis(name: str, axis: str | None, names: Sequence[str]) -> NoReturn:
    at = f"  fully_shard was called at {call_site()}\n"
    if axis is None:
        raise ShardingError(
            f"jax.pmap of {name} names no axis, so each device would train alone.\n"
            f"{at}Pass the function itself, written for one device and the global "
            f"batch, or name the axis, jax.pmap(..., axis_name='{names[0]}'), and "
            "average the gradients over it."
        )
    raise ShardingError(
        f"jax.pmap of {name} has axis_name='{axis}', but fully_shard shards over "
        f"{tuple(names)}.\n{at}"
        f"Pass axis='{axis}' to fully_shard, with a mesh that has this axis."
    )


def _batch_spec(in_axes: Any, axis: str, argnums: Sequence[int]) -> Any:
    """How `in_axes` splits the arguments that are not state."""
    if not isinstance(in_axes, (tuple, list)):
        return None
    batch = [axes for i, axes in enumerate(in_axes) if i not in argnums]
    specs = [
        jax.tree.map(lambda dim: _spec(dim, axis), axes, is_leaf=lambda x: x is None)
        for axes in batch
    ]
    return specs[0] if len(specs) == 1 else tuple(specs)


def _spec(dim: int | None, axis: str) -> PartitionSpec | None:
    """None leaves it to the defaults: dimension 0, but whole scalars and keys."""
    if dim is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * dim, axis) if dim else None
