"""Steps written for one device of many, with collectives of their own.

In: a step that calls `lax.pmean(grads, axis)` and the like, as under `jax.pmap`. Out:
the global step that means the same: the devices become a dimension of the batch under
`jax.vmap(axis_name=axis)`, so a `psum` becomes a sum over the batch, which is planned
as any other: that of a gradient becomes a reduce-scatter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from shardfn._core import compat
from shardfn._core.errors import ShardingError, called, nested, step_name, where_in
from shardfn._core.sharding import Axes, Sharding, Split, axes_of

GlobalStep = Callable[[tuple[Any, ...], tuple[Any, ...]], Any]


def unbound_axis(error: NameError) -> str | None:
    """The axis name that a traced function uses without binding it, if that is why."""
    _, found, rest = str(error).partition("unbound axis name: ")
    return rest.split(".")[0].split()[0].strip("'\"") if found else None


def reaches_axis(
    step: GlobalStep,
    axes: Axes,
    split: Sequence[Sharding],
    states: tuple[Any, ...],
    batch: tuple[Any, ...],
) -> bool:
    """Whether `step`, on the batch of one device, comes to use a mesh axis."""

    def first(old: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
        leaves, treedef = jax.tree.flatten(batch)
        for i, (x, sharding) in enumerate(zip(leaves, split, strict=True)):
            blocks = _blocks(x, sharding, axes)
            leaves[i] = blocks[(0,) * (blocks.ndim - x.ndim)]
        return step(old, jax.tree.unflatten(treedef, leaves))

    try:
        jax.make_jaxpr(first)(states, batch)
    except NameError as error:
        return unbound_axis(error) in axes.names
    except Exception:
        return False
    return False


def as_global(
    step: GlobalStep, axes: Axes, split: Sequence[Sharding], states: int
) -> GlobalStep:
    """The global step that a per-device step stands for.

    Args:
      step: per-device step, called as `step(states, batch)` on one device's batch.
      axes: the mesh axes whose names the step uses.
      split: shardings of the global batch's leaves.
      states: how many leading results are the new states.

    Returns:
      A pure step on the global batch. Results that are equal on all devices come back
      as they are, others joined along dimension 0, as from `shard_map`.
    """

    def run(old: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
        mapped = _mapped(step, axes, split, old, batch)
        _check_states(mapped, states)
        out = _over_devices(step, axes, split, mapped)(old, batch)
        return jax.tree.map(_joined, out, mapped)

    return run


def _joined(x: jax.Array, levels: tuple[bool, ...]) -> jax.Array:
    """Per-device results joined along dimension 0; scalars stacked."""
    count = sum(levels)
    if not count:
        return x
    return x.reshape(-1, *x.shape[count + 1 :])


def _over_devices(
    step: GlobalStep,
    axes: Axes,
    split: Sequence[Sharding],
    mapped: Any,
    record: dict[int, Any] | None = None,
) -> GlobalStep:
    """`step` under one vmap per mesh axis.

    `mapped` says per result and axis whether it differs between devices; None maps all,
    and then `record` is filled with what really does.
    """

    def level(index: int, run: Callable[..., Any]) -> Callable[..., Any]:
        if index < 0:
            return run

        def inner(*args: Any) -> Any:
            out = run(*args)
            if record is not None:
                name = axes.names[index]
                record[index] = jax.tree.map(lambda x: compat.is_mapped(x, name), out)
            return out

        in_axes = [0 if s[index] is not None else None for s in split]
        out_axes: Any = 0
        if mapped is not None:
            flags = jax.tree.map(
                lambda levels: 0 if levels[index] else None,
                mapped,
                is_leaf=_is_levels,
            )
            out_axes = flags
        over = jax.vmap(
            inner,
            in_axes=(None, in_axes),
            out_axes=out_axes,
            axis_name=axes.names[index],
            axis_size=axes.sizes[index],
        )
        return level(index - 1, over)

    def run(old: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
        leaves, treedef = jax.tree.flatten(batch)
        blocks = [_blocks(x, s, axes) for x, s in zip(leaves, split, strict=True)]

        def one_device(states: Any, flat: list[Any]) -> Any:
            return step(states, jax.tree.unflatten(treedef, flat))

        return level(len(axes.names) - 1, one_device)(old, blocks)

    return run


def _is_levels(x: Any) -> bool:
    return isinstance(x, tuple) and bool(x) and all(isinstance(b, bool) for b in x)


def _blocks(x: jax.Array, sharding: Sharding, axes: Axes) -> jax.Array:
    """`x` with one leading dimension per mesh axis that splits it."""
    dims = {s.dim for s in sharding if isinstance(s, Split)}
    if not dims:
        return x
    (dim,) = dims
    counts = [axes.sizes[a] for a in axes_of(sharding, dim)]
    rest = x.shape[dim]
    for count in counts:
        rest //= count
    x = x.reshape(*x.shape[:dim], *counts, rest, *x.shape[dim + 1 :])
    order = [*range(dim, dim + len(counts))]
    others = [d for d in range(x.ndim) if d not in order]
    return x.transpose(*order, *others)


def _mapped(
    step: GlobalStep,
    axes: Axes,
    split: Sequence[Sharding],
    old: tuple[Any, ...],
    batch: tuple[Any, ...],
) -> Any:
    """Per result, per mesh axis, whether it differs between devices."""
    record: dict[int, Any] = {}
    over = _over_devices(step, axes, split, None, record)
    _check_keys(jax.make_jaxpr(over)(old, batch))
    levels = [record[i] for i in range(len(axes.names))]
    return jax.tree.map(lambda *flags: tuple(flags), *levels)


def _check_keys(jaxpr: Any) -> None:
    """Raises if bits are made from an array of RBG keys: vmap lets the first make all,
    where each device would use its own."""
    for eqns in nested(jaxpr):
        if eqns[-1].primitive.name not in ("random_bits", "random_gamma"):
            continue
        keys: Any = eqns[-1].invars[0].aval
        if str(keys.dtype) in ("key<rbg>", "key<urbg>") and keys.size > 1:
            raise ShardingError(
                f"{step_name()} is written per device and makes random numbers from "
                "several RBG keys, whose bits would not be those that each device "
                f"makes alone.\n  at {where_in(eqns)}\n{called()}"
                "Use keys of jax.random.key(seed, impl='threefry2x32'), or make the "
                "numbers of the whole batch from one key in a step on global arrays."
            )


def _check_states(mapped: Any, states: int) -> None:
    if not isinstance(mapped, (tuple, list)):
        return  # not a state and metrics; the trace says so
    new = mapped[0] if states == 1 else tuple(mapped[:states])
    flat, _ = tree_flatten_with_path(new, is_leaf=_is_levels)
    for path, levels in flat:
        if any(levels):
            name = keystr(path, simple=True, separator="/") or "state"
            raise ShardingError(
                f"state leaf '{name}' would differ between devices: {step_name()} "
                "computes it from its own part of the batch and never averages it.\n"
                f"{called()}"
                "Average the gradients over the mesh axis first: "
                "grads = jax.lax.pmean(grads, axis)."
            )
