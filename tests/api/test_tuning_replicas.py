"""In: steps between hosts whose transfers are mostly latency. Out: advice on a mesh
with replicas that fits, which runs as it says, and which tuning lists as not tried.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._api.tuning.advise import advise
from shardfn._api.tuning.replica_rows import replica_rows
from shardfn._lowering.option_table import NOT_DELAYED
from shardfn.analysis import targets

TARGET, WIDTH, LAYERS = "h100:32", 256, 4


def train_step(state, batch):
    def loss_of(state):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch, state)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


STATE = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
BATCH = jax.ShapeDtypeStruct((32 * 64, WIDTH), jnp.float32)
STORED = LAYERS * WIDTH * WIDTH * 4


@pytest.fixture(scope="module")
def report():
    step = shardfn.fully_shard(train_step, targets.mesh(TARGET), stationary=False)
    return step.on(TARGET, STATE, BATCH)


def row_of(report, memory: int, target: str = TARGET):
    found = tuple(replica_rows(report, targets.devices(target), memory))
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.aot(TARGET)
def test_the_fewest_hosts_that_hold_the_state_are_advised(report) -> None:
    peak = report.memory.peak
    row = row_of(report, report.target.memory)
    assert row.options == (("axis", ("replica", "data")),) and row.mesh == (4, 8)
    more = STORED // 8 - STORED // 32
    assert row.takes == 2 * more  # with gradients
    assert 0 < row.saves == report.exposed_seconds
    assert row.asked == (
        "axis=('replica', 'data') and jax.make_mesh((4, 8), ('replica', 'data'))"
    )
    assert "of what transfers take is latency, on 4 slices; each device" in row.why
    tight = row_of(report, peak + STORED // 8)
    assert tight.mesh == (2, 16) and tight.takes == 2 * (STORED // 16 - STORED // 32)
    assert row_of(report, peak + STORED // 64) is None
    assert row_of(report, report.target.memory, "h100:8") is None
    assert row in report.advice
    axes = dataclasses.replace(report.plan.axes, names=("replica",))
    plan = dataclasses.replace(report.plan, axes=axes)
    named = row_of(dataclasses.replace(report, plan=plan), report.target.memory)
    assert dict(named.options)["axis"] == ("replicas", "replica")


@pytest.mark.aot(TARGET)
def test_where_bytes_take_most_of_the_time_nothing_is_advised(report) -> None:
    timeline = dataclasses.replace(report.timeline, latency=0.0)
    slow = dataclasses.replace(report, timeline=timeline)
    assert row_of(slow, report.target.memory) is None


@pytest.mark.aot(TARGET)
def test_the_mesh_that_is_advised_is_one_to_compile_for(report) -> None:
    mesh = targets.mesh(TARGET, ("replica", "data"), (4, 8))
    step = shardfn.fully_shard(
        train_step, mesh, axis=("replica", "data"), stationary=False
    )
    there = step.on(TARGET, STATE, BATCH, mesh_shape=(4, 8))
    assert there.stored_bytes == STORED // 8
    assert there.timeline.latency < report.timeline.latency
    assert row_of(there, report.target.memory) is None  # it has replicas
    # Of a sum over replicas, too, no whole gradient lives on.
    lines = [c for c in there.plan.collectives if c.op == "psum_scatter"]
    assert lines and all(c.undelayed for c in lines)
    devices = targets.devices(TARGET)
    frees = [r for r in advise(there, devices, 0) if r.title == NOT_DELAYED]
    assert [row.takes for row in frees] == [0]


@pytest.mark.aot(TARGET)
def test_tuning_keeps_the_mesh() -> None:
    step = shardfn.fully_shard(train_step, cpu_mesh(8), stationary=False)
    found = shardfn.tune(step, TARGET, STATE, BATCH, compilations=2)
    assert not any("axis" in dict(c.options) for c in found.candidates)
    assert [row.mesh for row in found.untried if row.mesh] == [(4, 8)]
    assert "jax.make_mesh((4, 8), ('replica', 'data')) saves at most" in str(found)
