"""In: steps, candidates with figures of our own, and files of tuned options. Out: which
options are tried and chosen, what is printed, and steps that take the options.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._api.tuning.advise import advise
from shardfn._api.tuning.candidates import Candidate, Tuning, choose
from shardfn._api.tuning.tune import joined
from shardfn._api.tuning.tuned_options import TunedOptions, read, state_of, write
from shardfn._core import compat
from shardfn._core.errors import ShardingError
from shardfn._core.tuning_limits import ADVISED_SHARE, TUNED_SHARE
from shardfn._lowering.option_table import NETWORK_FLAG, NOT_DELAYED

WIDTH, LAYERS, MICRO = 256, 4, 4


def layer(h, w):
    return jax.nn.relu(h @ w["in"]) @ w["out"] + w["bias"], None


def loss_of(weights, rows):
    h, _ = jax.lax.scan(jax.checkpoint(layer), rows, weights)
    return jnp.mean(h**2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state["weights"], batch)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], grads)
    return {**state, "weights": new}, loss


def microbatched(state, batch):
    def add(grads, rows):
        one = jax.grad(loss_of)(state["weights"], rows)
        return jax.tree.map(jnp.add, grads, one), None

    zeros = jax.tree.map(jnp.zeros_like, state["weights"])
    parts = batch.reshape(MICRO, -1, WIDTH)
    grads, _ = jax.lax.scan(add, zeros, parts)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], grads)
    return {**state, "weights": new}, jnp.float32(0)


def made(width: int = WIDTH):
    random = np.random.default_rng(0)
    shapes = {
        "in": (LAYERS, width, 2 * width),
        "out": (LAYERS, 2 * width, width),
        "bias": (LAYERS, width),
    }
    weights = {k: random.normal(0, 0.1, s).astype("f4") for k, s in shapes.items()}
    return {"weights": weights, "count": np.int32(3)}


STATE = made()
ROWS = np.random.default_rng(1).normal(size=(64, WIDTH)).astype("f4")


def candidate(title: str, seconds: float, peak: int, **others) -> Candidate:
    return Candidate(title, (("prefetch", len(title)),), seconds, peak, **others)


FIRST = Candidate("as it is", (), 1.0, 100)
FASTER = candidate("faster", 0.9, 150)
HARDLY = candidate("hardly", 1 - TUNED_SHARE / 2, 100)
SMALLER = candidate("smaller", 1.2, 60)
REFUSED = Candidate("refused", (), error="it does not fit")
UNPLANNED = candidate("unplanned", 0.1, 10, as_planned=False)


@pytest.mark.parametrize(
    "others, memory, chosen",
    [
        ([FASTER, SMALLER], 200, FASTER),
        ([FASTER, SMALLER], 120, FIRST),  # the faster does not fit
        ([FASTER, SMALLER], 70, SMALLER),  # nothing else fits
        ([FASTER, SMALLER], 10, SMALLER),  # nothing fits: the smallest
        ([HARDLY], 200, FIRST),  # faster by less than a prediction tells
        ([REFUSED, UNPLANNED], 200, FIRST),
        ([REFUSED, UNPLANNED], 10, FIRST),
    ],
)
def test_the_fastest_that_fits_is_chosen(others, memory, chosen) -> None:
    assert choose((FIRST, *others), memory) is chosen


def test_where_the_step_itself_is_not_as_planned_others_need_not_be() -> None:
    """TPUs all-reduce small vectors that are planned as reduce-scatters."""
    first = dataclasses.replace(FIRST, as_planned=False)
    assert choose((first, UNPLANNED), 200) is UNPLANNED
    text = str(Tuning("train_step", "tpu:v5p:2x2x2", 200, (first,), (), TUNED))
    assert "* as it is: nothing that was tried is faster by enough" in text
    assert "The compiled programs are not as planned" in text


TUNED = TunedOptions("train_step", "h100:8", "cuda", jax.__version__, (), "p", ())


def test_a_table_says_why_each_lost() -> None:
    all_of_them = (FIRST, FASTER, HARDLY, SMALLER, REFUSED, UNPLANNED)
    text = str(Tuning("train_step", "h100:8", 120, all_of_them, (), TUNED))
    assert "train_step on h100:8, within 120 B" in text
    for line in (
        "* as it is: nothing that was tried is faster by enough",
        "  faster: takes 150 B",
        "  hardly: faster by 0.2%, less than 0.5% that a prediction tells",
        "  smaller: slower by 200 ms",
        "  refused: it does not fit",
        "  unplanned: the compiled program is not as planned",
    ):
        assert line in text.splitlines()
    assert re.search(r"^\*  as it is +1 s +100 B", text, re.MULTILINE)
    found = Tuning("train_step", "h100:8", 200, all_of_them, (), TUNED)
    assert "* faster: 1 s become 900 ms" in str(found)
    assert str(found).endswith(
        "step = shardfn.fully_shard(\n    train_step,\n    mesh,\n    prefetch=6,\n)"
    )


def test_options_join_unless_they_say_different_things() -> None:
    some = (("prefetch", 1), ("compiler_options", {"a": 1}))
    assert joined(some, (("compiler_options", {"b": 2}),)) == (
        *[("prefetch", 1), ("compiler_options", {"a": 1, "b": 2})],
    )
    assert joined(some, (("compiler_options", {"a": 2}),)) is None
    assert joined(some, (("prefetch", 2),)) is None
    assert joined(some, (("bucket_bytes", 2),)) == (*some, ("bucket_bytes", 2))


def tuned_for(step, *options, state=STATE, batch=ROWS) -> TunedOptions:
    plan = shardfn.fully_shard(step, cpu_mesh(8)).plan(state, batch)
    leaves = state_of((x.name, x.shape, x.dtype) for x in plan.leaves)
    made_of = leaves, plan.operations_hash
    return TunedOptions(
        "train_step", "h100:8", "cuda", jax.__version__, *made_of, options
    )


@pytest.fixture(scope="module")
def options() -> TunedOptions:
    compiler = ("compiler_options", {"xla_gpu_enable_latency_hiding_scheduler": True})
    some = (("prefetch", 1), ("gather_dtype", {"weights/in": "bfloat16"}), compiler)
    return tuned_for(train_step, *some)


@pytest.fixture
def path(tmp_path, options):
    write(tmp_path / "tuned.json", options)
    return tmp_path / "tuned.json"


def test_a_file_counts_for_devices_for_which_the_program_is_rewritten(
    tmp_path, monkeypatch
) -> None:
    """On TPUs a label's logit is looked up elsewhere."""

    def train(w, batch):
        def loss(w):
            x, labels = batch
            each = jax.nn.log_softmax(x @ w)
            return -jnp.take_along_axis(each, labels[:, None], axis=1).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    given = jnp.zeros((64, 128)), (jnp.ones((16, 64)), jnp.zeros(16, int))
    path = tmp_path / "tuned.json"
    write(path, tuned_for(train, ("prefetch", 1), state=given[0], batch=given[1]))
    here = shardfn.fully_shard(train, cpu_mesh(8)).plan(*given)
    monkeypatch.setattr(compat, "indexes_memory", lambda platform: True)
    there = shardfn.fully_shard(train, cpu_mesh(8), options=path).plan(*given)
    assert there.program != here.program, "it is rewritten"
    assert there.operations_hash == here.operations_hash


