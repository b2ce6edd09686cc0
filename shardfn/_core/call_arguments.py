"""What the arguments of a call are: which are state, where they come back.

In: arguments as they were passed. Out: the state arguments and the others, and back;
places in what a step returns.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import (
    DictKey,
    SequenceKey,
    tree_flatten_with_path,
    treedef_is_leaf,
)

from shardfn._core.limits import STATE_DEPTH

Position = int | str
"""Of an argument; its name, if it has no position."""
Path = tuple[Any, ...]
"""Keys that lead to a part of what a step returns."""

NO_PART: Any = object()
FIRST: Path = (SequenceKey(0),)


@dataclass(frozen=True, slots=True)
class StateArguments:
    """What the arguments of a step are.

    Attributes:
      arguments: positions of those that are state; the last may be read only.
      results: where each that comes back does; None if the first results are the new
        states.
      caches: positions of arguments of the batch that come back written in place, and
        where.
      written: states that are written in place as caches are, and where they come back.
      hints: those of them that are not of the state.
      by_hand: whether the user says so.
      parameters: what the step calls its arguments, by position.
      notes: for people: what was found, and what comes back but is not state.
      asks: whether the states, which are written in place, may as well be caches, and
        another argument the state: one that arrives stored is, else it is asked.
    """

    arguments: tuple[Position, ...] = (0,)
    results: tuple[Path, ...] | None = None
    caches: tuple[tuple[Position, Path], ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    by_hand: bool = False
    parameters: tuple[str, ...] = ()
    written: tuple[tuple[Position, Path], ...] = ()
    asks: bool = False

    @property
    def places(self) -> tuple[Path, ...]:
        """Where each state that comes back does."""
        if self.results is not None:
            return self.results
        return tuple((SequenceKey(i),) for i in range(len(self.arguments)))

    @property
    def is_forward_only(self) -> bool:
        """Whether no state comes back."""
        return self.results == ()

    @property
    def read_only(self) -> tuple[Position, ...]:
        """Positions of the states that are read and do not come back."""
        return self.arguments[len(self.places) :]

    def returned(self, states: Any) -> int:
        """How many leaves of the states come back: the first ones.

        Args:
          states: structure of the tuple of all of them.
        """
        count = len(self.places)
        return sum(child.num_leaves for child in states.children()[:count])


def children(tree: Any) -> dict[Any, Any] | None:
    """The children of the root of a pytree by key; None for a leaf."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return {path[0]: x for path, x in flat} if all(path for path, _ in flat) else None


def part(tree: Any, path: Path) -> Any:
    """The part of a pytree at a path."""
    for key in path:
        if type(key) is SequenceKey and type(tree) in (tuple, list):
            tree = tree[key.idx]
        else:
            tree = (children(tree) or {})[key]
    return tree


def has_part(tree: Any, path: Path) -> bool:
    """Whether a pytree has a part at a path."""
    for key in path:
        tree = (children(tree) or {}).get(key, NO_PART)
    return tree is not NO_PART


def parts(tree: Any, depth: int = STATE_DEPTH) -> list[tuple[Path, Any]]:
    """The parts of a pytree and their paths, itself first, those further in last."""
    found, level = [((), tree)], [((), tree)]
    for _ in range(depth):
        level = [
            ((*path, key), child)
            for path, outer in level
            for key, child in (children(outer) or {}).items()
        ]
        found += level
    return found


@dataclass(frozen=True, slots=True)
class _Number:
    """An object, as containers may make arrays of plain numbers (brax's `UInt64`)."""

    value: int


def numbered(treedef: Any, numbers: Sequence[int]) -> Any:
    """A pytree of numbers; classes that take arrays alone are lists of theirs."""
    leaves = [_Number(number) for number in numbers]
    with contextlib.suppress(Exception):  # of a class of the user's
        made = jax.tree.unflatten(treedef, leaves)
        if all(type(x) is _Number for x in jax.tree.leaves(made)):
            return made
    return in_plain(treedef, leaves, lambda *of: list(of[1]))


def numbers_in(tree: Any) -> list[int]:
    """The numbers in such a pytree or a part of it, in order."""
    return [leaf.value for leaf in jax.tree.leaves(tree)]


def in_plain(
    treedef: Any,
    leaves: Sequence[Any],
    of_class: Callable[[Any, list[Any], int], Any],
    depth: int = 0,
) -> Any:
    """A pytree in which plain containers stay, and others are what is made of them.

    Args:
      treedef: its structure.
      leaves: its leaves.
      of_class: makes something of the structure and the leaves of another container,
        and of how deep it is.
      depth: how deep the pytree is in another one.
    """
    if treedef_is_leaf(treedef):
        return jax.tree.unflatten(treedef, leaves)
    data, children, rest = treedef.node_data(), treedef.children(), iter(leaves)
    if data is None or not is_plain(data[0]):
        return of_class(treedef, list(leaves), depth)
    each = ((x, [next(rest) for _ in range(x.num_leaves)]) for x in children)
    made = [in_plain(x, own, of_class, depth + 1) for x, own in each]
    kind, keys = data
    if issubclass(kind, dict):
        return kind(zip(keys, made, strict=True))
    return kind(*made) if hasattr(kind, "_fields") else kind(made)


