"""In: random programs. Out: their sharded steps compute what the plain ones do.

Runs 8 programs, or 50 with `-m ''`, the same in every run. `SHARDFN_FUZZ=3000` makes
it that many, in tests of 50, other ones for every `SHARDFN_SEED`, and prints a failure
as the smallest program that still fails. `SHARDFN_FIRST=1000` starts at that one, to go
on with a run that ended; `SHARDFN_LOG` is a file that gets a line per test, and
programs that failed. `SHARDFN_STATIONARY=True`, or False, asks every program for that.
What runs is in `LAST`, for a failure that ends Python.
"""

import collections
import os
import tempfile
import warnings
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, assume, given, seed, settings
from language import Program
from oracle import ASKED, SAME, UNCLEAR, assert_same_steps
from strategies import programs

import shardfn

LONG = int(os.environ.get("SHARDFN_FUZZ", "0"))
SEED = int(os.environ.get("SHARDFN_SEED", "0"))
FIRST = int(os.environ.get("SHARDFN_FIRST", "0"))
LOG = Path(os.environ.get("SHARDFN_LOG", os.devnull))
CHUNK = 50
FAILED = "failed"
LAST = Path(tempfile.gettempdir()) / f"shardfn_fuzz_{os.getpid()}.py"


def assert_right(program: Program) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardfn.UnsupportedPrimitiveWarning)
        warnings.simplefilter("ignore", shardfn.UnusedAxisWarning)
        return assert_same_steps(program)


# A program takes about a second, and a smallest one that fails some minutes to find.
def limits(count: int, fixed: bool) -> settings:
    return settings(
        max_examples=count,
        derandomize=fixed,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.skipif(LONG > 0, reason="SHARDFN_FUZZ asks for others")
@limits(8, fixed=True)
@given(programs(calls=6))
def test_random_steps_compute_what_the_plain_ones_do(program: Program) -> None:
    assume(assert_right(program) != UNCLEAR)


@pytest.mark.exhaustive
@pytest.mark.skipif(LONG > 0, reason="SHARDFN_FUZZ asks for others")
@limits(42, fixed=True)
@given(programs(calls=6))
def test_more_random_steps_do(program: Program) -> None:
    assume(assert_right(program) != UNCLEAR)


@pytest.mark.skipif(LONG == 0, reason="SHARDFN_FUZZ asks for no more")
@pytest.mark.timeout(60 * CHUNK)
@pytest.mark.parametrize("first", range(FIRST, LONG, CHUNK))
def test_many_random_steps_compute_what_the_plain_ones_do(first: int) -> None:
    """Counts the programs that were compared; those that were not are more."""
    count = min(CHUNK, LONG - first)
    verdicts = collections.Counter[str]()

    @seed(10**6 * SEED + first)
    @limits(count, fixed=False)
    @given(programs(calls=10))
    def run(program: Program) -> None:
        LAST.write_text(f"{program!r}\n")
        verdict = FAILED
        try:
            verdict = assert_right(program)
        finally:
            if verdict == FAILED:
                log(f"seed {SEED}, from {first}: failed: {program!r}")
        verdicts[verdict] += 1
        assume(verdict == SAME)

    run()
    jax.clear_caches()
    each = ", ".join(f"{verdicts[v]} {v}" for v in (SAME, ASKED, UNCLEAR))
    log(f"seed {SEED}, from {first}: {each}")


def log(line: str) -> None:
    with LOG.open("a") as file:
        file.write(f"{line}\n")
