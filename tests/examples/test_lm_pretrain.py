"""The language model example: same losses with and without shardfn, and its refusals.

`data`, `model`, `step` and `train` are the modules of examples/lm_pretrain.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data import (
    DataError,
    drop_repeats,
    heldout_batches,
    load_documents,
    paragraphs,
    split,
    training_batches,
    unigram_entropy,
)
from model import ModelConfig
from step import PADDING
from train import Config, ConfigError, main

SCRIPT = Path(__file__).parents[2] / "examples" / "lm_pretrain" / "train.py"
TINY = Config(
    steps=3,
    batch_size=8,
    model=ModelConfig(layers=2, width=64, heads=2, context=32),
)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def write(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file of a few thousand different sentences."""
    lines = (f"Line {i} is not line {i * i}.\n\n" for i in range(800))
    return write(tmp_path, "text.txt", "".join(lines).encode())


@pytest.mark.standard_promotion
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_sharded_losses_are_the_plain_losses(text, dropout):
    model = dataclasses.replace(TINY.model, dropout=dropout)
    config = dataclasses.replace(TINY, data=(text,), model=model)
    sharded = main(config)
    plain = main(dataclasses.replace(config, plain=True))
    assert len(plain.losses) == 3
    # bfloat16 products are rounded in another order: 8 bits of mantissa, averaged.
    np.testing.assert_allclose(sharded.losses, plain.losses, rtol=1e-3)
    np.testing.assert_allclose(sharded.heldout, plain.heldout, rtol=1e-3)
    assert sharded.unigram == plain.unigram


def test_the_command_makes_its_devices_and_prints_both_numbers(text):
    flags = "--devices 8 --steps 2 --batch-size 8 --model.layers 1 --model.width 32"
    done = run(*flags.split(), "--data", text)
    assert done.returncode == 0, done.stderr
    assert "2/2" in done.stdout
    assert "held-out loss" in done.stdout
    assert "byte-unigram entropy of the same text" in done.stdout


@pytest.mark.standard_promotion
def test_plan_prints_collectives_and_stops(capsys):
    assert main(dataclasses.replace(TINY, plan=True)) is None
    printed = capsys.readouterr().out.replace("_", "-")
    assert "all-gather" in printed and "reduce-scatter" in printed.replace(
        "psum-scatter", "reduce-scatter"
    )
    assert "held-out" not in printed


def test_a_missing_file_is_one_line_that_names_it():
    done = run("--data", "no/such/*.txt")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: --data no/such/*.txt: no such file (looked in ")
    assert last.endswith("for example 'texts/**/*.txt'.")


def test_empty_files_are_refused(tmp_path):
    empty = write(tmp_path, "empty.txt", b" \n")
    with pytest.raises(DataError) as caught:
        load_documents([empty])
    assert str(caught.value) == f"--data {empty}: every file there is empty."


def test_text_in_another_encoding_is_refused(tmp_path):
    latin = write(tmp_path, "latin.txt", b"caf\xe9 au lait")
    with pytest.raises(DataError) as caught:
        load_documents([latin])
    assert str(caught.value) == (
        f"--data {latin}: not UTF-8 text (byte 0xe9 at offset 3). Convert it, or "
        "leave it out of --data."
    )


def test_text_shorter_than_a_batch_is_refused(tmp_path):
    short = write(tmp_path, "short.txt", b"a" * 250)
    with pytest.raises(DataError) as caught:
        main(dataclasses.replace(TINY, data=(short,)))
    assert str(caught.value) == (
        "the training text has 225 bytes and at least 264 are needed. "
        "Give more --data, or a smaller --batch-size or --model.context."
    )


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
    ],
)
def test_flags_that_cannot_be_run_are_refused(change, message):
    with pytest.raises(ConfigError) as caught:
        main(dataclasses.replace(TINY, **change))
    assert str(caught.value) == message


def test_a_width_that_does_not_split_into_heads_is_refused():
    with pytest.raises(ValueError) as caught:
        ModelConfig(width=100, heads=8)
    assert str(caught.value) == (
        "width 100 does not split into 8 heads of even width; make --model.width a "
        "multiple of 2 * --model.heads."
    )


def test_files_are_found_by_pattern_once_each(tmp_path):
    for name in ("b.txt", "a.txt"):
        write(tmp_path, name, name.encode() * 10)
    pattern = str(tmp_path / "*.txt")
    documents = load_documents([pattern, str(tmp_path / "a.txt")])
    assert sorted(documents) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def test_documents_that_others_quote_are_dropped():
    part = "A paragraph that is longer than forty characters."
    other = "Another paragraph, also longer than forty characters."
    documents = {"part": part, "whole": f"{part}\n\n{other}", "short": "x"}
    assert sorted(drop_repeats(documents)) == ["short", "whole"]


def test_a_tenth_is_held_out_and_hardly_any_of_it_was_seen():
    train, heldout = split(load_documents([]))
    assert 0.08 < len(heldout) / (len(train) + len(heldout)) <= 0.1
    seen = set(paragraphs(train.tobytes().decode()))
    blocks = paragraphs(heldout.tobytes().decode())
    repeated = sum(len(block) for block in blocks if block in seen)
    assert repeated < 0.01 * sum(map(len, blocks))


def test_one_document_loses_its_last_tenth():
    train, heldout = split({"only": "abcdefghij" * 10})
    assert train.tobytes() == b"abcdefghij" * 9
    assert heldout.tobytes() == b"abcdefghij"


def test_every_held_out_byte_but_the_first_is_a_target_once():
    tokens = np.arange(1, 101, dtype=np.uint8)
    batches = list(heldout_batches(tokens, batch_size=4, context=8))
    assert all(b["inputs"].shape == b["targets"].shape == (4, 8) for b in batches)
    targets = np.concatenate([b["targets"].ravel() for b in batches])
    assert targets[targets != PADDING].tolist() == tokens[1:].tolist()
    for batch in batches:
        real = batch["targets"] != PADDING
        assert (batch["targets"][real] == batch["inputs"][real] + 1).all()


def test_training_batches_are_windows_and_repeat_with_the_seed():
    tokens = np.arange(200, dtype=np.uint8)
    first = next(training_batches(tokens, batch_size=4, context=8, seed=1))
    again = next(training_batches(tokens, batch_size=4, context=8, seed=1))
    assert (first["targets"] == first["inputs"] + 1).all()
    assert (first["inputs"] == again["inputs"]).all()


def test_unigram_entropy_of_even_bytes_is_the_log_of_their_number():
    tokens = np.tile(np.arange(8, dtype=np.uint8), 5)
    np.testing.assert_allclose(unigram_entropy(tokens), np.log(8))
