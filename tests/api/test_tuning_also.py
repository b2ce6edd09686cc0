"""In: a step that waits, or does not fit, and options that are tried only if asked for.
Out: which of them are, with which values, and what is chosen.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._api.tuning.asked_rows import ALSO, asked_rows
from shardfn._core.errors import ShardingError

H100, WIDTH, LAYERS = "h100:8", 512, 4


def loss_of(weights, rows):
    def layer(h, w):
        return jnp.tanh(h @ w["in"]) @ w["out"], None

    h, _ = jax.lax.scan(jax.checkpoint(layer), rows, weights)
    return jnp.mean(h**2)


def train_step(state, batch):
    """Momentum, so that the state is more than what the step uses first."""
    loss, grads = jax.value_and_grad(loss_of)(state["weights"], batch)
    speed = jax.tree.map(lambda m, g: 0.9 * m + g, state["speed"], grads)
    new = jax.tree.map(lambda w, m: w - 0.1 * m, state["weights"], speed)
    return {"weights": new, "speed": speed}, loss


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


LEAVES = {"in": shape(LAYERS, WIDTH, 2048), "out": shape(LAYERS, 2048, WIDTH)}
ARGUMENTS = {"weights": LEAVES, "speed": LEAVES}, shape(64, WIDTH)


@pytest.fixture(scope="module")
def report():
    step = shardfn.fully_shard(train_step, cpu_mesh(8), stationary=False)
    return step.on(H100, *ARGUMENTS)


def asked(report, memory, *also):
    return [row.options for row in asked_rows(report, memory, also)]


@pytest.mark.aot(H100)
def test_only_what_is_asked_for_is_tried(report) -> None:
    memory = report.target.memory
    assert asked(report, memory) == []
    rows = {
        name: [((name, "bfloat16"),), ((name, "int8"),)]
        for name in ("gather_dtype", "reduce_dtype")
    }
    for name, options in rows.items():
        assert asked(report, memory, name) == options
    assert asked(report, memory, *ALSO) == [
        *rows["gather_dtype"],
        *rows["reduce_dtype"],
    ]
    for row in asked_rows(report, memory, ALSO):
        assert 0 < row.saves <= report.exposed_seconds and row.takes == 0
        assert "100% of whose bytes are wider" in row.why


@pytest.mark.aot(H100)
def test_what_moves_in_bfloat16_is_asked_for_in_eight_bits_alone(report) -> None:
    lines = tuple(
        dataclasses.replace(line, dtype="bfloat16") for line in report.plan.collectives
    )
    plan = dataclasses.replace(report.plan, collectives=lines)
    narrow = dataclasses.replace(report, plan=plan)
    assert asked(narrow, 2**40, "gather_dtype") == [(("gather_dtype", "int8"),)]
    quiet = dataclasses.replace(report.timeline, device=())
    waits_for_none = dataclasses.replace(report, timeline=quiet)
    assert asked(waits_for_none, 2**40, *ALSO) == []


@pytest.mark.aot(H100)
def test_the_host_is_asked_for_what_is_lacking(report) -> None:
    peak = report.memory.peak
    (row,) = asked_rows(report, peak - 2**20, ("offload",))
    assert row.options == (("offload", f"{(peak - 2**20) >> 10}KiB"),)
    assert row.takes == -(2**20) and "1.0 MiB are lacking; the host has" in row.why
    assert asked(report, peak, "offload") == []
    small = dataclasses.replace(report.target, memory=peak - 2**20)
    lacking = dataclasses.replace(report, target=small)
    # What sends less frees nothing.
    assert asked(lacking, small.memory, *ALSO) == [(("offload", "auto"),)]
    assert asked(lacking, 3, "offload") == [(("offload", "1KiB"),)]


@pytest.mark.aot(H100)
def test_what_a_step_asks_for_itself_is_left_alone() -> None:
    given = {"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16", "offload": "host"}
    step = shardfn.fully_shard(train_step, cpu_mesh(8), stationary=False, **given)
    assert asked(step.on(H100, *ARGUMENTS), 0, *ALSO) == []


@pytest.mark.aot(H100)
def test_a_step_that_waits_is_tuned_to_send_less(tmp_path) -> None:
    step = shardfn.fully_shard(train_step, cpu_mesh(8), stationary=False)
    asked_for = shardfn.tune(
        step, H100, *ARGUMENTS, also=("gather_dtype",), compilations=3
    )
    dtypes = [dict(c.options).get("gather_dtype") for c in asked_for.candidates]
    assert dtypes[0] is None and {"bfloat16", "int8"} & {*dtypes}
    assert all(c.as_planned for c in asked_for.candidates)
    sent = {d: c.wire for d, c in zip(dtypes, asked_for.candidates, strict=True)}
    assert all(sent[d] < sent[None] for d in sent if d)
    assert asked_for.chosen.options and "gather_dtype='" in asked_for.python()
    asked_for.save(tmp_path / "tuned.json")
    again = shardfn.fully_shard(
        train_step, cpu_mesh(8), stationary=False, options=tmp_path / "tuned.json"
    )
    assert again.plan(*ARGUMENTS).wire_bytes == asked_for.chosen.wire


@pytest.mark.aot(H100)
def test_a_step_that_does_not_fit_is_tuned_to_use_the_host(report) -> None:
    memory = report.memory.peak - 2**20
    step = shardfn.fully_shard(train_step, cpu_mesh(8), stationary=False)
    found = shardfn.tune(
        step, H100, *ARGUMENTS, memory=memory, also=("offload",), compilations=2
    )
    (on_host,) = [c for c in found.candidates if "offload" in dict(c.options)]
    assert on_host.fits(memory) and not found.candidates[0].fits(memory)
    assert on_host.report.host_bytes > 0
    assert found.chosen.fits(memory)


@pytest.mark.parametrize("also", ["offload", ("prefetch",), 3, ("offload", None)])
def test_what_cannot_be_asked_for_is_refused(also) -> None:
    with pytest.raises(ShardingError) as caught:
        shardfn.tune(train_step, H100, *ARGUMENTS, also=also)
    message = str(caught.value)
    assert f"also cannot be {also!r}" in message and "test_tuning_also.py" in message
    assert "Pass a tuple of some of 'offload', 'gather_dtype', 'reduce" in message
