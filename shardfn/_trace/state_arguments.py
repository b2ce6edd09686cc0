"""Which arguments of a step are its state: those that come back.

In: the avals of the arguments and of what the step returns, and its program. Out: the
positions of the state, where each comes back, and what was not taken for state and why;
or an error that shows what might be meant.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shardfn._core import compat
from shardfn._core.call_arguments import (
    FIRST,
    Path,
    Position,
    StateArguments,
    part,
    parts,
)
from shardfn._core.limits import LIKE_STATE_DEPTH
from shardfn._core.program import Program
from shardfn._trace.dataflow import Dimensions, Place, Update, updates
from shardfn._trace.raw_keys import raw_keys
from shardfn._trace.state_texts import (
    changes,
    found_note,
    other_note,
    read_only_note,
    refuse_gradients,
    refuse_readings,
)


def find_state(
    arguments: Mapping[Position, Any],
    names: Mapping[Position, str],
    out: Any,
    program: Callable[[], Program],
) -> StateArguments:
    """Finds the arguments that come back.

    Args:
      arguments: pytrees of `ShapeDtypeStruct`, in order.
      names: what to call them in messages.
      out: what the step returns, a pytree of `ShapeDtypeStruct`.
      program: makes the program of the step, whose arguments are the leaves of
        `arguments`; called only if something is like an argument.

    Returns:
      The state, and where it comes back.

    Raises:
      ShardingError: it cannot be told; or only gradients come back.
    """
    places = parts(out)
    alike = {
        position: [path for path, tree in places if _same(tree, argument)]
        for position, argument in arguments.items()
        if jax.tree.leaves(argument)
    }
    alike = {position: paths for position, paths in alike.items() if paths}
    found = None
    if alike or _is_first(arguments, out):
        found = _Search(arguments, names, out, alike, program()).found()
    if found is None:
        changed = tuple(changes(arguments, names, out, {0: FIRST}))
        found = StateArguments(notes=changed, hints=changed)
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two pytrees have the same containers, names, shapes and dtypes."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def _is_first(arguments: Mapping[Position, Any], out: Any) -> bool:
    """Whether the first result has the structure of the first argument: it is the new
    state, or one with a mistake that the trace reports. An array has to match."""
    if 0 not in arguments or not isinstance(out, (tuple, list)) or not out:
        return False
    given = arguments[0]
    if jax.tree.structure(given) != jax.tree.structure(out[0]):
        return False
    return not _is_array(given) or _same(given, out[0])


def _is_array(tree: Any) -> bool:
    return isinstance(tree, jax.ShapeDtypeStruct)


def is_like_rows(tree: Any) -> bool:
    """Whether the leaves of an argument might be rows of one batch: as many of each."""
    leaves = jax.tree.leaves(tree)
    return len({leaves[i].shape[0] for i in _dimmed(tree)}) <= 1


def _dimmed(tree: Any) -> list[int]:
    """Which leaves of a pytree have dimensions that a batch might be split on."""
    leaves = enumerate(jax.tree.leaves(tree))
    return [i for i, x in leaves if x.shape and not compat.is_key(x.dtype)]


@dataclass(slots=True)
class _Search:
    """The search in one program.

    Attributes:
      arguments: pytrees by position.
      names: their names.
      out: what the step returns.
      alike: for arguments that might come back, where.
      program: the program of the step.
    """

    arguments: Mapping[Position, Any]
    names: Mapping[Position, str]
    out: Any
    alike: Mapping[Position, Sequence[Path]]
    program: Program
    _starts: dict[Position, int] = field(default_factory=dict)
    _updates: list[Update] = field(default_factory=list)
    _pairs: dict[Position, Path] = field(default_factory=dict)
    _classes: dict[Position, list[list[Place]]] = field(default_factory=dict)
    _rows: set[Place] = field(default_factory=set)

    def found(self) -> StateArguments | None:
        """The state; None if nothing comes back, or just the first argument first."""
        start = 0
        for position, argument in self.arguments.items():
            self._starts[position] = start
            start += len(jax.tree.leaves(argument))
        self._updates = updates(self.program)
        self._pairs = self._matched_pairs()
        if not self._pairs:
            self._check_gradients()
            return None
        self._read_dimensions()
        first = self._certain()
        if first is None:
            fixed = self._read_only_of_batch()
            if not fixed:
                refuse_readings(self.names, self._pairs, (), self._has_cache())
            return self._result((), fixed)
        own = {place for dims in self._classes[first] for place in dims}
        state = [p for p in self._pairs if p == first or self._is_state(p, own)]
        fixed = [p for p in self.arguments if self._is_read_only(p, state, own)]
        is_plain = not fixed and set(self.alike) <= {0} and self._pairs == {0: FIRST}
        return None if is_plain else self._result(state, fixed)

    def _result(
        self, state: Sequence[Position], fixed: Sequence[Position]
    ) -> StateArguments:
        """What was found: the state that comes back, and that which is read only."""
        pairs, names = self._pairs, self.names
        others = [p for p in pairs if p not in state]
        caches = [
            p for p in others if not isinstance(p, str) and self._is_cache(p, pairs[p])
        ]
        notes = [
            other_note(names[p], pairs[p], p in caches, (*state, p)) for p in others
        ]
        notes += [read_only_note(names[p], bool(state)) for p in fixed]
        notes += changes(self.arguments, names, self.out, pairs)
        return StateArguments(
            arguments=(*state, *fixed),
            results=tuple(pairs[p] for p in state),
            caches=tuple((p, pairs[p]) for p in caches),
            notes=(found_note(names, pairs, state, fixed), *notes),
            hints=tuple(notes),
        )

    # What becomes of an argument

    def _updated(
        self, position: Position, path: Path, leaves: Sequence[int]
    ) -> list[Update]:
        """Of some leaves, what has become of each at `path`; all sets are of itself
        alone."""
        tree = jax.tree.structure(self.out)
        numbers = jax.tree.unflatten(tree, range(tree.num_leaves))
        at, start = jax.tree.leaves(part(numbers, path)), self._starts[position]
        found = []
        for i in leaves:
            bit, new = 1 << (start + i), self._updates[at[i]]
            own = new.of & bit, new.same & bit, new.written & bit
            found.append(Update(*own, new.gradient))
        return found

    def _with_dims(self, position: Position, path: Path) -> list[Update]:
        return self._updated(position, path, _dimmed(self.arguments[position]))

    def _is_kept(self, position: Position, path: Path) -> bool:
        """Whether an argument is updated at `path`. An array that is handed on as it
        is says nothing."""
        updated = self._with_dims(position, path)
        if _is_array(self.arguments[position]):
            updated = [u for u in updated if not u.same or u.written]
        return any(update.of for update in updated)

    def _is_unchanged(self, position: Position, path: Path) -> bool:
        """Whether an argument is handed on as it is, as far as it has dimensions."""
        updated = self._with_dims(position, path)
        return all(update.same and not update.written for update in updated)

    def _descends(self, position: Position) -> bool:
        """Whether a gradient goes into an argument's new value."""
        updated = self._with_dims(position, self._pairs[position])
        return any(update.of and update.gradient for update in updated)

    def _is_gradient(self, position: Position, path: Path) -> bool:
        """Whether what comes back at `path` is the gradient of something that is like
        the argument, and no new value of it."""
        count = len(jax.tree.leaves(self.arguments[position]))
        updated = self._updated(position, path, range(count))
        return any(u.gradient for u in updated) and not any(u.of for u in updated)

    def _is_anew(self, position: Position) -> bool:
        """Whether an argument that may be rows is not what the first result was."""
        if not is_like_rows(self.arguments[position]):
            return False
        if FIRST not in self.alike.get(position, ()):
            return False
        updated = self._with_dims(position, FIRST)
        return bool(updated) and not any(update.of for update in updated)

    def _is_cache(self, position: Position, path: Path) -> bool:
        """Whether something is written into each leaf that changes, and the others
        stay."""
        updated = self._with_dims(position, path)
        all_same = all(update.same for update in updated)
        return all_same and any(update.written for update in updated)

    def _has_cache(self) -> bool:
        return any(self._is_cache(p, path) for p, path in self._pairs.items())

    def _check_gradients(self) -> None:
        """Raises if nothing comes back but gradients."""
        for position, paths in self.alike.items():
            for path in paths:
                if self._is_gradient(position, path):
                    refuse_gradients(self.names[position], path)

    def _matched_pairs(self) -> dict[Position, Path]:
        """The arguments that come back, and where: those that are updated there, in
        order; and the first as the first result."""
        kept = {
            p: [path for path in paths if self._is_kept(p, path)]
            for p, paths in self.alike.items()
        }
        outermost = [path for paths in kept.values() for path in paths]
        options = {
            p: [path for path in paths if not _lies_in(path, outermost)]
            for p, paths in kept.items()
        }
        chosen = _matched(options)
        is_first = _is_first(self.arguments, self.out)
        is_free = 0 not in chosen and FIRST not in chosen.values()
        if is_first and is_free and not self._is_gradient(0, FIRST):
            # What may be rows and is computed anew is rather a result that looks so.
            if not (chosen and self._is_anew(0)):
                chosen[0] = FIRST
        return {p: chosen[p] for p in self.arguments if p in chosen}

    # What lies along its dimensions

    def _read_dimensions(self) -> None:
        dimensions, keys = Dimensions(self.program), raw_keys(self.program)
        for position, argument in self.arguments.items():
            start = self._starts[position]
            self._classes[position] = [
                dimensions.of(self.program.inputs[start + i])
                for i in _dimmed(argument)
                if start + i not in keys
            ]
        self._rows = {
            dims[0]
            for position, argument in self.arguments.items()
            if position not in self._pairs and is_like_rows(argument)
            if not self._is_twin(argument, self._pairs)
            for dims in self._classes[position]
        }

    def _is_twin(self, argument: Any, others: Collection[Position]) -> bool:
        """Whether an argument is like one of some others, or like a part of it."""
        if _is_array(argument):
            return any(_same(argument, self.arguments[p]) for p in others)
        trees = (
            tree
            for p in others
            for _, tree in parts(self.arguments[p], LIKE_STATE_DEPTH)
        )
        return any(_same(argument, tree) for tree in trees)

    def _reaches(self, position: Position, rows: set[Place]) -> bool:
        """Whether some of these lie along a dimension of an argument."""
        return any(place in rows for dims in self._classes[position] for place in dims)

    # What is state

    def _certain(self) -> Position | None:
        """The argument that is state for certain; None if none is."""
        pairs, arguments = self._pairs, self.arguments
        left = [p for p in pairs if not self._is_of_rows(p)]
        if pairs.get(0) == FIRST:
            if not self._may_be_rows(0):
                if not left or 0 in left or self._is_kept(0, FIRST):
                    return 0
            else:
                rivals = [p for p in left if p != 0 and self._descends(p)]
                if 0 in left and rivals and not self._rows:
                    refuse_readings(self.names, pairs, rivals, self._has_cache())
                is_tree = not _is_array(arguments[0]) and not self._has_cache()
                if 0 in left or is_tree and not rivals and self._is_kept(0, FIRST):
                    return 0
        trees = [p for p in left if not _is_array(arguments[p])]
        arrays = [p for p in left if _is_array(arguments[p]) and pairs[p]]
        others = len(arguments) > len(pairs)
        return next(iter((*trees, *(arrays if others else ()))), None)

    def _may_be_rows(self, position: Position) -> bool:
        """Whether an argument that comes back may be a batch that the step changes."""
        is_unchanged = self._is_unchanged(position, self._pairs[position])
        may_be = is_like_rows(self.arguments[position]) and not is_unchanged
        return may_be and not self._descends(position)

    def _is_state(self, position: Position, own: set[Place]) -> bool:
        """Whether an argument that comes back is state, as one that is state for
        certain: its leaves have their first dimensions from that one, or different
        ones, so that they are not rows of one batch."""
        if self._is_of_rows(position):
            return False
        if all(dims[0] in own for dims in self._classes[position]):
            return True
        return not is_like_rows(self.arguments[position])

    def _is_of_rows(self, position: Position) -> bool:
        """Whether an argument that comes back has the rows of one that does not: in all
        of its leaves, or in those of a cache that are one. State has leaves without."""
        reached = [
            any(place in self._rows for place in dims)
            for dims in self._classes[position]
        ]
        if self._is_cache(position, self._pairs[position]):
            return any(reached)
        return bool(reached) and all(reached)

    def _is_read_only(
        self, position: Position, state: Sequence[Position], own: set[Place]
    ) -> bool:
        """Whether an argument that does not come back is like one that is state, or a
        part of it, as the parameters of a teacher are."""
        argument = self.arguments[position]
        if position in self._pairs or not self._is_twin(argument, state):
            return False
        if not _dimmed(argument) or self._reaches(position, self._rows):
            return False
        along = all(dims[0] in own for dims in self._classes[position])
        return along or not (_is_array(argument) or is_like_rows(argument))

    def _read_only_of_batch(self) -> list[Position]:
        """Where all that comes back is the batch's, the arguments that are parameters:
        trees without its rows, next to others with them."""
        if not all(map(self._is_of_rows, self._pairs)):
            return []
        rows = {dims[0] for p in self._pairs for dims in self._classes[p]}
        others = (p for p in self.arguments if p not in self._pairs)
        rest = [p for p in others if _dimmed(self.arguments[p])]
        batch = [p for p in rest if self._reaches(p, rows)]
        return [
            p
            for p in rest
            if p not in batch and not _is_array(self.arguments[p])
            if batch or not is_like_rows(self.arguments[p])
        ]


def _lies_in(path: Path, others: Sequence[Path]) -> bool:
    """Whether a path leads to something inside what another leads to."""
    return any(len(o) < len(path) and path[: len(o)] == o for o in others)


def _matched(options: Mapping[Position, Sequence[Path]]) -> dict[Position, Path]:
    """One path for as many arguments as can have one of their own, each the first of
    its options where it may be."""
    holder: dict[Path, Position] = {}

    def place(position: Position, tried: set[Path]) -> bool:
        for path in options[position]:
            if path in tried:
                continue
            tried.add(path)
            if path not in holder or place(holder[path], tried):
                holder[path] = position
                return True
        return False

    for position in options:
        place(position, set())
    return {position: path for path, position in holder.items()}
