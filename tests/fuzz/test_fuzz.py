"""In: random programs. Out: their sharded steps compute what the plain ones do.

Runs 50 programs, the same in every run. `SHARDFN_FUZZ=3000` makes it that many, in
tests of 100, other ones for every `SHARDFN_SEED`, and prints a failure as the smallest
program that still fails. What runs is in `LAST`, for a failure that ends Python.
"""

import os
import tempfile
import warnings
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, assume, given, seed, settings
from language import Program
from oracle import assert_same_steps
from sharded_and_plain import quick_compiles as quick_compiles
from strategies import programs

import shardfn

LONG = int(os.environ.get("SHARDFN_FUZZ", "0"))
SEED = int(os.environ.get("SHARDFN_SEED", "0"))
CHUNK = 100
LAST = Path(tempfile.gettempdir()) / f"shardfn_fuzz_{os.getpid()}.py"


def assert_right(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardfn.UnsupportedPrimitiveWarning)
        warnings.simplefilter("ignore", shardfn.UnusedAxisWarning)
        assume(assert_same_steps(program))


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
@pytest.mark.timeout(900)
@limits(50, fixed=True)
@given(programs(calls=6))
def test_random_steps_compute_what_the_plain_ones_do(program: Program) -> None:
    assert_right(program)


@pytest.mark.skipif(LONG == 0, reason="SHARDFN_FUZZ asks for no more")
@pytest.mark.timeout(60 * CHUNK)
@pytest.mark.parametrize("first", range(0, LONG, CHUNK))
def test_many_random_steps_compute_what_the_plain_ones_do(first: int) -> None:
    @seed(10**6 * SEED + first)
    @limits(min(CHUNK, LONG - first), fixed=False)
    @given(programs(calls=10))
    def run(program: Program) -> None:
        LAST.write_text(f"{program!r}\n")
        assert_right(program)

    run()
    jax.clear_caches()
