"""In: mesh axes of several kinds. Out: what planning asks of an axis is answered by its
kind: a new kind is one row.
"""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn._core.axis_kinds import DATA, REPLICA, AxisKind, default_kinds
from shardfn._core.leaves import Leaf
from shardfn._core.sharding import Axes, Split
from shardfn.storage._layout import layouts
from shardfn.storage._leaves import batch_shardings

ROOT = Path(shardfn.__file__).parent
EXPERT = AxisKind("expert", stores=False, divides=False, batch=False)
"""As an axis that experts lie along, and neither rows nor parameters by themselves."""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_axis_stores_and_all_have_rows(count: int) -> None:
    axes = Axes(("pod", "replica", "data")[-count:], (2,) * count)
    assert axes.kinds == default_kinds(count) == (*[REPLICA] * (count - 1), DATA)
    assert axes.stored == axes.divided == count - 1
    assert axes.batch == axes.names


def test_a_new_kind_is_one_row() -> None:
    axes = Axes(("data", "expert"), (4, 2), groups=(2,), kinds=(DATA, EXPERT))
    leaf = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    path = (jax.tree_util.DictKey("w"),)
    ((sharding, _),) = layouts([path], [leaf], axes, min_size=0)
    assert sharding == (Split(0, stored=True), None)
    (rows,) = batch_shardings((leaf,), [Leaf(path, leaf)], None, axes)
    assert rows == (Split(0), None)
    assert axes.parts == (2, 2) and axes.bound(1) == ("expert",)
    assert axes.bound(0) == ("data__0", "data__1")


def test_nothing_goes_by_the_place_of_an_axis() -> None:
    """`axes.names[-1]`, `sizes[0]` and the like: what they ask is a kind's."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Subscript):
                continue
            of, at = ast.unparse(node.value), ast.unparse(node.slice)
            if of.endswith(("axes.names", "axes.sizes")) and at.strip("-").isdigit():
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
