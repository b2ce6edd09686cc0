"""In: tests marked `covering`. Out: a quick run meets what it has to, and no more."""

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


@pytest.mark.parametrize("count, most", [(1, 4), (2, 8), (3, 16)])
def test_any_values_meet_in_a_quick_run(
    count: int, most: int, pytester: pytest.Pytester
) -> None:
    shutil.copy(Path(tiers.__file__), pytester.path)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS.format(count=count))
    pytester.makeini(
        "[pytest]\nmarkers =\n  covering(n): x\n  exhaustive: x\n"
        "addopts = -p no:cacheprovider -m 'not exhaustive'\n"
    )
    printed = pytester.runpytest("-s", "-q").stdout.str()
    found = [tuple(map(int, x)) for x in re.findall(r"met (\d) (\d) (\d)", printed)]
    ranges = (range(4), range(2), range(2))
    for places in itertools.combinations(range(3), count):
        met = {tuple(case[i] for i in places) for case in found}
        assert met == {*itertools.product(*(ranges[i] for i in places))}
    assert len(found) == most
    everything = pytester.runpytest("-q", "-m", "")
    everything.assert_outcomes(passed=16)
