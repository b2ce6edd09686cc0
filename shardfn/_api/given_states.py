"""The states that a step inside `shard_map` or `pmap` was given, on their whole shapes.

In: whole states, as `init`, `shard`, `specs` and `with_state` see them. Out: the leaves
of a state of which one device's shards are there, and how they are stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import treedef_is_leaf

from shardfn._core.leaves import Leaf
from shardfn._core.named_states import NamedStates
from shardfn._core.sharding import Axes, Sharding, local_shape
from shardfn.storage._leaves import leaves_of

Shapes = tuple[tuple[int, ...], ...]
Partition = Callable[[Sequence[Leaf], Axes], tuple[Sharding, ...]]


@dataclass(frozen=True, slots=True)
class StatePart:
    """A state, or a part of one: it is stored as in the whole of it.

    Attributes:
      whole: the leaves of the state.
      treedef: structure of the part.
      start: where its leaves start among those of the state.
    """

    whole: tuple[Leaf, ...]
    treedef: Any
    start: int = 0

    @property
    def own(self) -> slice:
        """Which leaves of the state are the part's."""
        return slice(self.start, self.start + self.treedef.num_leaves)

    @property
    def shapes(self) -> Shapes:
        return tuple(leaf.aval.shape for leaf in self.whole[self.own])


@dataclass(frozen=True, slots=True)
class Stored:
    """How a state is stored.

    Attributes:
      shapes: the whole shapes of its leaves.
      shardings: how each is split.
    """

    shapes: Shapes
    shardings: tuple[Sharding, ...]

    def local(self, axes: Axes) -> Shapes:
        """The shapes of one device's shards."""
        pairs = zip(self.shapes, self.shardings, strict=True)
        return tuple(local_shape(shape, s, axes) for shape, s in pairs)


@dataclass(slots=True)
class GivenStates:
    """The states that a step was given.

    Attributes:
      by_hand: the states that it takes and no others, in the order of the arguments;
        None if it takes those that it has seen.
    """

    by_hand: tuple[StatePart, ...] | None = None
    _seen: dict[Any, list[StatePart]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._seen.values()))

    def only(self, states: Sequence[Any], names: Sequence[str]) -> "GivenStates":
        """These states and no others, in the order of the arguments of these names."""
        made = [_given(*each) for each in _in_order(states, names)]
        return GivenStates(tuple(made), _with_parts(made))

    def see(self, state: Any, named: tuple[Any, ...]) -> StatePart | None:
        """A whole state from now on, whose leaves have the names that they have in
        `named`; None if the step was given others by hand."""
        given = _given(state, named)
        if self.by_hand is not None:
            alike = self._seen.get(given.treedef, [])
            return next((x for x in alike if x.shapes == given.shapes), None)
        for treedef, parts in _with_parts([given]).items():
            known = self._seen.setdefault(treedef, [])
            known += [x for x in parts if x not in known]
        return given

    def readings(
        self,
        shards: Any,
        axes: Axes,
        partition: Partition,
        number: int = 0,
        of: int = 1,
    ) -> list[Stored]:
        """What the shards of one device may be, of the states that were given.

        Args:
          shards: the state on one device.
          axes: the mesh axes.
          partition: how the leaves of a state are stored.
          number: of how many states of a call it is, in order.
          of: how many those are.

        Returns:
          The readings that differ.
        """
        treedef = jax.tree.structure(shards)
        local = tuple(jax.numpy.shape(x) for x in jax.tree.leaves(shards))
        known = self._seen.get(treedef, [])
        if self.by_hand is not None and len(self.by_hand) == of > 1:
            known = [x for x in self.by_hand[number : number + 1] if x in known]
        found = {Stored(x.shapes, partition(x.whole, axes)[x.own]): None for x in known}
        return [x for x in found if x.local(axes) == local]

    def shapes_of(self, shards: Any) -> list[Shapes]:
        """The whole shapes of the states with the structure of `shards`."""
        known = self._seen.get(jax.tree.structure(shards), [])
        return list(dict.fromkeys(x.shapes for x in known))


def _in_order(
    states: Sequence[Any], names: Sequence[str]
) -> list[tuple[Any, tuple[Any, ...]]]:
    """States, and each as the one that is called so, if the step has several."""
    if len(names) < 2 or len(names) != len(states):
        return [(state, (state,)) for state in states]
    pairs = zip(names, states, strict=True)
    return [(state, NamedStates([name], [state], True)) for name, state in pairs]


def _given(state: Any, named: tuple[Any, ...]) -> StatePart:
    leaves, _ = leaves_of(named, "state")
    return StatePart(tuple(leaves), jax.tree.structure(state))


def _with_parts(states: Sequence[StatePart]) -> dict[Any, list[StatePart]]:
    """States by structure, and the containers right inside them, which may be passed
    as arguments of their own."""
    out: dict[Any, list[StatePart]] = {}
    for state in states:
        parts, start = [state], 0
        for child in state.treedef.children():
            if child.num_leaves and not treedef_is_leaf(child):
                parts.append(StatePart(state.whole, child, start))
            start += child.num_leaves
        for part in parts:
            known = out.setdefault(part.treedef, [])
            known += [part] if part not in known else []
    return out
