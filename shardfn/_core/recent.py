"""A cache of the last few.

In: values by key. Out: the same, as long as they are among the last used.
"""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dictionary of the entries used last, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __getitem__(self, key: K) -> V:
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.limit:
            del self[next(iter(self))]

    def find(self, key: K) -> V | None:
        """The entry, used now; None if there is none."""
        newest = next(reversed(self), None)
        if newest is not None and newest == key:  # large keys are compared once
            return self.get(newest)
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value
