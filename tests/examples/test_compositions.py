"""In: the examples of compositions. Out: three steps like those on one device, leaf by
leaf, and a plan that moves what the example says.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiers import exhaustively

FOLDER = Path(__file__).parents[2] / "examples" / "compositions"
EXAMPLES = {
    "pipeline": {("all_gather", "data"): "params/kernel"},
    "tensor_parallel": {("psum_scatter", "data"): "params/up"},
    "long_context": {
        ("all_gather", "context"): "attention",
        ("all_reduce", "data"): "params/up",
    },
    "experts": {
        ("all_to_all", "expert"): "experts",
        ("all_reduce", "data"): "params/experts/up",
    },
}


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["pipeline", *map(exhaustively, list(EXAMPLES)[1:])])
def test_example_is_the_plain_step_and_moves_what_it_says(name: str) -> None:
    example = load(name)
    mesh, batch = example.make_mesh(), example.make_batch(jax.random.key(1))
    step = example.sharded(mesh)
    needs_mesh = name in ("pipeline", "tensor_parallel")
    given = (jax.random.key(0), mesh) if needs_mesh else (jax.random.key(0),)
    state = step.init(example.create_state, *given)
    plan = step.plan(state, batch)
    for (op, axis), what in EXAMPLES[name].items():
        assert any(
            c.op == op and c.axis == axis and what in f"{c.path} {c.place}"
            for c in plan.collectives
        ), (op, axis, what)
    if name == "experts":
        assert not any(
            "experts/" in c.path for c in plan.collectives if c.op == "all_gather"
        )
    if name == "pipeline":
        text = step.lower(state, batch).compile().as_text() or ""
        assert len(re.findall(r" collective-permute\(", text)) == 2
        assert state["params"]["kernel"].sharding.spec[0] == "stage"
    plain, losses = jax.device_get(step.unshard(state)), []
    run = jax.jit(example.train_step)
    for _ in range(3):
        plain, expected = run(plain, batch)
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], 1e-5)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    got = jax.device_get(step.unshard(state))
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_allclose(x, y, 1e-4, 1e-5, err_msg=jax.tree_util.keystr(path))
