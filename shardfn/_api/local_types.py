"""What the types of values inside `shard_map` say of arguments, where JAX checks types.

In: a leaf on one device, and how it is taken to be split. Out: over which mesh axes it
is the same; an error where it is taken for what its type says that it is not.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax

from shardfn._core import compat
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaves import Leaf
from shardfn._core.sharding import Axes, Sharding
from shardfn._lowering.move_lowerings import varying


def same_over(x: Any, axes: Axes) -> frozenset[str]:
    """The mesh axes over which a value is the same, as its type says, where types are
    checked."""
    if not compat.checks_types():
        return frozenset()
    varying = _varying(x)
    sizes = zip(axes.names, axes.sizes, strict=True)
    return frozenset(n for n, size in sizes if size > 1 and n not in varying)


def check_split(x: Any, leaf: Leaf, stored: Sharding, axes: Axes) -> None:
    """Raises for a leaf of a state that is whole, where a shard has the same shape."""
    same = same_over(x, axes)
    for name, split in zip(axes.names, stored, strict=True):
        if split is not None and name in same:
            raise ShardingError(
                f"state leaf '{leaf.name or 'state'}' is the same on all devices of "
                f"mesh axis '{name}', and it is stored split over them: it is whole, "
                f"or no shard of the state.\n{called()}"
                "Split a whole state with step.shard(state). If all shards have these "
                f"values, say so: jax.lax.pcast(x, '{name}', to='varying')."
            )


def check_same(x: Any, leaf: Leaf, sharding: Sharding, axes: Axes, what: str) -> None:
    """Raises for a leaf that differs between devices that all take it for the same."""
    if not compat.checks_types():
        return
    varying = _varying(x)
    for name, size, split in zip(axes.names, axes.sizes, sharding, strict=True):
        if size > 1 and split is None and name in varying:
            advice = "Pass it whole, by in_specs=jax.P(), or average it before."
            if what == "batch":
                advice = (
                    "Pass the same one, by in_specs=jax.P(), and let the step make "
                    "of it what differs; or name the dimension that is split in "
                    "batch_spec."
                )
            raise ShardingError(
                f"{what} leaf '{leaf.name or what}' differs between devices of mesh "
                f"axis '{name}', as its type says, and the step takes it for the same "
                f"on all of them.\n{called()}{advice}"
            )


def _varying(x: Any) -> frozenset[str]:
    return compat.varying_axes(x) if isinstance(x, jax.Array) else frozenset()


def without_gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which JAX would differentiate wrongly where it checks no types: it would
    take the cotangent of a replicated value for one device's term of a sum."""

    def refuse(*_: Any) -> NoReturn:
        raise ShardingError(
            f"{step_name()} is differentiated from outside, where JAX does not know "
            f"which values are replicated.\n{called()}"
            "Take the gradient inside the step, or call it in "
            "jax.shard_map(check_vma=True), not in jax.pmap."
        )

    checked = jax.custom_jvp(run)
    checked.defjvp(refuse)
    return checked


def as_varying(x: Any, sharding: Sharding, axes: Axes) -> jax.Array:
    """A value whose type says over which mesh axes it is split."""
    x = jax.numpy.asarray(x) if isinstance(x, float | int) else x
    over = (n for n, s in zip(axes.names, sharding, strict=True) if s is not None)
    return varying(x, *over)
