"""From a user's step to a checked jaxpr.

In: the step and avals of its arguments. Out: its jaxpr, and the structure of what it
returns; or an error that says what the step does that cannot be sharded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from shardfn import _compat
from shardfn._arguments import Leaf, path_name
from shardfn._errors import ShardingError, call_site, where
from shardfn._per_device import GlobalStep, as_global, unbound_axis
from shardfn._sharding import Axes, Sharding


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced step.

    Attributes:
      jaxpr: closed jaxpr on logical global shapes.
      out_tree: structure of what the step returns.
      out_paths: tree path of every output leaf that is not state.
      state_count: how many leading outputs are leaves of the new state.
    """

    jaxpr: Any
    out_tree: Any
    out_paths: tuple[str, ...]
    state_count: int


def trace(
    step: GlobalStep,
    states: tuple[Any, ...],
    batch: tuple[Any, ...],
    leaves: Sequence[Leaf],
    split: Sequence[Sharding],
    axes: Axes,
) -> Traced:
    """Traces `step` and checks that it returns a state like the one it takes.

    Args:
      step: called as `step(states, batch)`.
      states: the state arguments, pytrees of `ShapeDtypeStruct`.
      batch: the other arguments.
      leaves: the leaves of `states`.
      split: shardings of the batch's leaves.
      axes: the mesh axes. A step that uses their names is a step for one device.

    Returns:
      The traced step.

    Raises:
      ShardingError: the step is impure, returns no state, or changes its structure.
    """
    flags = _compat.hiding_flags()
    if flags:
        raise ShardingError(
            f"the JAX flag {flags[0]} is on: it hides the bodies of control flow from "
            "fully_shard, which has to see every operation.\n"
            f"  the step was called at {call_site()}\n"
            f'Turn it off: jax.config.update("{flags[0]}", False).'
        )
    try:
        try:
            jaxpr, out = jax.make_jaxpr(step, return_shape=True)(states, batch)
        except NameError as error:
            _check_axis(error, axes)
            step = as_global(step, axes, split, len(states))
            jaxpr, out = jax.make_jaxpr(step, return_shape=True)(states, batch)
    except jax.errors.UnexpectedTracerError as error:
        raise ShardingError(
            "the step is not pure: it uses a tracer that an earlier trace left behind, "
            "for example in a global, a list or an object.\n"
            f"  the step was called at {call_site()}\n"
            "Return the value from the step, or pass it in as an argument."
        ) from error
    _check_effects(jaxpr)
    count = _check_state(out, states, leaves)
    flat, out_tree = tree_flatten_with_path(out)
    paths = tuple(path_name(path) for path, _ in flat[count:])
    return Traced(jaxpr, out_tree, paths, count)


def _check_axis(error: NameError, axes: Axes) -> None:
    """Raises unless the trace failed because the step names one of our mesh axes."""
    name = unbound_axis(error)
    if name is None:
        raise error
    if name not in axes.names:
        raise ShardingError(
            f"the step uses mesh axis '{name}', but fully_shard shards over "
            f"{axes.names}.\n"
            f"  the step was called at {call_site()}\n"
            f"Pass axis='{name}' to fully_shard, with a mesh that has this axis."
        ) from error


def _check_effects(jaxpr: Any) -> None:
    effects = sorted(
        {type(e).__name__ for e in jaxpr.effects if not _compat.is_debug_effect(e)}
    )
    if not effects:
        return
    place = next(
        (
            where(eqn)
            for eqn in _compat.open_jaxpr(jaxpr)[0].eqns
            if any(not _compat.is_debug_effect(e) for e in eqn.effects)
        ),
        "an unknown place",
    )
    raise ShardingError(
        f"the step is not pure: it has a side effect ({', '.join(effects)}), which "
        "every device would repeat.\n"
        f"  at {place}\n"
        f"  the step was called at {call_site()}\n"
        "Return the value as a metric instead, and print or store it outside the step."
    )


def _check_state(out: Any, states: Sequence[Any], leaves: Sequence[Leaf]) -> int:
    """The number of leaves of the new state; raises if it is not like the old one."""
    number = len(states)
    if not isinstance(out, (tuple, list)) or len(out) < number + (number == 0):
        _no_state(out, number)
    new = out[0] if number == 1 else tuple(out[:number])
    old = states[0] if number == 1 else tuple(states)
    new_flat, new_tree = tree_flatten_with_path(new)
    _, old_tree = tree_flatten_with_path(old)
    if new_tree != old_tree:
        old_names = {leaf.name for leaf in leaves}
        new_names = {path_name(path) for path, _ in new_flat}
        missing, extra = sorted(old_names - new_names), sorted(new_names - old_names)
        if len(leaves) and not old_names & new_names:
            _no_state(out, number)
        raise ShardingError(
            "the step changes the structure of its state: "
            f"missing leaves {missing or 'none'}, new leaves {extra or 'none'}"
            + ("" if missing or extra else f"; it was {old_tree}, it is {new_tree}")
            + f".\n  the step was called at {call_site()}\n"
            "Return the new state with the structure of the old one; put other values "
            "in the metrics."
        )
    for leaf, (path, new_leaf) in zip(leaves, new_flat, strict=True):
        old_type = f"{leaf.aval.dtype}{list(leaf.aval.shape)}"
        new_type = f"{new_leaf.dtype}{list(new_leaf.shape)}"
        if old_type != new_type:
            raise ShardingError(
                f"the step changes state leaf '{path_name(path)}' from {old_type} to "
                f"{new_type}.\n"
                f"  the step was called at {call_site()}\n"
                "A sharded state keeps its shapes and dtypes: cast or reshape the new "
                "value back, or start with the type that the step returns."
            )
    return len(new_flat)


def _no_state(out: Any, number: int) -> None:
    what = (
        f"a {type(out).__name__} of {len(out)}"
        if isinstance(out, (tuple, list))
        else f"a {type(out).__name__}"
    )
    first = "the new state" if number == 1 else f"the {number} new states"
    raise ShardingError(
        f"the step returns no state: it returned {what}, and {first} must come first.\n"
        f"  the step was called at {call_site()}\n"
        "Return (new_state, metrics), the new state like the old one; a step that only "
        "evaluates returns the state unchanged."
    )
