"""In: README.md and docs/*.md. Out: their code blocks, ready to run.

A block marked `python` runs; blocks of one page share a namespace. One marked `text`
is what the block before it prints, where `...` stands for anything. Other blocks
(`bash`, `toml`, none) are for reading. Sybil reads the files; its comments work too,
such as `<!--- skip: next -->` in front of code of another library.
"""

import contextlib
import doctest
import io
import re
from pathlib import Path

from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract import AbstractCodeBlockParser
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import (
    DirectiveInHTMLCommentLexer,
    RawFencedCodeBlockLexer,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# A block of nothing but included files: those have tests of their own.
INCLUDED = re.compile(r'(\s*--8<-- "[^"]+"\s*)+')

_run_python = PythonEvaluator()
_matches = doctest.OutputChecker().check_output


class _BlockParser(AbstractCodeBlockParser):
    """Code blocks of one language, whatever options follow it on the fence."""

    def __init__(self, language: str) -> None:
        info = re.compile(rf"(?P<arguments>{language})(?: [^\n]*)?\n")
        hidden = DirectiveInHTMLCommentLexer("invisible-code-block", language)
        super().__init__([RawFencedCodeBlockLexer(info), hidden], language)


class _Python(_BlockParser):
    def evaluate(self, example: Example) -> None:
        if INCLUDED.fullmatch(example.parsed):
            return
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            _run_python(example)
        example.namespace["__printed__"] = printed.getvalue()


class _Text(_BlockParser):
    def evaluate(self, example: Example) -> str | None:
        printed = example.namespace.get("__printed__", "")
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if not _matches(example.parsed, printed, flags):
            return f"the page says\n{example.parsed}\nbut this is printed\n{printed}"
        return None


def read(page: Path) -> Document:
    """The page; each of its `examples()` is evaluated in turn."""
    return Document.parse(str(page), SkipParser(), _Python("python"), _Text("text"))
