"""The leaves of a call's arguments, and which of them are raw PRNG keys.

In: leaves of the state and of the batch, on global or local shapes. Out: the two sides
of a call as planning takes them; the raw keys, as a trace of the step tells.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardfn._core.call_arguments import Rest, StateArguments
from shardfn._core.errors import ShardingError
from shardfn._core.leaves import Leaf
from shardfn._core.sharding import Axes, Sharding, parts_of
from shardfn._trace.containers import close_avals, on_closed
from shardfn._trace.raw_keys import raw_keys, unread
from shardfn._trace.trace_step import trace_once


@dataclass(frozen=True, slots=True)
class Side:
    """The state arguments of a call, or the others: leaves, shardings, structure."""

    leaves: tuple[Leaf, ...]
    shardings: tuple[Sharding, ...]
    treedef: Any

    @property
    def key(self) -> Hashable:
        types = (
            (x.aval.shape, x.aval.dtype, x.aval.weak_type, x.auto, x.memory)
            for x in self.leaves
        )
        return self.treedef, self.shardings, *types

    @property
    def avals(self) -> Any:
        """The arguments as closed pytrees of `ShapeDtypeStruct`."""
        return close_avals(self.leaves, self.treedef)

    @property
    def opened(self) -> Any:
        """The same in the user's containers."""
        return jax.tree.unflatten(self.treedef, [leaf.aval for leaf in self.leaves])


def types_of(
    states: tuple[Sequence[Leaf], Any], batch: Any, leaves: Sequence[Leaf]
) -> Hashable:
    """What the raw keys among the leaves of a batch depend on."""
    types = ((x.aval.shape, x.aval.dtype) for x in (*states[0], *leaves))
    return states[1], jax.tree.structure(batch), *types


def keys_in(
    call: Callable[..., Any],
    batch: tuple[Any, ...],
    leaves: Sequence[Leaf],
    states: tuple[Sequence[Leaf], Any],
    axes: Axes,
) -> frozenset[int] | None:
    """Which leaves of a batch a step takes for raw keys, or does not read: a key is not
    read where dropout is off.

    Args:
      call: calls the step with its states and the rest.
      batch: the arguments that are not state.
      leaves: their leaves.
      states: the leaves of the state, and their structure.
      axes: the mesh axes.

    Returns:
      Positions among `leaves`; None if the step cannot be traced.
    """
    meaning = batch.meaning if isinstance(batch, Rest) else StateArguments()
    structure = jax.tree.structure(tuple(batch))
    closed = close_avals(*states), close_avals(leaves, structure)
    run = on_closed(lambda old, rest: call(old, Rest(rest, meaning)), [])
    made = trace_once(run, closed, axes)
    if made is None:
        return None
    with contextlib.suppress(ShardingError):
        program = made.program()
        found = raw_keys(program) | unread(program)
        return frozenset(i - len(states[0]) for i in found)
    return None


def without_row(leaf: Leaf) -> Leaf:
    """A leaf of which each device keeps a row, as the step sees it."""
    return with_shape(leaf, leaf.aval.shape[1:])


def with_shape(leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
    """A leaf of another shape."""
    dtype, weak = leaf.aval.dtype, leaf.aval.weak_type
    return replace(leaf, aval=jax.ShapeDtypeStruct(shape, dtype, weak_type=weak))


def other_shapes(
    leaves: Sequence[Leaf], split: Sequence[Sharding], axes: Axes, is_local: bool
) -> list[Leaf]:
    """Leaves of one device's part on global shapes, or the other way round."""
    out = []
    for leaf, sharding in zip(leaves, split, strict=True):
        shape = list(leaf.aval.shape)
        for dim in range(len(shape)):
            parts = parts_of(sharding, dim, axes)
            shape[dim] = shape[dim] * parts if is_local else shape[dim] // parts
        out.append(with_shape(leaf, tuple(shape)))
    return out
