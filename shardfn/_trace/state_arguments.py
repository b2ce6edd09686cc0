"""Which arguments of a step are its state: those that come back.

In: the avals of the arguments and of what the step returns, and its program. Out: the
positions of the state, where each comes back, and what was not taken for state and why;
or an error that shows what might be meant.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardfn._core.call_arguments import (
    FIRST,
    Path,
    Position,
    StateArguments,
    parts,
)
from shardfn._core.limits import LIKE_STATE_DEPTH
from shardfn._core.program import Program
from shardfn._trace.argument_flow import (
    ArgumentFlow,
    dimmed,
    is_array,
    is_like_rows,
    is_no_batch,
    same,
)
from shardfn._trace.asked_states import asked_states
from shardfn._trace.dataflow import Dimension
from shardfn._trace.forward_only import include_modules, returns_no_state
from shardfn._trace.returned_arguments import is_first, returned_pairs
from shardfn._trace.state_texts import (
    batch_notes,
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
    asked: tuple[int, ...] | None = None,
    devices: int = 1,
) -> StateArguments:
    """Finds the arguments that come back, or are read by a function that returns none.

    Args:
      arguments: pytrees of `ShapeDtypeStruct`, in order.
      names: what to call them in messages.
      out: what the step returns, a pytree of `ShapeDtypeStruct`.
      program: makes the program of the step, whose arguments are the leaves of
        `arguments`; called only if something is like an argument.
      asked: positions that the user says are state; None to find them.
      devices: how many divide the rows of a batch; 1 if its `batch_spec` is given.

    Returns:
      The state, and where it comes back.

    Raises:
      ShardingError: it is ambiguous; or only gradients come back.
    """
    states = [p for p in asked or (0,) if p in arguments]
    is_read = (
        len(states) == len(asked or (0,))
        and not include_modules(arguments.values())
        and returns_no_state([arguments[p] for p in states], out)
    )
    if asked is not None:
        return asked_states(arguments, names, out, asked, is_read)
    places = parts(out)
    alike = {
        position: [path for path, tree in places if same(tree, argument)]
        for position, argument in arguments.items()
        if jax.tree.leaves(argument)
    }
    alike = {position: paths for position, paths in alike.items() if paths}
    found = None
    if alike or is_first(arguments, out):
        found = _Search(
            ArgumentFlow.of(arguments, out, program()), names, alike, devices
        ).found()
    if found is None and is_read:
        note = found_note(names, {}, (), (0,))
        return StateArguments((0,), (), notes=(note,), hints=(note,))
    if found is None:
        changed = tuple(changes(arguments, names, out, {0: FIRST}))
        notes = (*changed, *batch_notes(arguments, names, (0,)))
        found = StateArguments(notes=notes, hints=changed)
    return found


@dataclass(slots=True)
class _Search:
    """The search in one program.

    Attributes:
      flow: what becomes of its arguments.
      names: their names.
      alike: for arguments that might come back, where.
      devices: how many divide the rows of a batch.
    """

    flow: ArgumentFlow
    names: Mapping[Position, str]
    alike: Mapping[Position, Sequence[Path]]
    devices: int
    _pairs: dict[Position, Path] = field(default_factory=dict)
    _rows: set[Dimension] = field(default_factory=set)

    @property
    def arguments(self) -> Mapping[Position, Any]:
        """Pytrees by position."""
        return self.flow.arguments

    def found(self) -> StateArguments | None:
        """The state; None if nothing comes back, or just the first argument first."""
        self._pairs = returned_pairs(self.flow, self.alike)
        if not self._pairs:
            self._check_gradients()
            return None
        self._rows = self._known_rows()
        parameters, rest = self._without_caches()
        if parameters and rest:
            return self._result((), parameters)
        first = self._certain()
        if first is None:
            fixed = self._read_only_of_batch()
            if not fixed:
                refuse_readings(self.names, self._pairs, (), self._has_cache())
            return self._result((), fixed)
        own = {place for dims in self.flow.classes[first] for place in dims}
        state = [p for p in self._pairs if p == first or self._is_state(p, own)]
        fixed = [p for p in self.arguments if self._is_read_only(p, state, own)]
        is_plain = not fixed and set(self.alike) <= {0} and self._pairs == {0: FIRST}
        # Of scalars alone a token is like a place in a buffer.
        asks = bool(parameters) and len(self.arguments) > len(self._pairs) + len(
            parameters
        )
        if is_plain and not asks:
            return None
        return replace(self._result(state, fixed), asks=asks)

    def _result(
        self, state: Sequence[Position], fixed: Sequence[Position]
    ) -> StateArguments:
        """What was found: the state that comes back, and that which is read only."""
        pairs, names = self._pairs, self.names
        others = [p for p in pairs if p not in state]
        written = [
            p
            for p in pairs
            if not isinstance(p, str) and self.flow.is_cache(p, pairs[p])
        ]
        caches = [p for p in others if p in written]
        notes = [
            other_note(names[p], pairs[p], p in caches, (*state, p)) for p in others
        ]
        notes += [
            read_only_note(names[p], self._is_twin(self.arguments[p], state))
            for p in fixed
        ]
        notes += batch_notes(self.arguments, names, (*pairs, *fixed))
        notes += changes(self.arguments, names, self.flow.out, pairs)
        return StateArguments(
            arguments=(*state, *fixed),
            results=tuple(pairs[p] for p in state),
            caches=tuple((p, pairs[p]) for p in caches),
            written=tuple((p, pairs[p]) for p in state if p in written),
            notes=(found_note(names, pairs, state, fixed), *notes),
            hints=tuple(notes),
        )

    def _check_gradients(self) -> None:
        """Raises if nothing comes back but gradients."""
        for position, paths in self.alike.items():
            for path in paths:
                if self.flow.is_gradient(position, path):
                    refuse_gradients(self.names[position], position, path)

    def _known_rows(self) -> set[Dimension]:
        """The rows of arguments that do not come back, and may be a batch."""
        return {
            dims[0]
            for position, argument in self.arguments.items()
            if position not in self._pairs and is_like_rows(argument)
            if not self._is_twin(argument, self._pairs)
            for dims in self.flow.classes[position]
        }

    def _is_twin(self, argument: Any, others: Collection[Position]) -> bool:
        """Whether an argument is like one of some others, or like a part of it."""
        if is_array(argument):
            return any(same(argument, self.arguments[p]) for p in others)
        trees = (
            tree
            for p in others
            for _, tree in parts(self.arguments[p], LIKE_STATE_DEPTH)
        )
        return any(same(argument, tree) for tree in trees)

    # What is state

    def _descends(self, position: Position) -> bool:
        return self.flow.descends(position, self._pairs[position])

    def _has_cache(self) -> bool:
        return any(self.flow.is_cache(p, path) for p, path in self._pairs.items())

    def _certain(self) -> Position | None:
        """The argument that is state for certain; None if none is."""
        pairs, arguments = self._pairs, self.arguments
        left = [p for p in pairs if not self._is_of_rows(p)]
        if pairs.get(0) == FIRST:
            if not self._may_be_rows(0):
                if not left or 0 in left or self.flow.is_kept(0, FIRST):
                    return 0
            else:
                rivals = [p for p in left if p != 0 and self._descends(p)]
                if 0 in left and rivals and not self._rows:
                    refuse_readings(self.names, pairs, rivals, self._has_cache())
                is_tree = not is_array(arguments[0]) and not self._has_cache()
                if 0 in left or is_tree and not rivals and self.flow.is_kept(0, FIRST):
                    return 0
        trees = [p for p in left if not is_array(arguments[p])]
        arrays = [p for p in left if is_array(arguments[p]) and pairs[p]]
        others = len(arguments) > len(pairs)
        return next(iter((*trees, *(arrays if others else ()))), None)

    def _may_be_rows(self, position: Position) -> bool:
        """Whether an argument that comes back may be a batch that the step changes."""
        is_unchanged = self.flow.is_unchanged(position, self._pairs[position])
        may_be = is_like_rows(self.arguments[position]) and not is_unchanged
        return may_be and not self._descends(position)

    def _is_state(self, position: Position, own: set[Dimension]) -> bool:
        """Whether an argument that comes back is state, as one that is state for
        certain: its leaves have their first dimensions from that one, or different
        ones, so that they are not rows of one batch; or what rows of others are reduced
        to goes into them, as into averages over batches."""
        if self._is_of_rows(position):
            return False
        if all(dims[0] in own for dims in self.flow.classes[position]):
            return True
        argument = self.arguments[position]
        return not is_like_rows(argument) or (
            not is_array(argument) and self._reads_rows(position)
        )

    def _reads_rows(self, position: Position) -> bool:
        """Whether the new value of an argument is computed from rows of others."""
        others = (p for p in self.arguments if p not in self._pairs)
        batch = (p for p in others if self.flow.reaches(p, self._rows))
        return self.flow.reads(self._pairs[position], batch)

    def _is_of_rows(self, position: Position) -> bool:
        """Whether an argument that comes back has the rows of one that does not: in all
        of its leaves, or in those of a cache that are one. State has leaves without."""
        reached = [
            any(place in self._rows for place in dims)
            for dims in self.flow.classes[position]
        ]
        if self.flow.is_cache(position, self._pairs[position]):
            return any(reached)
        return bool(reached) and all(reached)

    def _is_read_only(
        self, position: Position, state: Sequence[Position], own: set[Dimension]
    ) -> bool:
        """Whether an argument that does not come back is like one that is state, or a
        part of it, as a teacher's parameters are; or is a tree that can be no batch,
        next to arguments with rows, as those to which LoRA is added."""
        argument = self.arguments[position]
        if position in self._pairs or not dimmed(argument):
            return False
        if self.flow.reaches(position, self._rows):
            return False
        if not self._is_twin(argument, state):
            return bool(self._rows) and is_no_batch(argument, self.devices)
        along = all(dims[0] in own for dims in self.flow.classes[position])
        return along or not (is_array(argument) or is_like_rows(argument))

    def _without_caches(self) -> tuple[list[Position], list[Position]]:
        """Where what comes back are caches, and rows that the step changes: the
        arguments that may be parameters, trees whose leaves have no rows of one batch,
        and the arrays next to them that they are read for."""
        caches = [p for p, path in self._pairs.items() if self.flow.is_cache(p, path)]
        arrays = [p for p in self._pairs if is_array(self.arguments[p])]
        changed = [p for p in arrays if p not in caches and self._may_be_rows(p)]
        if not caches or len(caches) + len(changed) < len(self._pairs):
            return [], []
        others = {p: x for p, x in self.arguments.items() if p not in self._pairs}
        trees = [p for p, x in others.items() if not (is_array(x) or is_like_rows(x))]
        rows = [p for p, x in others.items() if p not in trees and dimmed(x)]
        return trees, [*changed, *rows]

    def _read_only_of_batch(self) -> list[Position]:
        """Where all that comes back is the batch's, the arguments that are parameters:
        trees without its rows, next to others with them."""
        if not all(map(self._is_of_rows, self._pairs)):
            return []
        rows = {dims[0] for p in self._pairs for dims in self.flow.classes[p]}
        others = (p for p in self.arguments if p not in self._pairs)
        rest = [p for p in others if dimmed(self.arguments[p])]
        batch = [p for p in rest if self.flow.reaches(p, rows)]
        return [
            p
            for p in rest
            if p not in batch and not is_array(self.arguments[p])
            if batch or not is_like_rows(self.arguments[p])
        ]
