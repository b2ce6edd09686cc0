"""In: steps of `benchmarks/`, and what their plans sent when they were last measured.
Out: today's plans send as much: a choice that is no longer made, or a pass that undoes
it, sends more, up to several times as much.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiers import tiered

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = BENCHMARKS / "results" / "h100"
CHOICES = (
    *("recurrent", "parts", "generation", "quantized", "points", "generator"),
    *("squashed", "factored", "minibatches", "discriminator"),
)
STATIONARY = (
    *("lookup-8", "lookup-64", "experts", "mlp", "evaluation"),
    *("decode-8", "decode-64", "decode-512"),
)
OURS = "chosen", "by use"
TRAINING = ("gpt-1.3b-8", "llama-7b-64", "t5-11b-8", "gpt-175b-128", "gpt-1.3b-8-micro")
CLOSE = 0.02
"""A part; versions of JAX trace a step a little differently."""

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


def choices_rows() -> dict[str, list[list[str]]]:
    """By case of `choices.py`, the rows of the page: with its choice and without."""
    text = (BENCHMARKS / "README.md").read_text()
    section = text.partition("\n### choices.py\n")[2].partition("\n### ")[0]
    found: dict[str, list[list[str]]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] in CHOICES:
            found.setdefault(cells[0], []).append(cells)
    return found


def kept(name: str) -> dict[str, Any]:
    """The rows of a case that were measured with JAX 0.10.2, by their programs."""
    return json.loads((ROWS / f"{name}.json").read_text())


def of_weights(cell: str) -> float:
    return float(cell.removesuffix(" M"))


def test_the_page_has_every_choice() -> None:
    import choices

    assert set(CHOICES) == set(choices.CASES) == set(choices_rows())
    assert all(len(each) == 2 for each in choices_rows().values())


@pytest.mark.parametrize("case", CHOICES)
def test_choices_save_what_the_page_says(case: str) -> None:
    import choices

    _, choice, sent, of, flops, _ = choices.row(case, True, False)
    written = choices_rows()[case][0]
    assert choice == written[1]
    assert of_weights(of) == pytest.approx(of_weights(written[3]), rel=CLOSE), sent
    assert float(flops) == pytest.approx(float(written[4]), rel=CLOSE)


@pytest.mark.parametrize("name", tiered(STATIONARY, STATIONARY[:-2]))
def test_leaves_that_stay_send_what_was_kept(name: str) -> None:
    import stationary

    from shardfn.analysis import targets

    case, rows = stationary.CASES[name](), kept(f"stationary-{name}")
    programs = [name + spec for spec in case.batch_specs for name in OURS]
    mesh = targets.mesh(f"h100:{case.devices}")
    for program in programs:
        plan = stationary.sharded(case, program, mesh).plan(*case.args)
        now, before = plan.wire_bytes, rows[program]["planned"]
        assert now == pytest.approx(before, rel=CLOSE), program


@pytest.mark.parametrize("name", TRAINING)
def test_training_sends_what_was_kept(name: str) -> None:
    import criteria_programs
    from criteria_cases import CASES

    from shardfn.analysis import targets

    case = CASES[name]
    mesh = targets.mesh(case.target("h100"))
    step = criteria_programs.sharded(case.model, mesh)
    plan = step.plan(*criteria_programs.arguments(case.model, mesh.size))
    now, before = plan.wire_bytes, kept(name)["shardfn"]["planned"]
    assert now == pytest.approx(before, rel=CLOSE)
