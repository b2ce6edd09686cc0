"""In: steps that call cuDNN's attention, where there is none. Out: how many FLOPs they
are, and what `step.on` says of them for GPUs that are not there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_on_cpus import cudnn as cudnn
from jax._src.cudnn import fused_attention_stablehlo
from plan_helpers import cpu_mesh

import shardfn
from shardfn.analysis._flops import count_flops

ROWS, SIZE, HEADS, GROUPS, WIDTH = 16, 64, 8, 2, 32


def abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)


@pytest.mark.parametrize("size, keys", [(12, 12), (6, 12), (12, 6)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.usefixtures("cudnn")
def test_scores_that_do_not_count_are_not_computed(size, keys, window, is_causal):
    if window and not is_causal:
        pytest.skip("JAX has such windows for causal attention")
    options: dict[str, Any] = {"is_causal": is_causal}
    if window:
        options["local_window_size"] = (window - 1, 0)
    args = abstract(3, size, 4, 8), *2 * [abstract(3, keys, 2, 8)]

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, **options).sum()

    t, s = np.mgrid[:size, :keys]
    counted = (t >= s) | (not is_causal)
    counted &= t - s < (window or size)
    product = 2 * 3 * 4 * int(counted.sum()) * 8
    for fn, products in ((loss, 2), (jax.grad(loss, (0, 1, 2)), 7)):
        found = count_flops(jax.make_jaxpr(fn)(*args).jaxpr)
        assert found.run == {"bfloat16": products * product}


def train_step(state: Any, batch: Any) -> Any:
    def loss(state: Any) -> Any:
        def heads(name: str) -> Any:
            return (batch @ state[name]).reshape(*batch.shape[:2], -1, WIDTH)

        out = attend(*map(heads, "qkv"), is_causal=True)
        return jnp.square(out).mean().astype(jnp.float32)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(jnp.subtract, state, grads), value


WIDTHS = {"q": HEADS * WIDTH, "k": GROUPS * WIDTH, "v": GROUPS * WIDTH}
STATE = {name: abstract(128, width) for name, width in WIDTHS.items()}
BATCH = abstract(ROWS, SIZE, 128)


@pytest.mark.aot("h100:8")
def test_a_step_is_compiled_for_gpus_where_there_is_no_cudnn():
    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=0)
    report = step.on("h100:8", STATE, BATCH)
    assert report.verification.ok
    assert {line.path for line in report.plan.collectives} == {*"qkv", ""}
    product = 2 * (ROWS // 8) * SIZE * 128
    weights = 2 * product * sum(WIDTHS.values())  # forward, and their gradients
    scores = SIZE * (SIZE + 1) // 2
    attention = 7 * 2 * (ROWS // 8) * HEADS * scores * WIDTH
    assert report.flops.run == {"bfloat16": weights + attention}
    assert report.timeline.flops == report.flops.run


def test_where_the_step_runs_cudnn_has_to_be_there(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)
    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=0)
    with pytest.raises(RuntimeError, match="cuDNN"):
        step.plan(STATE, BATCH)
