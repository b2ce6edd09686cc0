"""Which arguments of a step are its state: those that come back.

In: the avals of the arguments and of what the step returns, and its program. Out: the
positions of the state, where each comes back, and what was not taken for state and why;
or an error that shows what might be meant.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
from jax.tree_util import SequenceKey, tree_flatten_with_path

from shardfn._core import compat
from shardfn._core.call_arguments import (
    FIRST,
    Path,
    Position,
    StateArguments,
    part,
    parts,
)
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.program import Program
from shardfn._trace.dataflow import Dimensions, Place, Update, updates


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
        `arguments`; called only if structure does not tell.

    Returns:
      The state, and where it comes back.

    Raises:
      ShardingError: it cannot be told.
    """
    places = parts(out)
    alike = {
        position: [path for path, tree in places if _same(tree, argument)]
        for position, argument in arguments.items()
        if jax.tree.leaves(argument)
    }
    alike = {position: paths for position, paths in alike.items() if paths}
    if not alike or (_is_first(arguments, out) and set(alike) <= {0}):
        changed = tuple(_changes(arguments, names, out, {0: FIRST}))
        return StateArguments(notes=changed, hints=changed)
    return _Search(arguments, names, out, alike, program()).found()


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


def _is_like_rows(tree: Any) -> bool:
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
    _notes: list[str] = field(default_factory=list)

    def found(self) -> StateArguments:
        start = 0
        for position, argument in self.arguments.items():
            self._starts[position] = start
            start += len(jax.tree.leaves(argument))
        self._updates = updates(self.program)
        pairs = self._pairs()
        dimensions = Dimensions(self.program)
        twins = [self.arguments[p] for p in pairs]
        rows = {
            dimensions.of(value)[0]
            for position, argument in self.arguments.items()
            if position not in pairs and _is_like_rows(argument)
            if not any(_same(argument, twin) for twin in twins)
            for value in self._values(position, argument)
        }
        classes = {
            p: [dimensions.of(v) for v in self._values(p, self.arguments[p])]
            for p in pairs
        }
        batch = {p for p in pairs if self._is_of_rows(p, pairs[p], classes[p], rows)}
        pairs_left = {p: path for p, path in pairs.items() if p not in batch}
        first = self._first(pairs, pairs_left)
        if first is None:
            if pairs and not _is_first(self.arguments, self.out):
                self._refuse(pairs)
            return StateArguments()
        own = {place for dims in classes[first] for place in dims}
        state = [
            p
            for p in pairs
            if p == first or p not in batch and self._is_state(p, classes[p], own)
        ]
        caches = [p for p in pairs if p not in state and self._is_cache(p, pairs[p])]
        caches = [p for p in caches if not isinstance(p, str)]
        for p in pairs:
            if p not in state:
                self._note(p, pairs[p], p in caches, (*state, p))
        changed = _changes(self.arguments, self.names, self.out, pairs)
        each = (f"{self.names[p]}, {_where(pairs[p])}" for p in state)
        self._notes.insert(0, f"state: argument {'; argument '.join(each)}")
        return StateArguments(
            arguments=tuple(state),
            results=tuple(pairs[p] for p in state),
            caches=tuple((p, pairs[p]) for p in caches),
            notes=(*self._notes, *changed),
            hints=(*self._notes[1:], *changed),
        )

    def _values(self, position: Position, argument: Any) -> list[int]:
        """The program's values of the leaves of an argument that have dimensions."""
        start = self._starts[position]
        return [self.program.inputs[start + i] for i in _dimmed(argument)]

    def _updated(self, position: Position, path: Path) -> list[Update]:
        """Of each leaf with dimensions, what has become of it at `path`; all sets are
        of itself alone."""
        tree = jax.tree.structure(self.out)
        numbers = jax.tree.unflatten(tree, range(tree.num_leaves))
        at, start = jax.tree.leaves(part(numbers, path)), self._starts[position]
        found = []
        for i in _dimmed(self.arguments[position]):
            bit, new = 1 << (start + i), self._updates[at[i]]
            found.append(Update(new.of & bit, new.same & bit, new.written & bit))
        return found

    def _is_kept(self, position: Position, path: Path) -> bool:
        """Whether an argument is updated at `path`. An array that is handed on as it
        is says nothing."""
        updated = self._updated(position, path)
        if _is_array(self.arguments[position]):
            updated = [u for u in updated if not u.same or u.written]
        return any(update.of for update in updated)

    def _is_anew(self, position: Position) -> bool:
        """Whether an argument that may be rows is not what the first result was."""
        if not _is_like_rows(self.arguments[position]):
            return False
        if FIRST not in self.alike.get(position, ()):
            return False
        updated = self._updated(position, FIRST)
        return bool(updated) and not any(update.of for update in updated)

    def _pairs(self) -> dict[Position, Path]:
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
        if is_first and 0 not in chosen and FIRST not in chosen.values():
            # What may be rows and is computed anew is rather a result that looks so.
            if not (chosen and self._is_anew(0)):
                chosen[0] = FIRST
        return {p: chosen[p] for p in self.arguments if p in chosen}

    def _first(
        self, pairs: Mapping[Position, Path], left: Mapping[Position, Path]
    ) -> Position | None:
        """The argument that is state for certain; None if none is."""
        if pairs.get(0) == FIRST and (not left or 0 in left or not self._renews(0)):
            return 0
        trees = [p for p in left if not _is_array(self.arguments[p])]
        arrays = [p for p in left if _is_array(self.arguments[p]) and left[p]]
        others = len(self.arguments) > len(pairs)
        return next(iter((*trees, *(arrays if others else ()))), None)

    def _renews(self, position: Position) -> bool:
        """Whether the first result is computed anew, not an update of an argument."""
        return not self._is_kept(position, FIRST)

    def _is_state(
        self, position: Position, classes: Sequence[list[Place]], own: set[Place]
    ) -> bool:
        """Whether an argument that comes back is state, as one that is state for
        certain: its leaves have their first dimensions from that one, or different
        ones, so that they are not rows of one batch."""
        if all(dims[0] in own for dims in classes):
            return True
        return not _is_like_rows(self.arguments[position])

    def _is_of_rows(
        self,
        position: Position,
        path: Path,
        classes: Sequence[list[Place]],
        rows: set[Place],
    ) -> bool:
        """Whether an argument that comes back has the rows of one that does not: in all
        of its leaves, or in those of a cache that are one. State has leaves without."""
        reached = [any(place in rows for place in dims) for dims in classes]
        if self._is_cache(position, path):
            return any(reached)
        return bool(reached) and all(reached)

    def _is_cache(self, position: Position, path: Path) -> bool:
        """Whether something is written into each leaf that changes, and the others
        stay."""
        updated = self._updated(position, path)
        all_same = all(update.same for update in updated)
        return all_same and any(update.written for update in updated)

    def _note(
        self, position: Position, path: Path, is_cache: bool, all_of: Sequence[Position]
    ) -> None:
        how = "is written in place: it is split like a batch, and donated"
        if not is_cache:
            how = (
                "may be a batch that the step changes: it is taken for one. If it is "
                f"state, pass {_argnums(all_of)}"
            )
        self._notes.append(
            f"argument {self.names[position]} comes back as {_where(path)} and {how}"
        )

    def _refuse(self, pairs: Mapping[Position, Path]) -> NoReturn:
        readings = "".join(
            f"  argument {self.names[p]}, which comes back as {_where(path)}, may be "
            "the state, or a batch that the step changes\n"
            for p, path in pairs.items()
        )
        p = next(iter(pairs))
        advice = f"Pass {_argnums([p])} to fully_shard if that is the state."
        if any(self._is_cache(p, path) for p, path in pairs.items()):
            advice += (
                " If it is a cache of the batch, return the parameters too, unchanged: "
                "they are the state."
            )
        raise ShardingError(
            f"it cannot be told which arguments of {step_name()} are its state.\n"
            f"{readings}{called()}"
            f"{advice}"
        )


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


