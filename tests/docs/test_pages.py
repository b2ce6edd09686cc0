"""Code blocks of README.md and docs/*.md run, and print what the page says; every page
of docs/ is in the site, and its links lead to pages.
"""

import re
import signal
import sys
import types
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import jax
import jax.numpy as jnp
import pages
import pytest
from sybil.document import SybilFailure

DOCS = [page for page in pages.PAGES if page.is_relative_to(pages.DOCS)]
RESULTS = pages.ROOT / "benchmarks" / "README.md"
MKDOCS = (pages.ROOT / "mkdocs.yml").read_text()

SECONDS = 300
"""A page that takes longer hangs: each takes seconds."""


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"the page's code blocks took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def given() -> dict[str, object]:
    """What README's block calls: the reader's own step, in the least words."""

    def train_step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    def create_state(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (256, 256))

    import shardfn

    return {
        "jax": jax,
        "shardfn": shardfn,
        "train_step": train_step,
        "create_state": create_state,
        "batch": jnp.ones((8, 256)),
    }


def run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = pages.read(page)
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    document.namespace = vars(module)
    if page.name == "README.md":
        document.namespace.update(given())
    for example in document.examples():
        example.evaluate()


@pytest.mark.standard_promotion
@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_code_blocks_run(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert jax.device_count() == 8
    monkeypatch.chdir(tmp_path)
    run(page, monkeypatch)


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_first_block_runs_on_a_laptop(page: Path) -> None:
    """It asks for the CPU devices that its page makes a mesh of."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    runs = [block for block in blocks if "\nimport jax\n" in f"\n{block}"]
    if runs and re.search(r"make_mesh\(\((8|count),\)", "".join(blocks)):
        assert 'jax.config.update("jax_num_cpu_devices", 8)' in runs[0]


def write(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_a_wrong_output_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = write(tmp_path, "```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(SybilFailure, match=r"page says\n2\n\nbut this is printed\n1\n"):
        run(page, monkeypatch)


def test_a_block_with_options_runs_and_fails_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write(tmp_path, 'Text.\n\n```python hl_lines="1"\nx = 1\n1 / 0\n```\n')
    with pytest.raises(ZeroDivisionError) as info:
        run(page, monkeypatch)
    assert info.traceback[-1].lineno == 4 and str(info.traceback[-1].path) == str(page)


def test_blocks_share_names_and_skipped_ones_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = "<!--- skip: next -->\n\n```python\nimport nothing\n```\n\n"
    hidden = "<!--- invisible-code-block: python\nx = 3\n--->\n\n"
    shown = (
        "```python\nprint(x, list(range(99)))\n```\n\n```text\n3 [0, ..., 98]\n```\n"
    )
    run(write(tmp_path, skipped + hidden + shown), monkeypatch)


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_every_block_names_its_language(page: Path) -> None:
    fences = re.findall(r"^ *```([^\n`]*)$", page.read_text(), re.MULTILINE)
    known = {"", "python", "text", "bash", "toml", "yaml", "diff", "pytb"}
    for opening in fences[::2]:
        assert opening.split(" ")[0] in known, f"{page.name}: ```{opening}"
    assert set(fences[1::2]) <= {""}


@pytest.mark.parametrize("page", [*pages.PAGES, RESULTS], ids=lambda page: page.name)
def test_tables_have_a_mark_for_every_column(page: Path) -> None:
    """With one too few, the site shows the rows as text."""
    for head, marks in re.findall(r"^(\|.*)\n(\|[ |:-]+\|)$", page.read_text(), re.M):
        columns = re.sub(r"`[^`]*`|\\\|", "", head)
        assert columns.count("|") == marks.count("|"), head


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", MKDOCS, re.MULTILINE)
    assert sorted(menu) == sorted(str(p.relative_to(pages.DOCS)) for p in DOCS)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_stay_in_the_site(page: Path) -> None:
    """The site holds docs/ alone; name other files, or include them with `--8<--`."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("https://"):
            found = (page.parent / target).resolve()
            assert found.is_file() and found.is_relative_to(pages.DOCS), target


def module_at(path: Path) -> types.ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawing() -> types.ModuleType:
    return module_at(pages.DOCS / "figures" / "draw.py")


@pytest.mark.parametrize("name", drawing().FIGURES)
def test_figures_show_what_is_true_now(name: str) -> None:
    """They are drawn from a plan and from a table; `draw.py` writes them again."""
    drawn = drawing().FIGURES[name]()
    assert drawn == (pages.DOCS / "figures" / name).read_text()


def test_the_wire_figure_has_every_row_of_the_table() -> None:
    rows = re.findall(
        r"^\|[^|]*\| (?:shardfn|jit \+ NamedSharding) \| [\d.]+ \|",
        RESULTS.read_text(),
        re.M,
    )
    assert drawing().wire().count(" M</text>") == len(rows) > 2


def test_what_training_loses_is_what_was_measured() -> None:
    """The page's table is the benchmark's, of the runs beside its other results."""
    training = module_at(pages.ROOT / "benchmarks" / "quantized_training.py")
    results = pages.ROOT / "benchmarks" / "results" / "quantized_training"
    study = training.Study("5m", 1500, 8, 50, results, 4)
    table = training.table(study, training.ASKED, seeds=3)
    assert len(table) == 7
    assert "\n".join(table) in (pages.DOCS / "schedule.md").read_text()
