"""The language model example generates: its cache, sharded states, exported files."""

import dataclasses
import re
from pathlib import Path

import export
import generate
import jax
import numpy as np
import pytest
from config import ConfigError, to_json
from files import write_whole
from generate import continue_prompts, prompts
from models import make_model
from saving import SaveError
from tokens import Bytes
from train import main

pytestmark = pytest.mark.standard_promotion
LENGTH = 6


def test_the_cache_gives_the_tokens_of_the_whole_text(tiny):
    """The likeliest token after each prompt and what was added to it so far."""
    model = dataclasses.replace(tiny.model, dtype="float32")
    init, apply = make_model(model)
    params = jax.tree.map(lambda x: 10 * x, init(jax.random.key(0)))  # not all alike
    batch = prompts(["Line", "A longer prompt", ""], Bytes())
    run = jax.jit(continue_prompts, static_argnums=(3, 4, 5))
    logits = jax.jit(lambda params, whole: apply(params, whole, None))
    found_BxN = np.asarray(run(params, batch, jax.random.key(0), model, LENGTH, 0.0))
    assert found_BxN.shape == (3, LENGTH)
    assert (found_BxN[0] != found_BxN[1]).any()
    for row in range(3):
        prompt_T = batch["inputs"][row][batch["segments"][row] == 0]
        text_T = np.concatenate([prompt_T, found_BxN[row]])[None]
        places = np.arange(text_T.shape[1])[None]
        whole = {"inputs": text_T, "segments": 0 * places, "positions": places}
        logits_TxV = np.asarray(logits(params, whole))[0]
        expected_N = logits_TxV[len(prompt_T) - 1 : -1].argmax(-1)
        assert found_BxN[row].tolist() == expected_N.tolist()


def test_a_sharded_state_and_an_exported_one_say_the_same(tiny, tmp_path, capsys):
    pytest.importorskip("safetensors")
    main(dataclasses.replace(tiny, save_every=3))
    choices = dict(prompt=("Line 7 is", "L"), tokens=LENGTH, temperature=0.0)
    capsys.readouterr()
    sharded = generate.main(generate.Flags(run_dir=tiny.run_dir, **choices))
    flags = generate.Flags(run_dir=tiny.run_dir, plan=True, **choices)
    (plan,) = generate.main(flags)
    assert "state: none comes back; read only: argument 0 ('params')" in plan
    assert plan.endswith(" bytes per token from each device")
    end = r"\d[\d,]* tokens per second, \d[\d,]* bytes per token from each device\n"
    assert re.fullmatch(end, capsys.readouterr().err)
    path = str(tmp_path / "model.safetensors")
    export.main(export.Flags(tiny.run_dir, path))
    assert capsys.readouterr().out == f"11 tensors of step 3 in {path}\n"
    alone = generate.main(generate.Flags(weights=path, rate=False, **choices))
    assert capsys.readouterr().err == ""
    assert sharded == alone and len(alone) == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        ({}, "give one of --run-dir and --weights."),
        ({"weights": "no.safetensors"}, "--weights no.safetensors: no such file."),
        (
            {"run_dir": "no", "prompt": ()},
            '--prompt: give at least one text, such as --prompt "The ".',
        ),
        ({"run_dir": "no"}, "--run-dir no: no run is there, with config.json."),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(flags, message):
    with pytest.raises(ConfigError) as caught:
        generate.main(generate.Flags(**flags))
    assert str(caught.value) == message


def test_files_that_cannot_be_read_are_refused(tiny, write):
    weights = write("model.safetensors", b"no weights")
    with pytest.raises(ConfigError, match=f"--weights {weights}: is no file that expo"):
        generate.main(generate.Flags(weights=weights))
    Path(tiny.run_dir).mkdir()
    write_whole(Path(tiny.run_dir) / "config.json", to_json(tiny))
    with pytest.raises(SaveError, match="--run-dir .*/run: the run has saved no check"):
        generate.main(generate.Flags(run_dir=tiny.run_dir))