def _where(path: Path) -> str:
    if not path:
        return "the result"
    keys = [
        str(key.idx) if isinstance(key, SequenceKey) else jax.tree_util.keystr((key,))
        for key in path
    ]
    return f"result {'/'.join(keys)}"


def _argnums(positions: Sequence[Position]) -> str:
    each = tuple(positions)
    return f"state_argnums={each[0] if len(each) == 1 else each}"


def _changes(
    arguments: Mapping[Position, Any],
    names: Mapping[Position, str],
    out: Any,
    state: Mapping[Position, Path],
) -> list[str]:
    """Notes on arguments that would be state but for a leaf that changes its type."""
    found = []
    for position, argument in arguments.items():
        structure = jax.tree.structure(argument)
        if position in state or structure.num_leaves < 2:
            continue
        for path, tree in parts(out, 1):
            if path not in state.values() and jax.tree.structure(tree) == structure:
                found.append(
                    f"argument {names[position]} comes back as {_where(path)} with "
                    f"{_change(argument, tree)}: it is taken for a batch"
                )
    return found


def _change(old: Any, new: Any) -> str:
    """The first leaf that differs in type between two pytrees of one structure."""
    for (path, a), b in zip(
        tree_flatten_with_path(old)[0], jax.tree.leaves(new), strict=True
    ):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            before, after = (f"{x.dtype}{list(x.shape)}" for x in (a, b))
            return f"leaf '{name}' changed from {before} to {after}"
    return "no change"
