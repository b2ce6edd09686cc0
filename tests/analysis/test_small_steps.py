"""In: small steps of others' examples, with tiny batches or frozen layers. Out: plans
that send no more than `jit` does with the state stored alike, by what was measured.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_helpers import cpu_mesh
from tiers import tiered

import shardfn

pytestmark = pytest.mark.standard_promotion

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = json.loads((BENCHMARKS / "results" / "cpu" / "small_steps.json").read_text())


@pytest.fixture(scope="module")
def cases() -> Any:
    """Those of benchmarks/small_steps.py."""
    pytest.importorskip("equinox")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        import small_steps
    return small_steps.CASES


QUICK = ["equinox_mnist", "few_rows", "lora"]


@pytest.mark.parametrize("name", tiered(MEASURED, QUICK))
def test_no_more_is_sent_than_by_jit(name: str, cases: Any) -> None:
    fn, args = cases[name]()
    plan = shardfn.fully_shard(fn, cpu_mesh(8)).plan(*args)
    assert plan.wire_bytes <= MEASURED[name]["jit"]