def test_a_file_of_options_counts_as_if_they_were_written_there(path) -> None:
    """Also on another number of devices and for other batches; options of another
    platform's compiler do not."""
    tuned = shardfn.fully_shard(train_step, cpu_mesh(8), options=path)
    written = shardfn.fully_shard(
        train_step, cpu_mesh(8), prefetch=1, gather_dtype={"weights/in": "bfloat16"}
    )
    plan = tuned.plan(STATE, ROWS)
    assert str(plan) == str(written.plan(STATE, ROWS)) and "prefetch: 1" in str(plan)
    new, loss = tuned(tuned.shard(STATE), ROWS)
    other, same = written(written.shard(STATE), ROWS)
    jax.tree.map(np.testing.assert_array_equal, (new, loss), (other, same))
    fewer = shardfn.fully_shard(train_step, cpu_mesh(2), options=str(path))
    assert "prefetch: 1" in str(fewer.plan(STATE, ROWS[:32]))
    assert tuned.compiler_options == {}
    assert read(path).of_compiler("gpu") and not read(path).of_compiler("tpu")


@pytest.mark.aot("h100:8")
def test_a_report_of_a_step_on_cpus_has_the_options_for_its_target(
    tmp_path, options
) -> None:
    unusual = {"xla_gpu_enable_analytical_sol_latency_estimator": False}
    of_compiler = (("compiler_options", unusual),)
    write(tmp_path / "tuned.json", dataclasses.replace(options, options=of_compiler))
    step = shardfn.fully_shard(train_step, cpu_mesh(8), options=tmp_path / "tuned.json")
    found = dict(step.on("h100:8", STATE, ROWS).compiler_options)
    assert found.items() >= unusual.items() and step.compiler_options == {}


