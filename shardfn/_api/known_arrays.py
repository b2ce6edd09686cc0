"""The arrays of states that calls have returned or read last.

In: the arrays of a state after a call. Out: whether those of another call are the very
same, and then what is known of them: neither shapes nor buffers are looked at again.

They are known by weak references, not by attributes: an array with attributes has a
dictionary, which Python's garbage collector walks unless it holds numbers alone.
"""

import itertools
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardfn._core.limits import KNOWN_STATES

next_call = itertools.count(1).__next__
"""The number of the next call: all steps count together, for they hand states on."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownArrays:
    """The arrays of a state, none of which this keeps alive.

    Attributes:
      refs: weak references to them.
      kinds: what each fits, as `Ready.kinds`.
      made: how many of them, the first ones, the call made of donated ones: none of
        them shares a buffer with another, nor with an array that is older.
      call: the number of that call, or 0.
    """

    refs: list[weakref.ref[Any]]
    kinds: Sequence[Any]
    made: int
    call: int

    @classmethod
    def of(
        cls, arrays: Sequence[Any], kinds: Sequence[Any], made: int = 0, call: int = 0
    ) -> "KnownArrays":
        """Those arrays."""
        return cls(list(map(weakref.ref, arrays)), kinds, made, call)

    def are(self, arrays: Sequence[Any]) -> bool:
        """Whether these are the arrays, each in its place."""
        refs = self.refs
        return len(refs) == len(arrays) and all(
            map(operator.is_, map(operator.call, refs), arrays)
        )

    def alive(self) -> list[tuple[Any, int]]:
        """The arrays that still are, with their positions."""
        found = ((ref(), i) for i, ref in enumerate(self.refs))
        return [(x, i) for x, i in found if x is not None]


class LastStates:
    """What is known of the states that calls returned or read last."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: tuple[KnownArrays, ...] = ()  # replaced, never changed: threads

    def find(self, arrays: Sequence[Any], kinds: Sequence[Any]) -> KnownArrays | None:
        """What is known of the arrays of a state that should fit `kinds`, if they are
        the same."""
        for known in self.known:
            if known.are(arrays) and known.kinds == kinds:
                return known
        return None

    def add(self, new: KnownArrays) -> None:
        """Remembers a state."""
        self.known = (new, *self.known)[:KNOWN_STATES]

    def forget(self, old: KnownArrays) -> None:
        """Forgets a state that was donated."""
        self.known = tuple(x for x in self.known if x is not old)

    def calls(self) -> dict[int, int]:
        """The numbers of the calls that made arrays which still are, by the `id` of the
        array: it is that of no other array as long as one of its own is alive, and so
        of none that is alive already."""
        return {
            id(x): known.call
            for known in self.known
            if known.call
            for x, i in known.alive()
            if i < known.made
        }


last_states = LastStates()
"""Shared by all steps: one returns what the next one takes."""
