"""In: the notebooks of docs/. Out: their cells run, one after the other, over 8 CPU
devices; none has outputs, which would differ from run to run.
"""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from pages import DOCS
from tiers import exhaustively

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_steps", "reading_a_plan"]


@pytest.mark.parametrize(
    "path",
    [exhaustively(NOTEBOOKS[0]), *NOTEBOOKS[1:]],
    ids=lambda path: path.stem,
)
def test_cells_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jax.device_count() == 8
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names: dict[str, Any] = {"__name__": path.stem}
    for number, cell in enumerate(notebook["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] != "code":
            assert text.strip()
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None
        exec(compile(text, f"{path.name}, cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert ("all_gather" in printed) == (path.stem == "reading_a_plan")
