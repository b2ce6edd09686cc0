"""In: the text of the package. Out: numbers that decide something stand in `limits`,
each with its reason.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardfn
from shardfn._core import (
    limits,
    reading_limits,
    shown_limits,
    tile_limits,
    tuning_limits,
)

ROOT = Path(shardfn.__file__).parent
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
}

READ = {
    node.id
    for module, tree in TREES.items()
    if not re.fullmatch(r"_core\.(\w+_)?limits", module)
    for node in ast.walk(tree)
    if isinstance(node, ast.Name)
}

LIMITS = {
    "_core.limits": limits,
    "_core.reading_limits": reading_limits,
    "_core.shown_limits": shown_limits,
    "_core.tile_limits": tile_limits,
    "_core.tuning_limits": tuning_limits,
}

FIGURES = {
    "_core.compat.topologies": "a version of cuDNN",
    "analysis._data_sheets": "data sheets of machines",
    "analysis._latency": "latencies that others have published",
}
"""Modules with named numbers that are no thresholds of this library's."""

FORMATS = {
    "_core.compat": "JAX's versions",
    "_core.op_sharding_rule": "letters of the alphabet",
    "_lowering.extremum_jvp": "bytes of a float32",
    "_schedule.wire_dtypes": "bytes of a float32",
    "_trace.unordered": "bytes of a float32",
    "analysis._latency": "dimensions of a torus",
    "analysis._text": "bytes in a KiB",
    "rules.random": "bits of a word",
    "storage._leaves": "words of a raw key",
}
"""Modules and packages that compare with numbers that a format gives them."""


def is_number(node: ast.expr | None) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case (
            ast.Tuple(elts=elements)
            | ast.Call(func=ast.Name(id="Fraction"), args=elements)
        ):
            return bool(elements) and all(map(is_number, elements))
    return False


def named_numbers(tree: ast.Module) -> Iterator[str]:
    """Names in capitals of numbers, of a module or a class."""
    for node in ast.walk(tree):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            is_name = isinstance(target, ast.Name) and target.id.isupper()
            if is_name and is_number(node.value):  # pyright: ignore
                yield target.id  # pyright: ignore


def numbers_in(node: ast.expr) -> set[float]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}  # pyright: ignore


def compared_numbers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines that compare with a number other than 0, 1 and 2, or a multiple of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                factors = [side]
                if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult):
                    factors = [side.left, side.right]
                for factor in factors:
                    if is_number(factor) and not numbers_in(factor) <= {0, 1, 2}:
                        yield node.lineno, ast.unparse(node)


def test_other_modules_name_no_numbers() -> None:
    found = {name: list(named_numbers(tree)) for name, tree in TREES.items()}
    assert all(found.pop(name) for name in LIMITS), "they are found"
    found = {name: names for name, names in found.items() if names}
    assert found.keys() == FIGURES.keys(), found


def test_nothing_is_compared_with_a_bare_number() -> None:
    found = {name: list(compared_numbers(tree)) for name, tree in TREES.items()}
    found = {name: lines for name, lines in found.items() if lines}
    known = {
        name: known
        for name in found
        for known in FORMATS
        if f"{name}.".startswith(f"{known}.")
    }
    others = {name: found[name] for name in found if name not in known}
    assert others == {}, "name the number in shardfn/_core/limits.py"
    assert {*known.values()} == {*FORMATS}, "these compare with no number any more"


@pytest.mark.parametrize(
    "module, name",
    [(m, n) for m, each in LIMITS.items() for n in vars(each) if n.isupper()],
)
def test_every_limit_says_what_it_counts_and_is_used(module: str, name: str) -> None:
    body = TREES[module].body
    (at,) = (
        i
        for i, node in enumerate(body)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    reason = body[at + 1]
    assert isinstance(reason, ast.Expr) and isinstance(reason.value, ast.Constant)
    assert len(str(reason.value.value)) > 30
    assert name in READ, f"nothing reads {module}.{name}"
    words = re.findall(r"`([A-Z_]+)`", str(reason.value.value))
    assert all(hasattr(limits, word) for word in words)


DECIDE_NO_LINE = {
    "LOOP_SUMS": "of what is tried",
    "STATIONARY_PART": "of which leaves are tried, as the next",
    "STATIONARY_GROUPS": "of how many choices are tried, not of one",
    "DIMENSION_SWEEPS": "of how long a search goes on, not of what it finds",
    "GENERATED_TRIALS": "of how many choices are tried",
    "REPLICATED_SHARE": "of a warning, which gives the share",
    "REPLICATED_FLOPS": "of a warning, which gives them",
}


def test_plans_name_the_thresholds_that_decide_a_line() -> None:
    """Those that come before what is read of the user's step."""
    source = (ROOT / "_core/limits.py").read_text()
    of_plans, sections, _ = source.partition("\n# What is read of the user's step")
    assert sections
    names = re.findall(r"^([A-Z_]+) = ", of_plans, re.MULTILINE)
    texts = "".join(path.read_text() for path in sorted(ROOT.rglob("*.py")))
    unnamed = [name for name in names if not re.search(rf"\(limits\.{name}\b", texts)]
    assert unnamed == list(DECIDE_NO_LINE)
