"""What the leaves of a state are called, whichever of a step's arguments it comes as.

In: the state arguments of a step, as far as they are known, and a tree of states. Out:
the same tree with names: those that the leaves have in plans and in options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex

import jax
from jax.tree_util import DictKey, SequenceKey

from shardfn._core.argument_values import count_of
from shardfn._core.control import Control
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaves import leaf_name, names_text
from shardfn._core.limits import BATCH_KINDS
from shardfn._core.memories import HOST
from shardfn._core.named_states import NamedStates, StateKey
from shardfn._core.recent import Recent

Argument = str | SupportsIndex | Sequence[str | SupportsIndex]
"""The name or position of a state argument; of several, those of each."""

Shapes = Sequence[tuple[int, ...]]
Kinds = dict[Any, tuple[str, ...]]
"""By structure and shapes of a state, the arguments that were such."""


@dataclass(frozen=True, slots=True)
class StateReading:
    """Which state arguments a tree is.

    Attributes:
      names: of the argument that it is, or of those that it is a tuple of, or a
        dictionary of by name; none if the step has one state, or it is not known to
        have several.
      is_several: whether it is such a tuple or dictionary.
      is_part: whether the step has states besides.
    """

    names: tuple[str, ...] = ()
    is_several: bool = False
    is_part: bool = False

    def paths(self, paths: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Tree paths in the tree, as those of states that are named."""
        keys = {name: StateKey(name, self.is_part) for name in self.names}
        if not self.is_several:
            return [(*keys.values(), *path) for path in paths]
        by_key: dict[Any, StateKey] = {DictKey(name): key for name, key in keys.items()}
        by_key |= {SequenceKey(i): key for i, key in enumerate(keys.values())}
        return [(by_key[path[0]], *path[1:]) for path in paths]

    def states(self, tree: Any) -> tuple[Any, ...]:
        """The tree as states that are named, with the same leaves in the same order."""
        if not self.names:
            return (tree,)
        each = tree if self.is_several else (tree,)
        if isinstance(each, dict):
            each = [each[name] for name in self.names]
        return NamedStates(self.names, each, self.is_part)


THE_STATE = StateReading()
"""A tree whose leaves are called by their paths in it."""


