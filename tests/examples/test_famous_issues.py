"""In: the programs of well-known issues. Out: steps like those on one device, leaf by
leaf, and what `jit` and shardfn compile to, side by side, at small sizes.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import aot
from tiers import exhaustively

from shardfn.testing import assert_parity

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A module of the example, by name."""
    for folder in ("benchmarks", "examples/famous_issues"):
        monkeypatch.syspath_prepend(ROOT / folder)
    before = dict(sys.modules)
    yield importlib.import_module
    for name in sys.modules.keys() - before.keys():
        if not name.startswith(("jax", "shardfn", "numpy")):
            del sys.modules[name]


TINY = {
    "gathers_kept": (2, 8, 16),
    "unrolled_layers": (1, 8, 16),
    "large_table": (24, 8, 16),
    "five_devices": (9, 15),
    "summed_in_a_loop": (3, 5),
}
"""What `arguments` takes, of odd sizes."""
ENDS = {
    "reshard": "#21562",
    "gathers_kept": "#25010",
    "unrolled_layers": "#20763",
    "large_table": "#112",
    "five_devices": "#429",
    "summed_in_a_loop": "#49143",
}


def filled(leaf: jax.ShapeDtypeStruct, vocabulary: int) -> jax.Array:
    random = np.random.default_rng(leaf.size)
    if leaf.dtype == jnp.int32:
        return jnp.asarray(random.integers(0, vocabulary, leaf.shape), jnp.int32)
    return jnp.asarray(random.normal(size=leaf.shape) * 0.1, leaf.dtype)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "name", ["summed_in_a_loop", *map(exhaustively, list(TINY)[:4])]
)
def test_step_is_the_plain_step(name: str, module: Callable[[str], Any]) -> None:
    issue = module(name)
    count = 5 if name == "five_devices" else 8
    mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
    args = issue.arguments(*TINY[name])
    args = jax.tree.map(lambda x: filled(x, 5), args)
    options = {"min_size": 0}
    if name == "summed_in_a_loop":
        options["batch_spec"] = jax.P(None, "data")
    assert_parity(issue.train_step, mesh, *args, steps=2, tol=2e-2, **options)


@pytest.mark.parametrize(
    "target, name",
    [
        aot("h100:8", "reshard"),
        *[aot("h100:8", name, exhaustive=True) for name in [*TINY][:4]],
        aot("tpu:v5e:2x2", "summed_in_a_loop", exhaustive=True),
    ],
)
def test_programs_differ_as_the_page_says(
    target: str, name: str, module: Callable[[str], Any]
) -> None:
    *others, jit, sharded = module("run").rows(name, small=True)
    assert all(
        row.arguments and row.issue.endswith(ENDS[name]) for row in (jit, sharded)
    )
    if name == "gathers_kept":
        assert jit.sent == sharded.sent and jit.collectives < sharded.collectives
        assert jit.temporary > sharded.temporary
    elif name == "five_devices":
        assert others[0].remark == "refused: IndivisibleError"
        assert sharded.sent <= 1.01 * jit.sent
        assert sharded.arguments < jit.arguments
    elif name == "summed_in_a_loop":
        assert sharded.remark == "sums behind the loop"
        if jax.__version__ == "0.10.2":  # the compiler of 0.12 has this mended
            assert jit.remark == "zeroes in the loop, sums behind it"
        else:
            assert jit.remark == "sums in the loop" and jit.sent > sharded.sent
    else:
        assert jit.sent > 2 * sharded.sent and jit.temporary > sharded.temporary


def test_a_wrong_name_says_which_there_are(
    module: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module("run").main(["scatter"])
    assert (
        "no issue is called 'scatter'; there are ['reshard', "
        in capsys.readouterr().err
    )
