"""One choice of its own for as many as can have one.

In: what each may choose. Out: what each has, no two the same.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

One = TypeVar("One", bound=Hashable)
Choice = TypeVar("Choice", bound=Hashable)


def matched(options: Mapping[One, Sequence[Choice]]) -> dict[One, Choice]:
    """One choice for as many as can have one of their own, each the first of its
    options where it may be."""
    holder: dict[Choice, One] = {}

    def place(one: One, tried: set[Choice]) -> bool:
        for choice in options[one]:
            if choice in tried:
                continue
            tried.add(choice)
            if choice not in holder or place(holder[choice], tried):
                holder[choice] = one
                return True
        return False

    for one in options:
        place(one, set())
    return {one: choice for choice, one in holder.items()}