def test_options_of_the_call_count_before_those_of_the_file(path) -> None:
    step = shardfn.fully_shard(train_step, cpu_mesh(8), options=path, prefetch=2)
    printed = str(step.plan(STATE, ROWS))
    assert "prefetch: 2" in printed and "gather_dtype: 'bfloat16' for" in printed


def other_operations(state, batch):
    state, loss = train_step(state, batch)
    return state, jnp.sqrt(loss)


def without_count(state, batch):
    new, loss = train_step({**state, "count": 0}, batch)
    return {"weights": new["weights"]}, loss


BIAS = f"float32[{LAYERS},{{}}]"


@pytest.mark.parametrize(
    "step, state, changed",
    [
        (train_step, made(128), f"'weights/bias' is {BIAS.format(128)} and was"),
        (train_step, {**STATE, "ema": STATE["count"]}, "'ema', int32[], is new"),
        (without_count, {"weights": STATE["weights"]}, "'count', int32[], is gone"),
        (other_operations, STATE, ""),
        (microbatched, STATE, ""),
    ],
)
def test_a_changed_program_is_refused(path, step, state, changed) -> None:
    refusing = shardfn.fully_shard(step, cpu_mesh(8), options=path)
    rows = ROWS[:, : state["weights"]["in"].shape[1]]
    with pytest.raises(ShardingError) as caught:
        refusing(state, rows)
    message = str(caught.value)
    what = "state" if changed else "operations"
    assert f"the {what} of" in message and "tuned for another program" in message
    assert ("as it was then" + (f": {changed}" if changed else ".\n")) in message
    assert "tuned.json" in message and "test_tuning.py" in message
    assert "gather_dtype={'weights/in': 'bfloat16'}" in message
    jax.tree.map(np.asarray, state)  # it is still there


def test_another_version_of_jax_is_named(path) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "jax": "0.1", "program": "other"}))
    with pytest.raises(ShardingError, match=r"with jax 0\.1, where this is"):
        shardfn.fully_shard(train_step, cpu_mesh(8), options=path).plan(STATE, ROWS)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot be read: "),
        ("{", "cannot be read: "),
        ("[1]", "is no file of tuned options: it is of another format"),
        (
            '{"format": "tuned options of shardfn, 0"}',
            "it is of another format, 0 in place of 3: tune again",
        ),
        ('{"format": "tuned options of shardfn, 3"}', "lacks one of step, target"),
        (
            "latencies: predicted",
            "it has \"predicted\" for 'latencies', which is no Python value in quotes, "
            "such as \"'predicted'\"",
        ),
        ("prefetch: __import__('os')", "for 'prefetch', which is no Python value"),
        ("prefetched: 1", "names an option 'prefetched', which fully_shard does not"),
    ],
)
def test_a_file_that_is_none_is_refused(path, text, message) -> None:
    if text is None:
        path.unlink()
    elif text[0] in "{[":
        path.write_text(text)
    else:
        name, _, value = text.partition(": ")
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "options": {name: value}}))
    with pytest.raises(ShardingError) as caught:
        shardfn.fully_shard(train_step, cpu_mesh(8), options=path)
    assert message in str(caught.value) and "tuned.json" in str(caught.value)
    assert "test_tuning.py" in str(caught.value)