@dataclass(frozen=True, slots=True)
class StateNames:
    """The state arguments of a step.

    Leaves are called by their paths in the state; where a step has several, the name of
    the argument comes first. Which of them a tree is follows from what the step was
    given together, or else is asked where options depend on it.

    Attributes:
      parameters: what the step calls its arguments, by position.
      positions: those that the user says are state; None if that is found by calls.
      seen: the states that came together, by the names of all of them.
      parts: the same of states that came without the others, as what the user said.
    """

    parameters: tuple[str, ...] = ()
    positions: tuple[int, ...] | None = None
    seen: Recent[tuple[str, ...], Kinds] = field(
        default_factory=lambda: Recent(BATCH_KINDS), compare=False, repr=False
    )
    parts: Recent[tuple[str, ...], Kinds] = field(
        default_factory=lambda: Recent(BATCH_KINDS), compare=False, repr=False
    )

    @property
    def known(self) -> tuple[str, ...]:
        """The names of the state arguments; none where they are not known yet."""
        if self.positions is not None:
            return tuple(map(self._name, self.positions))
        return next(reversed(self.seen), ())

    @property
    def may_be(self) -> tuple[str, ...]:
        """The arguments that may be state, where that is not known yet."""
        return () if self.known else self.parameters

    def see(self, states: tuple[Any, ...], shapes: Shapes) -> None:
        """Notes states that came together, or are said to be parts, with leaves of
        these shapes."""
        if not isinstance(states, NamedStates):
            return
        names, start = self.known, 0
        if states.is_part and not set(states.names) <= set(names):
            return  # it may be several
        if self.positions is None and not states.is_part:
            order = {name: i for i, name in enumerate(self.parameters)}
            names = sorted(states.names, key=lambda name: order.get(name, len(order)))
        notes = self.parts if states.is_part else self.seen
        kinds = notes.get(tuple(names), {})
        for name, state in zip(states.names, states, strict=True):
            tree = jax.tree.structure(state)
            end = start + tree.num_leaves
            kind = tree, tuple(shapes[start:end])
            if name not in kinds.get(kind, ()):
                kinds[kind] = (*kinds.get(kind, ()), name)
            start = end
        notes[tuple(names)] = kinds

    def reading(
        self,
        tree: Any,
        paths: Sequence[tuple[Any, ...]],
        shapes: Shapes,
        control: Control,
        argument: Argument | None = None,
        is_stored: bool = False,
    ) -> StateReading:
        """Which state arguments a tree is.

        Args:
          tree: its structure.
          paths: the paths of its leaves.
          shapes: the shapes of its leaves.
          control: what is asked of leaves by their names.
          argument: what the user says that it is.
          is_stored: whether it is one that the step has stored, such as to be saved.

        Returns:
          The reading. If nothing is asked that depends on it, and several would do, one
          that names all of these, or none.

        Raises:
          ShardingError: several would do, or it cannot be what the user says.
        """
        if argument is not None:
            return self._given(argument, tree)
        if len(self.known) < 2:
            return THE_STATE
        every = self._possible(tree)
        found = [each for each in every if _is_seen(each, tree, shapes, self.seen)]
        together = _by_name(tree, self.known)
        if together is not None and not found:
            return StateReading(together, is_several=True)
        if is_stored and not found:
            found = [each for each in every if _is_seen(each, tree, shapes, self.parts)]
        readings = found or every
        if len(readings) == 1:
            return readings[0]
        if all(pattern == "*" for pattern in control.patterns) and not (
            found and _is_open(control)
        ):
            return THE_STATE
        names = dict.fromkeys(n for each in readings for n in each.names)
        joint = StateReading((names_text(list(names)),), is_part=True)
        for leaf, *others in zip(
            *(each.paths(paths) for each in (joint, *readings)), strict=True
        ):
            asked = [control.of(leaf_name(path)) for path in (leaf, *others)]
            if any(each != asked[0] for each in asked) or (found and _is_open(control)):
                self._ask(readings, list(map(leaf_name, others)))
        return joint

    def _name(self, position: int) -> str:
        names = self.parameters
        return names[position] if position < len(names) else str(position)

    def _possible(self, tree: Any) -> list[StateReading]:
        """What a tree may be: any state, or all of them."""
        alone = [StateReading((name,), is_part=True) for name in self.known]
        together = StateReading(self.known, is_several=True)
        return [together, *alone] if _is_tuple(tree, len(self.known)) else alone

    def _given(self, argument: Argument, tree: Any) -> StateReading:
        """The reading that the user asks for."""
        listed = isinstance(argument, tuple | list)
        asked: tuple[Any, ...] = tuple(argument) if listed else (argument,)
        if not self.known:
            raise ShardingError(
                f"argument={argument!r} names a state argument of {step_name()}, and "
                f"which of its arguments are state is found when it is first called or "
                f"planned.\n{called()}"
                "Say it with state_argnums=, as in fully_shard(train_step, mesh, "
                "state_argnums=(0, 1)), or leave argument= out."
            )
        names = []
        for each in asked:
            position = count_of(each)
            name = each if position is None else self._name(position)
            if not isinstance(name, str) or name not in self.known:
                raise ShardingError(
                    f"argument={argument!r} is no state argument of {step_name()}: "
                    f"{each!r} is not one of {self._known_text()}.\n{called()}"
                    "Pass the name or the position of one of them, or a tuple of "
                    "names for a tuple of such states."
                )
            names.append(name)
        if not listed:
            one = StateReading((names[0],), is_part=True)
            return one if len(self.known) > 1 else THE_STATE
        by_name = _by_name(tree, names)
        if len(set(names)) < len(names) or not (by_name or _is_tuple(tree, len(names))):
            raise ShardingError(
                f"argument={argument!r} names {len(names)} states, and the state is no "
                f"tuple of as many different ones.\n{called()}"
                "Pass one tree for each name, in their order; or one name, not in a "
                "tuple, for one tree."
            )
        is_part = len(names) < len(self.known)
        return StateReading(by_name or tuple(names), is_several=True, is_part=is_part)

    def _ask(self, readings: Sequence[StateReading], names: Sequence[str]) -> NoReturn:
        """Raises for a tree that may be several arguments."""
        each = [repr(x.names if x.is_several else x.names[0]) for x in readings]
        called_so = " or ".join(f"'{name}'" for name in dict.fromkeys(names))
        raise ShardingError(
            f"it cannot be told which state of {step_name()} this is, of "
            f"{self._known_text()}, and options ask different things of them.\n"
            f"  a leaf of it would be {called_so}\n{called()}"
            f"Say which it is: argument={' or argument='.join(each)}. Or pass all of "
            "them at once, in a dictionary by these names."
        )

    def _known_text(self) -> str:
        return ", ".join(f"'{name}'" for name in self.known)


def _is_seen(
    reading: StateReading, tree: Any, shapes: Shapes, notes: Mapping[Any, Kinds]
) -> bool:
    """Whether the states that were noted were such."""
    parts = tree.children() if reading.is_several else [tree]
    start = 0
    for name, part in zip(reading.names, parts, strict=True):
        end = start + part.num_leaves
        kind = part, tuple(shapes[start:end])
        if not any(name in kinds.get(kind, ()) for kinds in notes.values()):
            return False
        start = end
    return True


def _is_open(control: Control) -> bool:
    """Whether plans choose the memory of some leaves: it is known by their names."""
    return any(each not in (None, HOST) for each in control.asked("offload"))


def _by_name(tree: Any, names: Sequence[str]) -> tuple[str, ...] | None:
    """The keys of a dictionary whose keys are these names; None for other trees."""
    kind, keys = tree.node_data() or (None, ())
    is_named = kind is dict and sorted(map(str, keys)) == sorted(names)
    return tuple(keys) if is_named and all(key in names for key in keys) else None


def _is_tuple(tree: Any, count: int) -> bool:
    """Whether a structure is a plain tuple, or list, of so many trees."""
    data = tree.node_data()
    is_plain = data is not None and data[0] in (tuple, list)
    return is_plain and len(tree.children()) == count
