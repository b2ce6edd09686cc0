"""In: random programs. Out: their sharded steps compute what the plain ones do.

Runs 50 programs, the same in every run. `SHARDFN_FUZZ=500` makes it that many, other
ones in every run, and prints a failure as the smallest program that still fails.
"""

import os
import warnings

import pytest
from hypothesis import HealthCheck, assume, given, settings
from language import Program
from oracle import assert_same_steps
from sharded_and_plain import quick_compiles as quick_compiles
from strategies import programs

import shardfn

LONG = int(os.environ.get("SHARDFN_FUZZ", "0"))


# A program takes about a second, and a smallest one that fails some minutes to find.
@pytest.mark.timeout(900 + 30 * LONG)
@settings(
    max_examples=LONG or 50,
    derandomize=not LONG,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
@given(programs(calls=10 if LONG else 6))
def test_random_steps_compute_what_the_plain_ones_do(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardfn.UnsupportedPrimitiveWarning)
        assume(assert_same_steps(program))
