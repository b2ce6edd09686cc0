"""In: steps that are compiled with predicted latencies. Out: what XLA is told, what it
makes of that, and results that are the plain step's.
"""

import re

import jax
import numpy as np
import pytest
from compilers import aot
from plan_helpers import cpu_mesh
from test_tuning import ROWS, STATE, abstract, train_step

import shardfn
from shardfn._api import compiled_steps
from shardfn._api.compiled_steps import predicted_latencies
from shardfn._api.predicted_latencies import are_predicted
from shardfn._api.tuning.tuned_options import TunedOptions, read, state_of, write
from shardfn._core.errors import ShardingError
from shardfn.analysis import targets
from shardfn.analysis._data_sheets import DATA_SHEETS
from shardfn.analysis._gpus import GPUS
from shardfn.analysis._hlo.latency_profile import latency_profile
from shardfn.analysis._hlo.play import play
from shardfn.analysis._rates import KINDS, gpus_of, rates_of

HOSTS = "h100:16"


def test_a_profile_names_each_instruction_once_in_order() -> None:
    text = latency_profile([("fusion.2", 3e-3), ("all-gather-start", 1.5e-6)]).decode()
    found = re.findall(r'^costs \{ name: "(.+)" cost_us: (.+) \}$', text, re.M)
    assert [name for name, _ in found] == ["all-gather-start", "fusion.2"]
    assert [float(us) for _, us in found] == pytest.approx([1.5, 3000])


def test_every_gpu_is_known_by_its_kind() -> None:
    assert set(KINDS.values()) == set(GPUS) <= set(DATA_SHEETS)


@pytest.mark.parametrize("name", [aot(HOSTS)])
def test_a_step_is_compiled_by_what_its_instructions_take(name: str) -> None:
    mesh = targets.mesh(name)
    arguments = abstract(STATE), jax.ShapeDtypeStruct((16 * 64, 256), np.float32)
    steps = [
        shardfn.fully_shard(train_step, mesh, latencies=which)
        for which in ("xla", "predicted")
    ]
    assert [are_predicted(s.programs.latencies, mesh) for s in steps] == [False, True]
    target = gpus_of(mesh)
    assert target is not None and target.num_devices == 16
    rates = rates_of(target, mesh)
    by_xla, predicted = (
        play(step.lower(*arguments).compile().as_text() or "", rates) for step in steps
    )
    assert predicted.exposed <= by_xla.exposed
    durations = dict(by_xla.durations)
    kernels = len(by_xla.durations)
    assert kernels > 10 and all(seconds > 0 for seconds in durations.values())
    assert any("all-gather" in instruction for instruction in durations)
    assert any("reduce-scatter" in instruction for instruction in durations)
    option = predicted_latencies(steps[0].lower(*arguments), mesh)
    assert option["fdo_profile"] == latency_profile(by_xla.durations)
    report = steps[1].on(name, *arguments)
    assert "latencies predicted for XLA's scheduler" in str(report)
    assert report.timeline.exposed == pytest.approx(predicted.exposed)
    assert "XLA's scheduler" not in str(steps[0].on(name, *arguments))


def test_a_gpu_without_a_data_sheet_is_refused() -> None:
    lowered = jax.jit(lambda x: x).lower(1.0)
    with pytest.raises(ShardingError) as caught:
        predicted_latencies(lowered, cpu_mesh(8))
    message = str(caught.value)
    assert "latencies='predicted' needs the data sheet of cpu, and has" in message
    assert "H100" in message and "JAX_ENABLE_PGLE=1" in message


@pytest.mark.parametrize("value", ["fast", 1, True, ["xla"]])
def test_another_value_is_refused(value) -> None:
    with pytest.raises(ShardingError) as caught:
        shardfn.fully_shard(train_step, cpu_mesh(8), latencies=value)
    message = str(caught.value)
    assert "latencies cannot be" in message and "test_predicted_latencies.py" in message
    assert "Pass 'predicted', 'xla' or None." in message


