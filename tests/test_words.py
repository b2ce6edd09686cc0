"""In: the text of the package. Out: its names are terms of the field, each for one
thing; see the glossary.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import shardfn

ROOT = Path(shardfn.__file__).parent

WORDS = frozenset(
    "want wants wanted looks settle settled hold held told untold news odd beside "
    "home late born again besides".split()
)
"""Everyday words for what Shardy, ZeRO, FSDP or JAX have a word: a preferred sharding,
the key of an equation, a value reduced at its producer."""

NOT_ALONE = frozenset("keep keeps kept".split())
"""Verbs that say nothing of what is kept, and for how long, unless a noun does."""

IN_TEXT = WORDS & frozenset("want wants wanted settle settled told untold born".split())
"""Those of the words that have no place in docstrings and comments, either."""

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


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a file, and where they begin."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


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


def test_functions_arguments_and_fields_say_what_is_kept() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [getattr(node, "name", ""), getattr(node, "arg", "")]
            if isinstance(node, ast.ClassDef):
                fields = (getattr(each, "target", None) for each in node.body)
                named += [f.id for f in fields if isinstance(f, ast.Name)]
            if NOT_ALONE & {(name or "").strip("_").lower() for name in named}:
                found.append(f"{path.relative_to(ROOT)}: {named}")
    assert found == []


def test_text_is_in_terms_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {words}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, text in texts(path.read_text())
        if (words := IN_TEXT & set(re.findall("[a-z]+", text.lower())))
    ]
    assert found == []


def test_a_file_says_what_goes_in_and_what_comes_out() -> None:
    silent = []
    for path in sorted(ROOT.rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if not re.search(r"\bIn:\s.*\bOut:\s", text, re.DOTALL):
            silent.append(path.relative_to(ROOT).as_posix())
    assert silent == ["__init__.py", "__main__.py"]


def test_a_class_is_called_like_no_other() -> None:
    defined: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where = path.relative_to(ROOT).as_posix()
                defined.setdefault(node.name, []).append(where)
    assert {n: files for n, files in defined.items() if len(files) > 1} == {}


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
