"""In: steps and named machines that are not there. Out: what `step.on` says of them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from compilers import aot
from plan_helpers import cpu_mesh

import shardfn

WIDTH, HIDDEN, LAYERS = 512, 1024, 3


def train_step(state, batch):
    """Scanned layers of two matmuls, rematerialized, in bfloat16."""

    def loss_fn(weights):
        @jax.checkpoint
        def layer(h, w):
            hidden = jax.nn.relu(h @ w["in"].astype(jnp.bfloat16))
            return hidden @ w["out"].astype(jnp.bfloat16), None

        h, _ = jax.lax.scan(layer, batch, weights)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["weights"])
    new = jax.tree.map(lambda w, g: w - g, state["weights"], grads)
    return {"weights": new, "count": state["count"] + 1}, loss


def abstract(*shape: int, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


STATE = {
    "weights": {
        "in": abstract(LAYERS, WIDTH, HIDDEN),
        "out": abstract(LAYERS, HIDDEN, WIDTH),
    },
    "count": abstract(dtype=jnp.int32),
}
ROWS = 1024
BATCH = abstract(ROWS, WIDTH, dtype=jnp.bfloat16)
STEP = shardfn.fully_shard(train_step, cpu_mesh(8))


@pytest.fixture(scope="module")
def h100() -> shardfn.Report:
    return STEP.on("h100:16", STATE, BATCH)


@pytest.mark.aot("h100:8")
def test_a_report_says_what_the_compiled_step_takes(h100) -> None:
    n, weights = 16, 2 * LAYERS * WIDTH * HIDDEN
    assert h100.plan.axes.sizes == (n,)
    assert h100.stored_bytes == weights * 4 // n + 4
    assert [(x.name, x.split) for x in h100.state] == [
        *[("count", False), ("weights/in", True), ("weights/out", True)]
    ]
    assert h100.verification.ok
    assert h100.plan.parameter_bytes == weights * 2
    assert h100.fits and h100.memory.temporary > 0
    assert h100.memory.arguments >= h100.stored_bytes
    layer = 2 * (ROWS // n) * WIDTH * HIDDEN
    # Per layer two matmuls forward, one of them again, four backward; the first layer's
    # input needs no gradient, but a loop computes it.
    assert h100.flops.model == {"bfloat16": 6 * LAYERS * layer}
    assert sum(h100.flops.run.values()) > 6 * LAYERS * layer


@pytest.mark.aot("h100:8")
def test_the_estimate_adds_up(h100) -> None:
    assert h100.exposed_seconds <= h100.transfer_seconds
    for part in (h100.compute_seconds, h100.memory_seconds, h100.exposed_seconds):
        assert 0 < part <= h100.step_seconds
    assert h100.step_seconds <= (
        h100.compute_seconds
        + h100.memory_seconds
        + h100.transfer_seconds
        + h100.gap_seconds
    )
    model = sum(h100.flops.model.values())
    assert h100.mfu == pytest.approx(model / h100.step_seconds / 989.5e12)
    # What is counted in the jaxpr is what the compiler kept.
    kept = sum(h100.timeline.flops.values())
    assert 0.8 < kept / sum(h100.flops.run.values()) <= 1
    # Sixteen devices on two hosts: 8 network cards of 50 GB/s at each edge.
    sent = h100.verification.wire_bytes
    links = h100.transfer_seconds - h100.timeline.latency
    assert links >= sent / 400e9
    assert sum(h100.timeline.exposed_by_op.values()) == h100.exposed_seconds


@pytest.mark.aot("h100:8")
def test_products_that_the_compiler_adds_are_said(h100) -> None:
    """XLA for GPUs multiplies all rows with the weights of each of four groups."""

    def loss_fn(w, batch):
        return jnp.mean(jax.lax.ragged_dot(batch["x"], w, batch["sizes"]) ** 2)

    def train(w, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(w, batch)
        return w - gradient, loss

    rows, groups = jax.P("data"), 4
    step = shardfn.fully_shard(
        train,
        cpu_mesh(8),
        batch_spec={"x": rows, "sizes": jax.P()},
    )
    batch = {"x": abstract(ROWS, WIDTH), "sizes": abstract(groups, dtype=jnp.int32)}
    report = step.on("h100:8", abstract(groups, WIDTH, HIDDEN), batch)
    asked = 2 * 2 * ROWS * WIDTH * HIDDEN // 8  # forward and the weights' gradient
    assert report.flops.run == {"float32": asked}
    assert sum(report.timeline.flops.values()) == groups * asked
    assert "268 MFLOP at 989.5 TFLOP/s; 1.07 GFLOP as compiled" in str(report)
    assert report.mfu == pytest.approx(asked / report.step_seconds / 989.5e12)
    assert "as compiled" not in str(h100)


@pytest.mark.aot("h100:8")
def test_a_report_prints_and_is_frozen(h100) -> None:
    text = str(h100)
    assert text.startswith("train_step on h100:16: 16 devices, mesh data=16\n")
    for line in ("stored state", "peak temporary", "while a matmul runs", "exposed"):
        assert f"  {line}" in text or line in text
    assert "fits" in text and "MFU" in text and "as planned" in text
    assert "estimate per step, at the rates of data sheets: no measurement" in text
    one = dataclasses.replace(h100.timeline.links[0], alone=True)
    others = [dataclasses.replace(x, alone=False) for x in h100.timeline.links[1:]]
    for links, said in ((one, *others), True), (tuple(others), False):
        played = dataclasses.replace(h100.timeline, links=links)
        shown = str(dataclasses.replace(h100, timeline=played))
        assert ("synchronous transfers" in shown) == said
        assert (f"1 of {len(links)} arrays, " in shown) == said
    assert "= 2.8" in text and " M, M = 6.0 MiB" in text
    with pytest.raises(dataclasses.FrozenInstanceError):
        h100.step = "other"


@pytest.mark.aot("h100:8")
def test_what_does_not_fit_is_said() -> None:
    huge = {"w": abstract(2**18, 2**18)}
    step = shardfn.fully_shard(
        lambda s, x: (s, jnp.sum(x @ s["w"])),
        cpu_mesh(8),
        donate=False,
        stationary=False,
    )
    report = step.on("h100:8", huge, abstract(8, 2**18))
    assert not report.fits and "DOES NOT FIT" in str(report)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in str(report)


@pytest.mark.parametrize("name", [aot("tpu:v5e:2x4")])
def test_a_tpu_report(name) -> None:
    report = STEP.on(name, STATE, BATCH)
    assert report.verification.extra == ()
    kept = sum(report.timeline.flops.values())
    assert 0.8 < kept / sum(report.flops.run.values()) <= 1
    assert report.memory.code > 0 and report.fits
    with pytest.raises(shardfn.ShardingError) as caught:
        huge = shardfn.fully_shard(
            lambda s, x: (s, jnp.sum(x @ s)), cpu_mesh(8), stationary=False
        )
        huge.on(name, abstract(2**17, 2**17), abstract(8, 2**17))
    message = str(caught.value)
    assert (
        " does not fit on tpu:v5e:2x4: its compiler says RESOURCE_EXHAUSTED" in message
    )
    assert "was called at test_report.py:" in message


@pytest.mark.aot("h100:8")
def test_stages_are_told_as_they_start() -> None:
    stages: list[str] = []
    tiny = shardfn.fully_shard(lambda w, x: (w, x @ w), cpu_mesh(8), min_size=8)
    w = tiny.init(lambda: jnp.ones((64, 60)))
    report = tiny.on("h100:8", w, jnp.ones((8, 64)), progress=stages.append)
    assert stages == [
        *("describing devices", "planning", "tracing", "compiling"),
        "reading the compiled program",
    ]
    assert report.state[0].shape == (64, 60)


@pytest.mark.aot("h100:8")
def test_several_mesh_axes_need_sizes() -> None:
    step = shardfn.fully_shard(
        train_step, cpu_mesh(2, 4), axis=("replica", "data"), min_size=8
    )
    with pytest.raises(shardfn.ShardingError) as caught:
        step.on("h100:16", STATE, BATCH)
    message = str(caught.value)
    assert message.startswith(
        "target 'h100:16' has 16 devices and the mesh ('replica', 'data') has shape "
        "(2, 4).\n  train_step.on was called at test_report.py:"
    )
    assert message.endswith("Pass mesh_shape=, one size per mesh axis.")
    report = step.on("h100:16", STATE, BATCH, mesh_shape=(2, 8))
    assert report.plan.axes.sizes == (2, 8)
    assert report.stored_bytes == STEP.on("h100:8", STATE, BATCH).stored_bytes


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match="no compile-only target is called 'h1000:8'"):
        STEP.on("h1000:8", STATE, BATCH)
