"""In: tests marked `covering` or `exhaustive`. Out: a quick run meets what it has to,
and no more; those of compilers run behind the rest, and those that it leaves out last,
while there is time.
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

rest, aot = pytest.mark.exhaustive, pytest.mark.aot("h100:8")

@pytest.mark.parametrize(
    "x",
    [
        pytest.param("a", marks=rest),
        pytest.param("b", marks=aot),
        "c",
        pytest.param("d", marks=[rest, aot]),
        "e",
    ],
)
def test_turn(x):
    print("ran", x)
"""

EXHAUSTIVE, COMPILERS = "SHARDFN_EXHAUSTIVE_UNTIL", "SHARDFN_COMPILERS_UNTIL"


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests run is one worker's, and has time, whatever runs these."""
    for name in (EXHAUSTIVE, COMPILERS, "PYTEST_XDIST_WORKER_COUNT"):
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
    "name, until, ran, said",
    [
        (EXHAUSTIVE, "4102444800", "cebad", None),  # in the year 2100
        (EXHAUSTIVE, "0", "ceb", "*exhaustive, and the time for those is over (SHA*"),
        (COMPILERS, "4102444800", "cebad", None),
        (COMPILERS, "0", "cea", "*aot, and the time for those is over (SHARDFN_C*"),
    ],
)
def test_exhaustive_tests_run_last_and_while_there_is_time(
    name: str,
    until: str,
    ran: str,
    said: str | None,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, until)
    _project(pytester, IN_TURN)
    run = pytester.runpytest("-s", "-q", "-rs", "-m", "")
    run.assert_outcomes(passed=len(ran), skipped=5 - len(ran))
    printed = re.findall(r"ran (\w)", run.stdout.str())
    assert "".join(printed) == ran
    if said:
        run.stdout.fnmatch_lines(said)
    monkeypatch.delenv(name)
    pytester.runpytest("-q").assert_outcomes(passed=3, deselected=2)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "quick, compiles, rest",
    [(10, 5, 30), (30, 0, 10), (7, 0, 0), (0, 0, 5), (1, 1, 1), (9, 8, 7), (2, 3, 0)],
)
def test_each_worker_has_its_share_of_each_group(
    quick: int, compiles: int, rest: int, workers: int
) -> None:
    sizes = {"a": quick, "b": compiles, "c": rest}
    every = [[f"{k}{i}" for i in range(size)] for k, size in sizes.items()]
    found = tiers.dealt(every, workers)
    assert sorted(found) == sorted(sum(every, []))
    at, parts = 0, []
    for left in range(workers, 0, -1):
        parts.append([x[0] for x in found[at : at + (len(found) - at) // left]])
        at += len(parts[-1])
    for group, own in zip("abc", every, strict=True):
        assert [x for x in found if x[0] == group] == own
        counts = [part.count(group) for part in parts]
        assert max(counts) - min(counts) <= 2, counts
    assert all(part == sorted(part) for part in parts)


def _project(pytester: pytest.Pytester, tests: str) -> None:
    shutil.copy(Path(tiers.__file__), pytester.path)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(tests)
    pytester.makeini(
        "[pytest]\nmarkers =\n  aot(target): x\n  covering(n): x\n  exhaustive: x\n"
        "addopts = -p no:cacheprovider -m 'not exhaustive'\n"
    )
