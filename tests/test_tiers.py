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
    monkeypatch.delenv("SHARDFN_EXHAUSTIVE_UNTIL", raising=False)
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


def _project(pytester: pytest.Pytester, tests: str) -> None:
    shutil.copy(Path(tiers.__file__), pytester.path)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(tests)
    pytester.makeini(
        "[pytest]\nmarkers =\n  covering(n): x\n  exhaustive: x\n"
        "addopts = -p no:cacheprovider -m 'not exhaustive'\n"
    )
