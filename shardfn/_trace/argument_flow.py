"""What becomes of each argument of a step.

In: avals of the arguments and of what the step returns, and its program. Out: whether
an argument is updated where it seems to come back, or is a gradient there, or a cache;
and which dimensions of arguments are the same.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardfn._core import compat
from shardfn._core.call_arguments import Path, Position, numbered, numbers_in, part
from shardfn._core.program import Program
from shardfn._trace.dataflow import Dimension, Dimensions, Update, dependences, updates
from shardfn._trace.matching import matched
from shardfn._trace.raw_keys import raw_keys


def same(one: Any, other: Any) -> bool:
    """Whether two pytrees have the same containers, names, shapes and dtypes."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def is_array(tree: Any) -> bool:
    return isinstance(tree, jax.ShapeDtypeStruct)


def is_like_rows(tree: Any) -> bool:
    """Whether the leaves of an argument might be rows of one batch: as many of each."""
    leaves = jax.tree.leaves(tree)
    return len({leaves[i].shape[0] for i in dimmed(tree)}) <= 1


def is_no_batch(tree: Any, devices: int) -> bool:
    """Whether the leaves of an argument differ in rows, and some of them have rows that
    the devices do not divide."""
    leaves = jax.tree.leaves(tree)
    rows = {leaves[i].shape[0] for i in dimmed(tree)}
    return len(rows) > 1 and any(count % devices for count in rows)


def dimmed(tree: Any) -> list[int]:
    """Which leaves of a pytree have dimensions that a batch might be split on."""
    leaves = enumerate(jax.tree.leaves(tree))
    return [i for i, x in leaves if x.shape and not compat.is_key(x.dtype)]


@dataclass(frozen=True, slots=True)
class ArgumentFlow:
    """What becomes of the arguments of one step.

    Attributes:
      arguments: pytrees by position.
      out: what the step returns.
      program: the program of the step.
      starts: of each argument, its first leaf.
      updates: of each leaf of `out`, what it was.
      classes: of each leaf of an argument that has dimensions and is no key, those.
    """

    arguments: Mapping[Position, Any]
    out: Any
    program: Program
    starts: Mapping[Position, int]
    updates: Sequence[Update]
    classes: Mapping[Position, list[list[Dimension]]]

    @classmethod
    def of(
        cls, arguments: Mapping[Position, Any], out: Any, program: Program
    ) -> "ArgumentFlow":
        """That of a step with this program."""
        starts: dict[Position, int] = {}
        classes: dict[Position, list[list[Dimension]]] = {}
        dimensions, keys, start = Dimensions(program), raw_keys(program), 0
        for position, argument in arguments.items():
            starts[position] = start
            leaves = [start + i for i in dimmed(argument)]
            values = [program.inputs[i] for i in leaves if i not in keys]
            classes[position] = [dimensions.of(value) for value in values]
            start += len(jax.tree.leaves(argument))
        return cls(arguments, out, program, starts, updates(program), classes)

    def _at(self, path: Path) -> Sequence[int]:
        """Which leaves of what the step returns are those at `path`."""
        tree = jax.tree.structure(self.out)
        return numbers_in(part(numbered(tree, range(tree.num_leaves)), path))

    def _updated(
        self, position: Position, path: Path, leaves: Sequence[int]
    ) -> list[Update]:
        """Of some leaves, what has become of each at `path`; all sets are of itself
        alone."""
        at, start = self._at(path), self.starts[position]
        found = []
        for i in leaves:
            bit, new = 1 << (start + i), self.updates[at[i]]
            own = new.of & bit, new.same & bit, new.written & bit
            found.append(Update(*own, new.gradient, new.moved & bit))
        return found

    def _with_dims(self, position: Position, path: Path) -> list[Update]:
        return self._updated(position, path, dimmed(self.arguments[position]))

    def is_kept(self, position: Position, path: Path, in_place: bool = False) -> bool:
        """Whether an argument is updated at `path`, each element where it was, or also
        elsewhere. An array that is handed on as it is says nothing, nor does a scalar
        of a tree; one that counts on does."""
        if is_array(self.arguments[position]):
            updated = self._with_dims(position, path)
            found = [u for u in updated if not u.same or u.written]
        else:
            count = len(jax.tree.leaves(self.arguments[position]))
            dims = set(dimmed(self.arguments[position]))
            each = enumerate(self._updated(position, path, range(count)))
            found = [u for i, u in each if i in dims or not u.same]
        return any(u.of if in_place else u.updated for u in found)

    def is_unchanged(self, position: Position, path: Path) -> bool:
        """Whether an argument is handed on as it is, as far as it has dimensions."""
        updated = self._with_dims(position, path)
        return all(update.same and not update.written for update in updated)

    def descends(self, position: Position, path: Path) -> bool:
        """Whether a gradient goes into an argument's new value."""
        updated = self._with_dims(position, path)
        return any(update.updated and update.gradient for update in updated)

    def is_gradient(self, position: Position, path: Path) -> bool:
        """Whether what comes back at `path` is the gradient of something that is like
        the argument, and no new value of it, nor of its leaves in another order."""
        count = len(jax.tree.leaves(self.arguments[position]))
        updated = self._updated(position, path, range(count))
        if not any(u.gradient for u in updated) or any(u.updated for u in updated):
            return False
        return not self._is_permuted(position, path)

    def _is_permuted(self, position: Position, path: Path) -> bool:
        """Whether what comes back at `path` are the leaves of an argument that have
        dimensions, updated or not, each of them in another one's place."""
        leaves, start = dimmed(self.arguments[position]), self.starts[position]
        new = self._at(path)
        come_from = {
            i: [j for j in leaves if self.updates[new[i]].of >> (start + j) & 1]
            for i in leaves
        }
        return len(matched(come_from)) == len(leaves) > 1

    def is_new(self, position: Position, path: Path) -> bool:
        """Whether no leaf is updated at `path`, there or in another one's place."""
        updated = any(u.updated for u in self._with_dims(position, path))
        return not (updated or self._is_permuted(position, path))

    def is_cache(self, position: Position, path: Path) -> bool:
        """Whether something is written into each leaf that changes, and the others
        stay."""
        updated = self._with_dims(position, path)
        all_same = all(update.same for update in updated)
        return all_same and any(update.written for update in updated)

    def reaches(self, position: Position, rows: Collection[Dimension]) -> bool:
        """Whether some of these lie along a dimension of an argument."""
        return any(place in rows for dims in self.classes[position] for place in dims)

    def reads(self, path: Path, others: Iterable[Position]) -> bool:
        """Whether what comes back at `path` is computed from leaves of others that have
        dimensions, in whatever way."""
        tree = jax.tree.structure(self.out)
        made_of = numbered(tree, dependences(self.program))
        bits = functools.reduce(operator.or_, numbers_in(part(made_of, path)), 0)
        return any(
            bits >> (self.starts[p] + i) & 1
            for p in others
            for i in dimmed(self.arguments[p])
        )
