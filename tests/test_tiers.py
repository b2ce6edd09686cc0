"""In: tests marked `covering` or `exhaustive`. Out: a quick run meets what it has to,
and no more; the others run last, while there is time.
"""

import itertools
import re
import shutil
from pathlib import Path

import pytest
import tiers

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest, tiers

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    tiers.mark_exhaustive(items)
    tiers.quick_first(items)

def pytest_runtest_setup(item):
    if reason := tiers.out_of_time(item):
        pytest.skip(reason)
"""
TESTS = """
import pytest

@pytest.mark.covering({count})
@pytest.mark.parametrize("c", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("a", [0, 1, 2, 3])
def test_product(a, b, c):
    print("met", a, b, c)
"""
IN_TURN = """
import pytest

rest = pytest.mark.exhaustive

@pytest.mark.parametrize(
    "x", [pytest.param("a", marks=rest), "b", pytest.param("c", marks=rest), "d"]
)
def test_turn(x):
    print("ran", x)
"""


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests run is one worker's, and has time, whatever runs these."""
    for name in ("SHARDFN_EXHAUSTIVE_UNTIL", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("count, most", [(1, 4), (2, 8), (3, 16)])
def test_any_values_meet_in_a_quick_run(
    count: int, most: int, pytester: pytest.Pytester
) -> None:
    _project(pytester, TESTS.format(count=count))
    printed = pytester.runpytest("-s", "-q").stdout.str()
    found = [tuple(map(int, x)) for x in re.findall(r"met (\d) (\d) (\d)", printed)]
    ranges = (range(4), range(2), range(2))
    for places in itertools.combinations(range(3), count):
        met = {tuple(case[i] for i in places) for case in found}
        assert met == {*itertools.product(*(ranges[i] for i in places))}
    assert len(found) == most
    everything = pytester.runpytest("-q", "-m", "")
    everything.assert_outcomes(passed=16)


@pytest.mark.parametrize(
    "until, outcomes",
    [
        (None, {"passed": 4}),
        ("4102444800", {"passed": 4}),  # in the year 2100
        ("0", {"passed": 2, "skipped": 2}),
    ],
)
def test_exhaustive_tests_run_last_and_while_there_is_time(
    until: str | None,
    outcomes: dict[str, int],
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if until is not None:
        monkeypatch.setenv("SHARDFN_EXHAUSTIVE_UNTIL", until)
    _project(pytester, IN_TURN)
    run = pytester.runpytest("-s", "-q", "-rs", "-m", "")
    run.assert_outcomes(**outcomes)
    printed = re.findall(r"ran (\w)", run.stdout.str())
    assert printed == ["b", "d", "a", "c"][: outcomes["passed"]]
    if "skipped" in outcomes:
        run.stdout.fnmatch_lines("*the time for those is over (SHARDFN_EXHAUSTIVE*")
    pytester.runpytest("-q").assert_outcomes(passed=2, deselected=2)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("quick, rest", [(10, 30), (30, 10), (7, 0), (0, 5), (1, 1)])
def test_each_worker_begins_with_quick_ones(
    quick: int, rest: int, workers: int
) -> None:
    every = [f"q{i}" for i in range(quick)], [f"r{i}" for i in range(rest)]
    found = tiers.dealt(*every, workers)
    assert sorted(found) == sorted([*every[0], *every[1]])
    assert [x for x in found if x[0] == "q"] == every[0]
    at, counts = 0, []
    for left in range(workers, 0, -1):
        part = found[at : at + (len(found) - at) // left]
        at += len(part)
        kinds = [x[0] for x in part]
        assert kinds == sorted(kinds)
        counts.append(kinds.count("q"))
    assert max(counts) - min(counts) <= 1 or quick > rest


def _project(pytester: pytest.Pytester, tests: str) -> None:
    shutil.copy(Path(tiers.__file__), pytester.path)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(tests)
    pytester.makeini(
        "[pytest]\nmarkers =\n  covering(n): x\n  exhaustive: x\n"
        "addopts = -p no:cacheprovider -m 'not exhaustive'\n"
    )
