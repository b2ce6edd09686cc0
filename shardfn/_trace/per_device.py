"""Steps written for one device of many, with collectives of their own.

In: a step that calls `lax.pmean(grads, axis)` and the like, as under `jax.pmap`. Out:
the global step that means the same: the devices become a dimension of the batch under
`jax.vmap(axis_name=axis)`, so a `psum` becomes a sum over the batch, which is planned
as any other: that of a gradient becomes a reduce-scatter.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from shardfn._core import compat
from shardfn._core.call_arguments import Path, has_part, part
from shardfn._core.errors import (
    ShardingError,
    called,
    listed,
    nested,
    step_name,
    where_in,
)
from shardfn._core.sharding import Axes, Sharding, Split, axes_of

GlobalStep = Callable[[Any, Any], Any]


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
        return compat.unbound_axis(error) in axes.names
    except Exception:
        return False
    return False


def as_global(
    step: GlobalStep,
    axes: Axes,
    split: Sequence[Sharding],
    states: Sequence[Path],
    own: Sequence[bool] = (),
) -> GlobalStep:
    """The global step that a per-device step stands for.

    Args:
      step: per-device step, called as `step(states, batch)` on one device's batch.
      axes: the mesh axes whose names the step uses.
      split: shardings of the global batch's leaves.
      states: where in what the step returns the new states are.
      own: per leaf of the states, whether it has a row for each device, which the step
        sees alone.

    Returns:
      A pure step on the global batch. Results that are equal on all devices come back
      as they are, others joined along dimension 0, as from `shard_map`.
    """

    def run(old: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
        mapped = _mapped(step, axes, split, own, old, batch)
        mapped = _check_states(mapped, states, own, len(axes.names))
        out = _over_devices(step, axes, split, own, mapped)(old, batch)
        joined = jax.tree.map(_joined, out, mapped)
        return _with_rows(joined, out, states, own, len(axes.names))

    return run


def _joined(x: jax.Array, levels: tuple[bool, ...]) -> jax.Array:
    """Per-device results joined along dimension 0; scalars stacked."""
    count = sum(levels)
    if not count:
        return x
    return x.reshape(-1, *x.shape[count + 1 :])


def _with_rows(
    joined: Any, out: Any, states: Sequence[Path], own: Sequence[bool], levels: int
) -> Any:
    """`joined`, where each device's own leaves of the state are rows."""
    leaves, treedef = jax.tree.flatten(joined)
    made = jax.tree.leaves(out)
    for i, is_own in zip(_leaves_at(out, states), own, strict=False):
        x = made[i]
        if is_own:
            leaves[i] = x.reshape(-1, *x.shape[levels:])
    return jax.tree.unflatten(treedef, leaves)


def _over_devices(
    step: GlobalStep,
    axes: Axes,
    split: Sequence[Sharding],
    own: Sequence[bool],
    mapped: Any,
    record: dict[int, Any] | None = None,
) -> GlobalStep:
    """`step` under one vmap per mesh axis.

    `mapped` says per result and axis whether it differs between devices; None maps all,
    and then `record` is filled with what really does.
    """

    owned: list[bool] = []

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
            in_axes=([0 if is_own else None for is_own in owned], in_axes),
            out_axes=out_axes,
            axis_name=axes.names[index],
            axis_size=axes.sizes[index],
        )
        return level(index - 1, over)

    def run(old: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
        leaves, treedef = jax.tree.flatten(batch)
        blocks = [_blocks(x, s, axes) for x, s in zip(leaves, split, strict=True)]
        state, state_tree = jax.tree.flatten(old)
        owned[:] = own or [False] * len(state)
        rows = [
            x.reshape(*axes.sizes, *x.shape[1:]) if is_own else x
            for x, is_own in zip(state, owned, strict=True)
        ]

        def one_device(states: list[Any], flat: list[Any]) -> Any:
            return step(
                jax.tree.unflatten(state_tree, states),
                jax.tree.unflatten(treedef, flat),
            )

        return level(len(axes.names) - 1, one_device)(rows, blocks)

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
    own: Sequence[bool],
    old: tuple[Any, ...],
    batch: tuple[Any, ...],
) -> Any:
    """Per result, per mesh axis, whether it differs between devices."""
    record: dict[int, Any] = {}
    over = _over_devices(step, axes, split, own, None, record)
    check_keys(jax.make_jaxpr(over)(old, batch))
    levels = [record[i] for i in range(len(axes.names))]
    return jax.tree.map(lambda *flags: tuple(flags), *levels)


def check_keys(jaxpr: Any) -> None:
    """For what is mapped over devices: raises if bits are made from an array of RBG
    keys, of which vmap lets the first make all, where each device would use its own."""
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


def _leaves_at(tree: Any, states: Sequence[Path]) -> list[int]:
    """Which leaves of what the step returns are those of the new states."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_levels)
    numbers = jax.tree.unflatten(treedef, range(len(leaves)))
    found = [part(numbers, path) for path in states if has_part(numbers, path)]
    return jax.tree.leaves(found)


def _check_states(
    mapped: Any, states: Sequence[Path], own: Sequence[bool], levels: int
) -> Any:
    """`mapped`, with all that devices keep for themselves differing between them.

    Raises:
      ShardingError: another leaf of the state differs.
    """
    leaves, treedef = jax.tree.flatten(mapped, is_leaf=_is_levels)
    numbers = jax.tree.unflatten(treedef, range(len(leaves)))  # levels are containers
    places = [part(numbers, path) for path in states if has_part(numbers, path)]
    if len(places) < len(states):
        return mapped  # not a state and metrics; the trace says so
    new = places[0] if len(places) == 1 else tuple(places)
    flat, _ = tree_flatten_with_path(new)
    is_own = own[: len(flat)] if len(own) >= len(flat) else [False] * len(flat)
    names = [keystr(path, simple=True, separator="/") or "state" for path, _ in flat]
    differing = [
        name
        for name, (_, i), owned in zip(names, flat, is_own, strict=True)
        if any(leaves[i]) and not owned
    ]
    if differing:
        _refuse_differing(differing, names)
    for (_, i), owned in zip(flat, is_own, strict=True):
        leaves[i] = (True,) * levels if owned else leaves[i]
    return jax.tree.unflatten(treedef, leaves)


def _refuse_differing(differing: Sequence[str], names: Sequence[str]) -> NoReturn:
    """The error for leaves that would differ, of all `names` of the state."""
    tops = {name.split("/")[0] for name in differing}
    others = {name.split("/")[0] for name in names if name not in differing}
    whole = [f"{top}/*" for top in sorted(tops - others) if top not in names]
    single = [name for name in differing if f"{name.split('/')[0]}/*" not in whole]
    more = f" So would {listed(differing[1:])}." if differing[1:] else ""
    remedy = "per_device_state keeps such a leaf"
    if len(tops) == 1:  # leaves of several subtrees follow from gradients
        shown = ", ".join(map(repr, whole or single))
        remedy = f"per_device_state=({shown},) keeps it"
    raise ShardingError(
        f"state leaf '{differing[0]}' would differ between devices: {step_name()} "
        f"computes it from its own part of the batch and never averages it.{more}\n"
        f"{called()}"
        "Average the gradients over the mesh axis first: grads = jax.lax.pmean(grads, "
        "axis). If they are averaged and it is a statistic of the batch, average that "
        f"too, or let each device have its own, as under jax.pmap: {remedy}."
    )
