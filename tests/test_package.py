"""In: what is not code: the package's metadata, workflows. Out: they say the same as
the code does.
"""

import re
import tomllib
from pathlib import Path

import pytest

import shardfn

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = ROOT / ".github" / "workflows"


def test_the_version_is_said_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", shardfn.__version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
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