@pytest.mark.parametrize("given", [3, True, b"tuned.json", ["tuned.json"], ""])
def test_what_is_no_path_is_refused(given) -> None:
    with pytest.raises(ShardingError) as caught:
        shardfn.fully_shard(train_step, cpu_mesh(8), options=given)
    assert f"options={given!r} is no file of tuned options" in str(caught.value)
    assert "Pass the path of a file that" in str(caught.value)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


H100 = "h100:8"
SHAPES = abstract(STATE), jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)


@pytest.fixture(scope="module")
def report():
    step = shardfn.fully_shard(microbatched, cpu_mesh(8), accumulate="scatter")
    return step.on(H100, *SHAPES)


@pytest.mark.aot(H100)
def test_each_option_that_figures_speak_for_is_advised(report) -> None:
    devices = shardfn.analysis.targets.devices(H100)
    rows = advise(report, devices, report.target.memory)
    assert {name for row in rows for name, _ in row.options} == {
        *("prefetch", "reshard_after_forward", "accumulate", "bucket_bytes"),
        *("latencies", "compiler_options"),
    }
    assert [row.saves for row in rows] == sorted((r.saves for r in rows), reverse=True)
    assert all(0 < row.saves <= report.exposed_seconds for row in rows)
    by_name = {row.options[0][0]: row for row in rows}
    first, every = [row for row in rows if row.options[0][0] == "prefetch"]
    assert (first.options, every.options) == (
        (("prefetch", "first"),),
        (("prefetch", 1),),
    )
    assert 0 < first.takes < every.takes and first.saves == every.saves
    assert "summed 4 times a step" in by_name["accumulate"].why
    # Two matrices of a layer of 256 x 512 float32, gathered a layer ahead.
    layer = WIDTH * 2 * WIDTH * 4
    assert by_name["prefetch"].takes == pytest.approx(2 * layer, rel=0.01)
    kept = by_name["reshard_after_forward"]
    assert kept.options[0][1] is False
    assert kept.takes == pytest.approx(2 * layer * LAYERS * MICRO, rel=0.01)
    text = str(report)
    assert "may help; python -m shardfn tune compiles such options" in text
    assert len(report.advice) > 2 and text.count("saves at most") == 2


@pytest.mark.aot(H100)
def test_advice_keeps_to_what_fits_and_to_what_is_not_asked(report) -> None:
    devices, free = shardfn.analysis.targets.devices(H100), 3 * 2**20
    rows = advise(report, devices, report.memory.peak + free)
    (kept,) = [r for r in rows if r.options[0][0] == "reshard_after_forward"] or [None]
    assert kept is None or kept.takes <= free
    assert all(row.takes <= free for row in rows)
    (lack, *_) = advise(report, devices, report.memory.peak - 1)
    assert lack.takes < 0 and "frees" in lack.text(1.0)
    quiet = dataclasses.replace(report.timeline, device=())
    assert advise(dataclasses.replace(report, timeline=quiet), devices, 2**40) == ()
    ordered = with_lines(report, in_turn)
    options = [dict(r.options) for r in advise(ordered, devices, report.target.memory)]
    assert options and not any("prefetch" in option for option in options)
    ahead = with_lines(report, lambda c: dataclasses.replace(c, ahead=c.used_first))
    options = [dict(r.options) for r in advise(ahead, devices, report.target.memory)]
    assert [o["prefetch"] for o in options if "prefetch" in o] == [1]
    least = ADVISED_SHARE * report.step_seconds
    few = tuple(dataclasses.replace(r, saves=least / 2) for r in report.advice)
    assert "may help" not in str(dataclasses.replace(report, advice=few))


