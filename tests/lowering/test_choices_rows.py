"""In: the steps of `benchmarks/choices.py`, and the table on the benchmarks' page. Out:
each plan still sends what the table says: a choice that is no longer made, or a pass
that undoes it, sends several times as much.
"""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CLOSE = 0.02

pytestmark = pytest.mark.standard_promotion
CASES = (
    *("recurrent", "parts", "generation", "quantized", "points", "generator"),
    *("squashed", "factored", "minibatches", "discriminator"),
)


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


def rows() -> dict[str, list[list[str]]]:
    """By case, the rows of the page's table: with its choice and without."""
    text = (BENCHMARKS / "README.md").read_text()
    section = text.partition("\n### choices.py\n")[2].partition("\n### ")[0]
    found: dict[str, list[list[str]]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] in CASES:
            found.setdefault(cells[0], []).append(cells)
    return found


def of_weights(cell: str) -> float:
    return float(cell.removesuffix(" M"))


def test_the_page_has_every_case() -> None:
    import choices

    assert set(CASES) == set(choices.CASES) == set(rows())
    assert all(len(each) == 2 for each in rows().values())


@pytest.mark.parametrize("case", CASES)
def test_a_plan_sends_what_the_page_says(case: str) -> None:
    import choices

    _, choice, sent, of, flops, _ = choices.row(case, True, False)
    written = rows()[case][0]
    assert choice == written[1]
    assert of_weights(of) == pytest.approx(of_weights(written[3]), rel=CLOSE), sent
    assert float(flops) == pytest.approx(float(written[4]), rel=CLOSE)