def is_plain(kind: type) -> bool:
    """Whether a container takes any value as it is: those of Python, and our own."""
    is_named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named or kind in (dict, list, tuple, Named)


@jax.tree_util.register_pytree_with_keys_class
class Named(dict[str, Any]):
    """Arguments that have no position: an argument of their own, the last one."""

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[str, ...]]:
        """Their values in the order of their names."""
        names = tuple(sorted(self))
        return [(DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Sequence[Any]) -> "Named":
        return cls(zip(names, values, strict=True))


@dataclass(frozen=True, slots=True)
class ArgumentKey:
    """The key of an argument among those that are not state: it is called as the step
    calls it. Those that are passed by name alone have one key."""

    idx: int
    name: str
    by_name: bool = False

    def __str__(self) -> str:
        return self.name


def argument_of(path: Path) -> ArgumentKey | None:
    """The argument that a leaf of a `Rest` is in; None for other paths."""
    match path:
        case (ArgumentKey(by_name=True) as key, DictKey() as name, *_):
            return ArgumentKey(key.idx, str(name.key), by_name=True)
        case (ArgumentKey() as key, *_):
            return key
    return None


@jax.tree_util.register_pytree_with_keys_class
class Rest(tuple[Any, ...]):
    """The arguments of a call that are not state, and which those are that are."""

    meaning: StateArguments

    def __new__(cls, values: Sequence[Any], meaning: StateArguments) -> "Rest":
        made = super().__new__(cls, values)
        made.meaning = meaning
        return made

    def tree_flatten_with_keys(self) -> tuple[list[Any], StateArguments]:
        """The arguments in order."""
        names = without(self.meaning.parameters, self.meaning.arguments)
        names += map(str, range(len(names), len(self)))
        keys = [ArgumentKey(i, name) for i, name in enumerate(names)]
        if self and isinstance(self[-1], Named):
            keys[len(self) - 1] = ArgumentKey(len(self) - 1, "keywords", by_name=True)
        return list(zip(keys, self, strict=False)), self.meaning

    @classmethod
    def tree_unflatten(cls, meaning: StateArguments, values: Sequence[Any]) -> "Rest":
        return cls(tuple(values), meaning)


def meaning_of(rest: Any) -> StateArguments:
    """What the arguments are, of the structure of a `Rest`."""
    return rest.node_data()[1]


def with_caches(
    rest: Any, leaves: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments that are not state, of the structure of a `Rest`, made of these
    leaves: the others, None where a cache belongs, and the caches."""
    made = list(jax.tree.unflatten(_values_tree(rest), leaves))
    places = cache_places(meaning_of(rest))
    caches = tuple(made[i] for i in places)
    for i in places:
        made[i] = None
    return tuple(made), caches


@functools.lru_cache(maxsize=64)
def _values_tree(rest: Any) -> Any:
    """The structure of the values of a `Rest`, as a tuple."""
    return jax.tree_util.treedef_tuple(rest.children())


def cache_places(meaning: StateArguments) -> tuple[int, ...]:
    """Positions of the caches among the arguments that are not state."""
    before = [p for p in meaning.arguments if not isinstance(p, str)]
    found = [p for p, _ in meaning.caches if not isinstance(p, str)]
    return tuple(p - sum(b < p for b in before) for p in found)


def joined(
    batch: Sequence[Any], caches: Sequence[Any], meaning: StateArguments
) -> Rest:
    """What `with_caches` took apart."""
    made = list(batch)
    for i, cache in zip(cache_places(meaning), caches, strict=True):
        made[i] = cache
    return Rest(made, meaning)


def by_place(args: Sequence[Any]) -> dict[Position, Any]:
    """Arguments by position, and by name those that have none."""
    if not args or not isinstance(args[-1], Named):
        return dict(enumerate(args))
    return {**dict(enumerate(args[:-1])), **args[-1]}


def without(args: Sequence[Any], states: Collection[Position]) -> list[Any]:
    """Arguments without some of them."""
    rest = [x for i, x in enumerate(args) if i not in states]
    if rest and isinstance(rest[-1], Named):
        named = Named({k: v for k, v in rest.pop().items() if k not in states})
        rest += [named] if named else []
    return rest


def rejoined(states: Sequence[Any], rest: Rest) -> tuple[Any, ...]:
    """All arguments of a call in the step's own order."""
    args, places = list(rest), rest.meaning.arguments
    named = args.pop() if args and isinstance(args[-1], Named) else Named()
    given = list(zip(places, states, strict=True))
    named = Named({**named, **{k: x for k, x in given if isinstance(k, str)}})
    positions = [(i, x) for i, x in given if not isinstance(i, str)]
    for position, state in sorted(positions, key=lambda pair: pair[0]):
        args.insert(position, state)
    return (*args, named) if named else tuple(args)