def with_lines(report, change):
    """A report of a plan whose lines are changed."""
    lines = tuple(map(change, report.plan.collectives))
    plan = dataclasses.replace(report.plan, collectives=lines)
    return dataclasses.replace(report, plan=plan)


def in_turn(line: shardfn.Collective) -> shardfn.Collective:
    """The same line, of a loop that orders its gathers."""
    why = (
        dataclasses.replace(w, step=dataclasses.replace(w.step, in_turn=True))
        for w in line.why
    )
    return dataclasses.replace(line, why=tuple(why))


@pytest.mark.parametrize(
    "target, flags, is_told",
    [
        ("h100:16", "", True),
        ("h100:16", f"--{NETWORK_FLAG}=nic_speed_gbps=50", False),
        ("h100:8", "", False),
        ("h200:16", "", False),
        ("a100:16", "", False),
    ],
)
@pytest.mark.aot(H100)
def test_the_network_that_xla_takes_for_half(
    report, monkeypatch, target: str, flags: str, is_told: bool
) -> None:
    """On H100s of several hosts, unless the environment says it already."""
    there = shardfn.analysis.targets.target(target)
    figures = dataclasses.replace(report, target=there)
    monkeypatch.setenv("XLA_FLAGS", flags)
    devices = shardfn.analysis.targets.devices(target)
    rows = {
        dict(row.options).get("latencies"): row
        for row in advise(figures, devices, 2**40)
    }
    text = (
        ". It takes 25 GB/s of network; XLA_FLAGS=--xla_gpu_analytical_latency_"
        "estimator_options=nic_speed_gbps=50 tells it more, and compiles once"
    )
    assert rows["predicted"].why.endswith(text) == is_told
    assert (NETWORK_FLAG in rows["predicted"].why) == is_told


