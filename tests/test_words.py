"""In: the text of the package. Out: its names are terms of the field, each for one
thing; see the glossary.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import shardfn

ROOT = Path(shardfn.__file__).parent

WORDS = frozenset(
    "want wants wanted looks settle settled hold held told untold news odd beside "
    "home late born".split()
)
"""Everyday words for what Shardy, ZeRO, FSDP or JAX have a word: a preferred sharding,
the key of an equation, a value reduced at its producer."""

ONE_MEANING = frozenset("Place Reshard Frame Options Split Uneven".split())
"""Names that once stood for several things."""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What a file calls its values, functions and types, and where."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr


def parts(name: str) -> set[str]:
    return {p.lower() for p in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}


def test_names_are_terms_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, name in names(ast.parse(path.read_text()))
        if parts(name) & WORDS
    ]
    assert found == []


def test_a_name_has_one_meaning() -> None:
    defined: dict[str, list[str]] = {name: [] for name in ONE_MEANING}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            made = {t.id for t in targets if isinstance(t, ast.Name)}
            made.add(getattr(node, "name", ""))
            for name in made & ONE_MEANING:
                defined[name].append(path.relative_to(ROOT).as_posix())
    assert {n: files for n, files in defined.items() if len(files) > 1} == {}
