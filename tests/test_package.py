"""In: what is not code: the package's metadata, workflows. Out: they say the same as
the code does.
"""

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

import shardfn
from shardfn.storage import _orbax_items

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = ROOT / ".github" / "workflows"


def test_the_version_is_said_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", shardfn.__version__)
    assert "version" in PROJECT["project"]["dynamic"]
    path = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    if path.exists():  # not of an sdist, whose tests run on what is installed
        assert f'__version__ = "{shardfn.__version__}"' in path.read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {shardfn.__version__}\n" in citation


def test_an_sdist_has_what_tests_read() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    read = {"tests", "examples", "docs", "benchmarks", "mkdocs.yml", "CHANGELOG.md"}
    assert read <= set(included)
    assert all((ROOT / name).exists() for name in included if name != "shardfn")


def test_a_release_says_where_its_repository_is(monkeypatch) -> None:
    """As Hatch reads it; without an address README stays as it is."""
    pytest.importorskip("hatchling")
    hook = runpy.run_path(str(ROOT / "docs" / "package_metadata.py"))
    found: dict[str, dict[str, Any]] = {}
    for address in ("", "https://example.org/team/shardfn/"):
        monkeypatch.setenv(hook["ADDRESS"], address)
        found[address] = {}
        hook["AddressHook"](str(ROOT), {}).update(found[address])
    readme = (ROOT / "README.md").read_text()
    plain, released = found.values()
    assert plain == {"readme": {"content-type": "text/markdown", "text": readme}}
    assert released["urls"]["Repository"] == "https://example.org/team/shardfn"
    assert released["urls"]["Issues"] == "https://example.org/team/shardfn/issues"
    links = re.findall(r"\]\(([^)\s]+)\)", released["readme"]["text"])
    assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", readme)) > 8
    assert all(link.startswith(("https://", "#")) for link in links)
    start = "https://example.org/team/shardfn/blob/main/"
    named = [link.removeprefix(start) for link in links if link.startswith(start)]
    assert all((ROOT / name).exists() for name in named) and "LICENSE" in named
    picture = hook["with_absolute_links"]("![a](docs/a.png) [b](#b)", "https://x")
    assert picture == "![a](https://x/raw/main/docs/a.png) [b](#b)"
    assert set(PROJECT["project"]["dynamic"]) == {"version", "readme", "urls"}


@pytest.mark.skipif(not WORKFLOWS.exists(), reason="an sdist has no workflows")
def test_the_release_workflow_gives_the_address() -> None:
    text = (WORKFLOWS / "release.yml").read_text()
    assert "SHARDFN_REPOSITORY: ${{ github.server_url }}/" in text


@pytest.mark.skipif(not WORKFLOWS.exists(), reason="an sdist has no workflows")
def test_workflows_try_what_the_package_says_it_takes() -> None:
    text = (WORKFLOWS / "tests.yml").read_text()
    tried = re.findall(r'python: "(3\.\d+)", jax: "jax([^"]*)"', text)
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    (jax,) = (x for x in PROJECT["project"]["dependencies"] if x.startswith("jax>"))
    least, bound = jax.removeprefix("jax>=").split(",")
    assert tried[0] == (oldest, f"=={least}")
    assert all(version.endswith(f",{bound}") for _, version in tried[1:])
    names = {f"Programming Language :: Python :: {python}" for python, _ in tried}
    assert set(PROJECT["project"]["classifiers"]) & names


def test_contributors_are_sent_to_what_is_there() -> None:
    """Paths and names in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    package = Path(shardfn.__file__).parent
    for path in re.findall(r"`((?:shardfn|tests|docs)/[\w/]+\.\w+)`", text):
        where = package.parent if path.startswith("shardfn/") else ROOT
        if path != "shardfn/_schedule/small_last.py":  # the page's example
            assert (where / path).exists(), path
    for name in re.findall(
        r"`((?:storage|analysis|_core|_schedule)/[\w/]+\.py)`", text
    ):
        assert (package / name).exists(), name


def test_an_older_orbax_is_refused() -> None:
    (orbax,) = PROJECT["project"]["optional-dependencies"]["checkpoint"]
    assert orbax == f"orbax-checkpoint>={_orbax_items.OLDEST_ORBAX}"
    for version in (_orbax_items.OLDEST_ORBAX, "0.12.10", "0.13.0rc1", "1.0"):
        _orbax_items.check_version(version)
    for version in ("0.12.4", "0.11.40"):
        with pytest.raises(ImportError) as error:
            _orbax_items.check_version(version)
        assert str(error.value) == (
            f"orbax-checkpoint {version} is too old to save states with shardfn.\n"
            "Install 0.12.5 or newer: pip install --upgrade orbax-checkpoint"
        )