@pytest.mark.aot(H100)
def test_sums_that_end_in_their_iteration_free_nothing_if_none_is_delayed(report):
    devices = shardfn.analysis.targets.devices(H100)
    rows = advise(report, devices, report.memory.peak // 2)
    (frees,) = [row for row in rows if row.title == NOT_DELAYED]
    # Of the matrices of a layer, one of 256 x 512 float32 each, only the first one's
    # gradient is delayed: it is made last.
    assert -frees.takes == pytest.approx(WIDTH * 2 * WIDTH * 4, rel=0.01)


@pytest.mark.aot(H100)
def test_a_step_that_does_not_fit_is_told_what_would_free_enough(report) -> None:
    """Not what would save time, nor what frees next to nothing of what is lacking."""
    peak = report.memory.peak
    small = dataclasses.replace(report.target, memory=peak // 2)
    lacking = dataclasses.replace(report, target=small)
    frees = [r for r in report.advice if r.takes < 0]
    text = str(lacking)
    assert "are lacking, and most of the peak is " in text
    assert "or a smaller batch help; see Choosing options" in text
    assert "saves at most" not in text or frees
    much = tuple(dataclasses.replace(r, takes=-peak // 2) for r in report.advice)
    little = tuple(dataclasses.replace(r, takes=-peak // 200) for r in report.advice)
    assert "may help" in str(dataclasses.replace(lacking, advice=much))
    assert "may help" not in str(dataclasses.replace(lacking, advice=little))
    assert "lacking" not in str(report)


def test_a_name_that_is_almost_an_argument_is_told() -> None:
    """Unless the step takes it: all other names are the step's."""

    def train_step(w, x, memmory=1.0):
        return w - memmory * jnp.mean(x) * w

    w, x = (jax.ShapeDtypeStruct((8, n), jnp.float32) for n in (8, 16))
    with pytest.raises(
        shardfn.ShardingError,
        match="neither tune nor the step has an argument 'memry'.\n"
        r"  tune was called at test_tuning.py:\d+ .*\nDid you mean memory=...\? tune",
    ):
        shardfn.tune(train_step, "h100:8", w, x, memry="40GiB")
    with pytest.raises(shardfn.ShardingError, match="does not take these arguments"):
        shardfn.tune(train_step, "h100:8", w, x, rate=0.1)
    with pytest.raises(ValueError, match="compilations=0"):  # which is looked at later
        shardfn.tune(train_step, "h100:8", w, x, memmory=0.5, compilations=0)


def test_memory_is_given_in_words_too() -> None:
    with pytest.raises(ValueError, match="memory='4 gigs' is no size: pass bytes"):
        shardfn.tune(microbatched, H100, *SHAPES, memory="4 gigs")


@pytest.mark.parametrize("memory", [70, "512KiB"])
def test_a_bound_without_its_unit_is_refused(memory) -> None:
    with pytest.raises(ValueError, match=r"bytes, which lacks its unit.*'70GiB'"):
        shardfn.tune(microbatched, H100, *SHAPES, memory=memory)


def sharing(state, batch):
    """Six weights, small enough to leave a loop over microbatches."""

    def loss(state, rows):
        for w in state:
            rows = jax.nn.relu(rows @ w)
        return jnp.mean(rows**2)

    def add(grads, rows):
        return jax.tree.map(jnp.add, grads, jax.grad(loss)(state, rows)), None

    zeros = jax.tree.map(jnp.zeros_like, state)
    grads, _ = jax.lax.scan(add, zeros, batch.reshape(MICRO, -1, 512))
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), jnp.float32(0)


@pytest.mark.aot(H100)
def test_what_does_not_fit_is_tried_with_what_frees_memory_first(tmp_path) -> None:
    args = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 6
    args = args, jax.ShapeDtypeStruct((512, 512), jnp.float32)
    found = shardfn.tune(sharing, H100, *args, memory="8MiB")
    first, *others = found.candidates
    assert first.peak > found.memory >= found.chosen.peak
    assert found.options["reshard_after_forward"] is True
    assert others[0].title == "weights gathered again"
    assert all("weights gathered again" in c.title for c in others if c.fits(2**23))
    asked = {"reshard_after_forward": {"1": False}}
    mesh = shardfn.analysis.targets.mesh(H100)
    step = shardfn.fully_shard(sharing, mesh, min_size=0, **asked)
    found = shardfn.tune(step, H100, *args, memory="8MiB", compilations=1)
    again = "weights gathered again"
    (advice,) = (each for each in found.untried if each.title == again)
    assert dict(advice.options) == {
        "reshard_after_forward": {str(i): i != 1 for i in range(6)}
    }
    batch = jax.ShapeDtypeStruct((16384, 512), jnp.float32)  # 4 MiB on each device
    none = shardfn.tune(sharing, H100, args[0], batch, memory="2MiB")
    assert [c.title for c in none.candidates] == ["as it is"]
    assert "More devices or offload help: state and batch alone take 4" in str(none)
    with pytest.raises(ValueError, match="is not written: nothing of what was tried"):
        none.save(tmp_path / "none.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.aot(H100)
def test_tuning_compiles_what_may_help_and_chooses(tmp_path) -> None:
    stages: list[str] = []
    found = shardfn.tune(
        microbatched, H100, *SHAPES, compilations=3, progress=stages.append
    )
    assert len(found.candidates) == 3 and found.candidates[0].title == "as it is"
    assert found.chosen.seconds == min(c.seconds for c in found.candidates)
    assert found.chosen.options and all(c.as_planned for c in found.candidates)
    titles = [c.title for c in found.candidates]
    assert not {row.title for row in found.untried} & set(titles)
    assert any(s.startswith("3. ") and s.endswith("compiling") for s in stages)
    path, mesh = tmp_path / "tuned.json", shardfn.analysis.targets.mesh(H100)
    found.save(path)
    step = shardfn.fully_shard(microbatched, mesh, options=path)
    again = step.on(H100, *SHAPES)
    assert again.step_seconds == pytest.approx(found.chosen.seconds)
    assert again.memory.peak == found.chosen.peak


@pytest.mark.parametrize("count", [0, -1])
def test_no_compilation_is_no_tuning(count) -> None:
    with pytest.raises(ValueError, match=f"compilations={count}: pass one or more"):
        shardfn.tune(train_step, H100, *SHAPES, compilations=count)