def test_a_step_without_a_mesh_is_not_compiled_by_itself() -> None:
    with pytest.raises(ShardingError, match="latencies='predicted' needs a mesh"):
        shardfn.fully_shard(train_step, axis="data", latencies="predicted")


SMALL = jax.tree.map(lambda x: x * np.asarray(0.5, x.dtype), STATE)


def few_steps(step):
    state, losses = step.shard(SMALL), []
    for _ in range(3):
        state, loss = step(state, ROWS)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, step.unshard(state)), losses


def plain_steps():
    state, losses, run = SMALL, [], jax.jit(train_step)
    for _ in range(3):
        state, loss = run(state, ROWS)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, state), losses


def assert_as_plain(step) -> None:
    (found, losses), (expected, plain) = few_steps(step), plain_steps()
    assert losses == pytest.approx(plain, rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6),
        *(
            found,
            expected,
        ),
    )


def test_nothing_is_predicted_on_cpus() -> None:
    step = shardfn.fully_shard(train_step, cpu_mesh(8), latencies="predicted")
    assert_as_plain(step)


@pytest.fixture
def predicted(monkeypatch) -> list[str]:
    """What is compiled to predict latencies, on CPUs that are taken for GPUs."""
    texts = []

    def note(lowered, mesh):
        texts.append(lowered.compile().as_text())
        return {}

    monkeypatch.setattr(compiled_steps, "are_predicted", lambda x, _: x == "predicted")
    monkeypatch.setattr(compiled_steps, "predicted_latencies", note)
    return texts


@pytest.mark.parametrize("verify", ["off", "error"])
def test_latencies_are_predicted_once_for_each_kind_of_batch(predicted, verify) -> None:
    step = shardfn.fully_shard(
        train_step, cpu_mesh(8), latencies="predicted", verify=verify
    )
    assert_as_plain(step)
    assert len(predicted) == 1 and "all-gather" in predicted[0]
    state = step.shard(STATE)
    state, _ = step(state, ROWS[:32])
    step(state, ROWS)
    assert len(predicted) == 2


def test_a_part_of_another_program_is_compiled_with_that(predicted) -> None:
    step = shardfn.fully_shard(train_step, cpu_mesh(8), latencies="predicted")
    jax.jit(lambda state, rows: step(state, rows)[1])(step.shard(STATE), ROWS)
    assert not predicted


def test_a_file_of_tuned_options_says_whose_latencies(predicted, tmp_path) -> None:
    plan = shardfn.fully_shard(train_step, cpu_mesh(8)).plan(STATE, ROWS)
    leaves = state_of((x.name, x.shape, x.dtype) for x in plan.leaves)
    options = (("latencies", "predicted"),)
    made_for = "train_step", HOSTS, "cuda", jax.__version__
    path = tmp_path / "tuned.json"
    write(path, TunedOptions(*made_for, leaves, plan.operations_hash, options))
    assert read(path).latencies == "predicted"
    tuned = shardfn.fully_shard(train_step, cpu_mesh(8), options=path)
    assert_as_plain(tuned)
    assert len(predicted) == 1
    own = shardfn.fully_shard(train_step, cpu_mesh(8), options=path, latencies="xla")
    assert_as_plain(own)
    assert len(predicted) == 1, "what is given in the call counts"


def test_each_dtype_of_a_state_has_its_own(monkeypatch) -> None:
    """As of a batch: what is predicted is of the program that is compiled."""
    seen = []
    monkeypatch.setattr(compiled_steps, "are_predicted", lambda *_: True)
    monkeypatch.setattr(
        compiled_steps,
        "predicted_latencies",
        lambda lowered, mesh: seen.append(lowered.in_avals[0][0][0].dtype) or {},
    )

    def step(w, x):
        return w - x.mean().astype(w.dtype) * w

    options = {"min_size": 0, "state_argnums": 0}
    sharded = shardfn.fully_shard(step, cpu_mesh(8), **options)
    for dtype in (np.float32, np.float16):
        sharded(np.ones((16, 8), dtype), np.ones(8, np.float32))
    assert seen == [np.float32, np.float16]
