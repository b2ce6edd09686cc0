"""Leaves of a state that come in another memory than the step stores them in.

In: a state as it is given to a step. Out: a line for the plan, or the error of a call:
moved without a word, a leaf would take the memory that it was to save.
"""

from collections.abc import Iterator
from typing import Any

import jax

from shardfn._core import compat
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.memories import HOST, is_on_host
from shardfn.storage._placement import Storage


def memory_notes(storage: Storage, states: tuple[Any, ...]) -> tuple[str, ...]:
    """The line of a plan for a state that calls refuse, if it is one."""
    found = [leaf.name or "state" for leaf in _moving(storage, states)]
    if not found:
        return ()
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"state leaf '{found[0]}'{more}: in the host's memory, and stored on the "
        "devices here; calls refuse it, step.shard(state) moves it",
    )


def check_memories(storage: Storage, states: tuple[Any, ...]) -> None:
    """Raises if a leaf comes in the host's memory, and is not stored there."""
    leaf = next(_moving(storage, states), None)
    if leaf is None:
        return
    # A pattern that is misspelt names no leaf.
    leaves, _ = storage.leaves(states)
    storage.control.check([leaf_name(each.path) for each in leaves])
    name = leaf.name or "state"
    why, advice = _reason(storage, leaf)
    raise ShardingError(
        f"state leaf '{name}' is in the host's memory, and {step_name()} stores it on "
        f"the devices{why}.\n{called()}{advice}, or move the state with "
        "step.shard(state)."
    )


def _moving(storage: Storage, states: tuple[Any, ...]) -> Iterator[Leaf]:
    """The leaves that come in the host's memory, and are not stored there."""
    leaves, _ = storage.leaves(states)
    for x, leaf in zip(jax.tree.leaves(states), leaves, strict=True):
        if leaf.memory != HOST and isinstance(x, jax.Array) and is_on_host(x):
            yield leaf


def _reason(storage: Storage, leaf: Leaf) -> tuple[str, str]:
    """Why a leaf is stored on the devices, and what to do."""
    name, shape, size = leaf.name or "state", leaf.aval.shape, leaf.aval.size
    asked = storage.control.of(leaf_name(leaf.path)).offload
    if asked is None:
        advice = (
            f"Pass the offload of the step that stored it, such as {{{name!r}: 'host'}}"
        )
        return "", f"{advice}, to fully_shard"
    if compat.is_key(leaf.aval.dtype):
        return ", as PRNG keys are", "Leave it on the devices where it is made"
    if not shape:
        return ", as scalars are", "Leave it on the devices where it is made"
    if size < storage.min_size:
        why = f": of shape {shape}, it has fewer elements than {storage.min_size=}"
        return why.replace("storage.", ""), "Give the leaf the shape that it had"
    return f": offload={asked!r} has chosen others", "Give it offload='host'"
