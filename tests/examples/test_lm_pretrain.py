"""The language model example: its losses with and without shardfn, and its refusals."""

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import evaluate
import jax
import machine
import numpy as np
import pytest
from config import (
    PRESETS,
    Config,
    ConfigError,
    ModelConfig,
    describe,
    from_json,
    with_preset,
)
from evaluate import Heldout, main as measure_run
from loop import Diverged
from machine import give_up, wait_for_first
from models import count_parameters, make_model
from saving import read_last
from tensorboardX.proto.event_pb2 import Event
from tiers import exhaustively
from train import main, run

SCRIPT = Path(__file__).parents[2] / "examples" / "lm_pretrain" / "train.py"


def with_model(config: Config, **changes) -> Config:
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, **changes)
    )


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "family, dropout",
    [("gpt", 0.2), exhaustively("llama", 0.0)],
    ids=["gpt", "llama"],
)
def test_sharded_losses_are_the_plain_losses(tiny, family, dropout):
    config = with_model(tiny, family=family, dropout=dropout)
    config = dataclasses.replace(config, eval_every=2, save_every=3)
    sharded = main(dataclasses.replace(config, profile="3"))
    (trace,) = (sharded.folder / "profile").rglob("*.xplane.pb")
    for name in (rb"shardfn\.\d", rb"shardfn_backward"):
        assert re.search(name, trace.read_bytes())
    number, again = measure_run(evaluate.Flags(str(sharded.folder)))
    assert (number, again.tokens) == (3, sharded.heldout.tokens)
    np.testing.assert_allclose(again.nats, sharded.heldout.nats, rtol=1e-6)
    found = (sharded.folder / "heldout.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in found]
    assert [x["step"] for x in found] == [2]
    on = machine.prepare(config)
    like = {"step": on.abstract_state.step}
    best, read = read_last(sharded.folder, on.train, like, best=True)
    assert best == read["step"] == 2
    assert sharded.heldout.per_byte < found[0]["per_byte"] < 6
    config = dataclasses.replace(config, run_dir=f"{config.run_dir}_plain")
    plain = main(dataclasses.replace(config, plain=True))
    assert len(plain.losses) == 3
    # bfloat16 products are rounded in another order: 8 bits of mantissa, averaged.
    np.testing.assert_allclose(sharded.losses, plain.losses, rtol=1e-3)
    np.testing.assert_allclose(sharded.heldout.nats, plain.heldout.nats, rtol=1e-3)
    assert sharded.unigram == plain.unigram
    steps = (sharded.folder / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in steps]
    assert [x["step"] for x in lines] == [1, 2, 3]
    assert [x["tokens"] for x in lines] == [256, 512, 768]
    # Of 3 steps the first warms up, from nothing.
    rates = [x["learning_rate"] for x in lines]
    assert rates[0] == 0 and rates[1] == pytest.approx(4e-3) and 0 < rates[2] < 4e-3
    assert 0 < lines[0]["seconds"] < lines[1]["seconds"] < lines[2]["seconds"]
    assert from_json(plain.folder / "config.json") == dataclasses.replace(
        config, plain=True
    )


def test_the_command_makes_its_devices_and_prints_both_numbers(text, tmp_path):
    flags = "--devices 8 --steps 2 --batch-size 8 --model.layers 1 --model.width 32"
    flags += f" --run-dir {tmp_path}/run --data.files {text} --log.tensorboard"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags.split()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert f"compiling; every step: {tmp_path}/run/metrics.jsonl" in done.stdout
    assert "held-out loss" in done.stdout
    assert "byte-unigram entropy of the same text" in done.stdout
    assert (tmp_path / "run/loss.png").stat().st_size > 1000
    assert "perplexity" in done.stdout
    (board,) = (tmp_path / "run/tensorboard").iterdir()
    found = set(scalars(board))
    assert {("loss", 1), ("loss", 2), ("grad_norm", 2), ("memory_bytes", 2)} <= found


def scalars(path: Path) -> Iterator[tuple[str, int]]:
    """The tags and steps in a file of TensorBoard's records: each is its length, a
    checksum of that, an event and its checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        yield from ((value.tag, event.step) for value in event.summary.value)
        data = data[16 + length :]


def test_perplexity_is_the_number_of_equally_likely_tokens():
    heldout = Heldout(nats=30 * np.log(7), tokens=30, bytes=60)
    np.testing.assert_allclose(heldout.perplexity, 7)
    np.testing.assert_allclose(heldout.per_byte, np.log(7) / 2)


@pytest.mark.standard_promotion
def test_plan_prints_collectives_and_stops(tiny, capsys):
    assert main(dataclasses.replace(tiny, plan=True)) is None
    printed = capsys.readouterr().out.replace("_", "-")
    assert "all-gather" in printed and "reduce-scatter" in printed.replace(
        "psum-scatter", "reduce-scatter"
    )
    assert "held-out" not in printed


def test_a_missing_file_is_one_line_that_names_it():
    with pytest.raises(SystemExit) as caught:
        run(["--data.files", "no/such/*.txt"])
    message = str(caught.value)
    assert message.startswith("error: --data.files no/such/*.txt: no such file (looked")
    assert message.endswith("for example 'texts/**/*.txt'.")


@pytest.mark.standard_promotion
def test_a_loss_that_is_not_finite_stops_and_is_written_down(tiny):
    optimizer = dataclasses.replace(tiny.optimizer, learning_rate=1e30)
    with pytest.raises(Diverged) as caught:
        main(dataclasses.replace(tiny, optimizer=optimizer, steps=9))
    folder = Path(tiny.run_dir) / "diverged" / "step_4"
    assert str(caught.value).startswith(
        "the loss of step 4 is nan; the first bad gradient is "
        "['blocks']['attention']['k']['kernel'], of 11 of 11. The batch and their "
        f"names are in {folder}."
    )
    report = json.loads((folder / "report_0.json").read_text())
    assert report["step"] == 4 and len(report["bad_gradients"]) == 11
    assert np.load(folder / "batch_0.npz")["inputs"].shape == (8, 32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, "--steps 0: give a number above zero."),
        ({"batch_size": -8}, "--batch-size -8: give a number above zero."),
        ({"devices": 0}, "--devices 0: give a number above zero."),
        (
            {"plain": True, "plan": True},
            "--plan needs shardfn: leave --plain out.",
        ),
        (
            {"batch_size": 30},
            "--batch-size 30: 8 devices cannot split it evenly. Give a multiple of 8, "
            "such as 32, or other devices.",
        ),
        (
            {"coordinator": "here"},
            "--coordinator here: give HOST:PORT of process 0, such as 10.0.0.1:1234, "
            "or auto.",
        ),
        ({"profile": "5:4"}, "--profile 5:4: give steps FIRST:LAST, such as 20:25."),
        ({"profile": ":4"}, "--profile :4: give steps FIRST:LAST, such as 20:25."),
        ({"process_id": 1}, "--process-count and --process-id need --coordinator."),
        (
            {"process_id": 2, "process_count": 2, "coordinator": "localhost:1"},
            "--process-id 2: of --process-count 2 the first is 0.",
        ),
    ],
)
def test_flags_that_cannot_be_run_are_refused(tiny, change, message):
    with pytest.raises(ConfigError) as caught:
        main(dataclasses.replace(tiny, **change))
    assert str(caught.value) == message
    assert not Path(tiny.run_dir).exists()


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError) as caught:
        ModelConfig(width=100, heads=8)
    assert str(caught.value) == (
        "width 100 does not split into 8 heads of even width; make --model.width a "
        "multiple of 2 * --model.heads."
    )
    with pytest.raises(ConfigError) as caught:
        ModelConfig(heads=4, kv_heads=3)
    assert str(caught.value) == (
        "4 heads cannot share 3 heads of keys evenly; make --model.heads a multiple of "
        "--model.kv-heads."
    )


@pytest.mark.standard_promotion
def test_presets_have_the_sizes_of_their_names():
    millions = {name: count_parameters(c) / 1e6 for name, c in PRESETS.items()}
    assert {name: round(x, 1) for name, x in millions.items()} == {
        "1m": 0.8,
        "10m": 9.5,
        "100m": 100.7,
        "1b": 1235.8,
        "8b": 8030.3,
        "gpt": 0.8,
    }
    assert with_preset(["--steps", "2", "--preset=8b"]).model == PRESETS["8b"]


def test_a_preset_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit):
        run(["--preset", "2m"])
    assert "invalid choice '2m' for argument '--preset'" in capsys.readouterr().err


def test_a_process_0_that_never_comes_is_named():
    with pytest.raises(ConfigError) as caught:
        wait_for_first("localhost:1", seconds=0)
    assert str(caught.value) == (
        "process 0 cannot be reached at localhost:1 (Connection refused): check "
        "--coordinator, and that it runs."
    )


def test_who_has_waited_for_others_ends_with_a_message(tiny, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda status: sys.exit(status))
    alone = dataclasses.replace(tiny, coordinator="a:1", process_count=3)
    with pytest.raises(SystemExit, match="1"):
        give_up(alone)
    assert capsys.readouterr().err == (
        "error: not all of --process-count 3 have joined at a:1 in 45 s. Check that "
        "all run with that --coordinator, each with a --process-id of its own, or "
        "give more --join-seconds.\n"
    )


def test_processes_share_all_choices_but_their_own(tiny):
    lines = tiny.lines()
    assert dataclasses.replace(tiny, process_id=3, devices=2).lines() == lines
    for change in ({"seed": 1}, {"save_every": 7}, {"steps": 9}):
        other = dataclasses.replace(tiny, **change).lines()
        ((old, new),) = {(a, b) for a, b in zip(lines, other, strict=True) if a != b}
        (name,) = change
        assert f'"{name}"' in old and f'"{name}"' in new


@pytest.mark.standard_promotion
@pytest.mark.parametrize("family", ["llama", exhaustively("gpt")])
def test_a_document_does_not_see_its_neighbours(tiny, family):
    """Two documents in one window have the logits that each has alone."""
    config = with_model(tiny, family=family, dtype="float32", attention_block=4).model
    init, apply = make_model(config)
    params, run = init(jax.random.key(0)), jax.jit(lambda *a: apply(*a, None))

    def logits(tokens: list[int], segments: list[int], positions: list[int]):
        names = ("inputs", "segments", "positions")
        rows = (np.array([x]) for x in (tokens, segments, positions))
        return np.asarray(run(params, dict(zip(names, rows, strict=True)))[0])

    both = logits([5, 6, 7, 8, 9, 1, 2, 3], [0] * 5 + [1] * 3, [*range(5), *range(3)])
    first = logits([5, 6, 7, 8, 9], [0] * 5, [*range(5)])
    second = logits([1, 2, 3], [0] * 3, [*range(3)])
    np.testing.assert_allclose(both, np.concatenate([first, second]), atol=1e-5)


def test_the_header_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = describe(Config())
    assert max(map(len, text.splitlines())) <= 80
    assert "run:       preset=1m" in text and "learning_rate=0.004" in text
