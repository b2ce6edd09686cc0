"""In: the tests that pytest has collected. Out: the mark `exhaustive` on those that a
quick run leaves out, because others of the same test have each of their values; they
run last, and none begins after `SHARDFN_EXHAUSTIVE_UNTIL`, in seconds since 1970.
Those that need a compiler of other machines run in front of them, behind all others,
and none begins after `SHARDFN_COMPILERS_UNTIL`.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def tiered(values: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Values to parametrize by, of which a quick run takes those in `quick`."""
    values = list(values)
    assert {*quick} <= {*values}, {*quick} - {*values}
    return [x if x in quick else exhaustively(x) for x in values]


def exhaustively(*values: Any) -> Any:
    """Values of one parametrization that a quick run leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def mark_exhaustive(items: Sequence[pytest.Item]) -> None:
    """Of each test marked `covering(n)`, leaves a quick run as many parametrizations as
    it takes for any `n` values of different parameters to meet in one of them."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("covering") and isinstance(item, pytest.Function):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in tests.values():
        _mark_rest(same)


def quick_first(items: list[pytest.Item]) -> None:
    """Moves tests of compilers behind the others, and exhaustive ones behind those, in
    what each worker begins with."""
    groups: tuple[list[pytest.Item], ...] = [], [], []
    for item in items:
        rest, compiles = map(item.get_closest_marker, ("exhaustive", "aot"))
        groups[2 if rest else 1 if compiles else 0].append(item)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = dealt(groups, workers)


def dealt(groups: Iterable[Sequence[T]], workers: int) -> list[T]:
    """All of them, of which each worker's part, as `worksteal` cuts it, has its share
    of each group, one after the other: pytest-xdist gives each as many tests as
    another, in their order, and the last of those to a worker that has none left."""
    found, rest = list[T](), [*groups]
    for left in range(workers, 0, -1):
        room = sum(map(len, rest)) // left
        for i, group in enumerate(rest):
            own = min(-(-len(group) // left), room)
            found += group[:own]
            rest[i], room = group[own:], room - own
    return found


def out_of_time(item: pytest.Item) -> str | None:
    """Why a test does not run, if no time is left for it."""
    for mark, name in (
        ("exhaustive", "SHARDFN_EXHAUSTIVE_UNTIL"),
        ("aot", "SHARDFN_COMPILERS_UNTIL"),
    ):
        until = os.environ.get(name)
        if item.get_closest_marker(mark) and until and time.time() >= float(until):
            return f"{mark}, and the time for those is over ({name})"
    return None


def _mark_rest(same: list[pytest.Function]) -> None:
    """Takes what has most that is new, and of that what has the rarest values, until
    nothing is new, and marks the rest."""
    mark = same[0].get_closest_marker("covering")
    assert mark is not None
    left, met, often = list(same), set[Any](), Counter[Any]()

    def gain(item: pytest.Function) -> tuple[int, int]:
        values = item.callspec.params.items()
        return len(_meetings(item, *mark.args) - met), -sum(often[v] for v in values)

    while left and gain(best := max(left, key=gain))[0]:
        left.remove(best)
        met |= _meetings(best, *mark.args)
        often.update(best.callspec.params.items())
    for item in left:
        item.add_marker(pytest.mark.exhaustive)


def _meetings(item: pytest.Function, count: int) -> set[tuple[Any, ...]]:
    """Each `count` of the values of a parametrization."""
    return {*itertools.combinations(item.callspec.params.items(), count)}
