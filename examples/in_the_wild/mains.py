"""More of the gallery: steps that nothing can import, as the program's main makes them.

In: the module that a source's file is. Out: what `program.run` takes.
"""

import importlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from program import Made, Program
from sources import first_call

ROWS = 16


class Repeated(list[Any]):
    """A data set of one batch, again and again, with what tf.data says of elements."""

    @property
    def element_spec(self) -> Any:
        return jax.tree.map(
            lambda x: SimpleNamespace(
                shape=x.shape, dtype=SimpleNamespace(as_numpy_dtype=x.dtype)
            ),
            self[0],
        )


def make_big_vision(train: Any) -> Made:
    config = importlib.import_module("big_vision.configs.vit_s16_i1k").get_config()
    config.update({"total_epochs": 3, "num_classes": 8})
    config.evals, config.pp_modules = {}, []
    config.input.batch_size = ROWS
    config.model.update({"variant": "mu/4", "dropout": 0.1})
    config.schedule.warmup_steps = 1
    # It runs on every device by itself, which the plain step on one device cannot.
    del config.mixup
    config.sharding_strategy = [(".*", "fsdp(axis='data', min_size_to_shard_mb=0)")]
    random = np.random.default_rng(0)
    images = random.normal(size=(ROWS, 8, 8, 3)).astype(np.float32)
    # Not as many of each: with that, gradients of biases cancel, and Adam moves noise.
    labels = np.eye(8, dtype=np.float32)[np.arange(ROWS) % 5]
    data = Repeated([{"image": images, "labels": labels}])
    train.input_pipeline.training = lambda _: (data, ROWS)
    found = SimpleNamespace(config=config, workdir=None, cleanup=False)
    train.flags = SimpleNamespace(FLAGS=found)
    call = first_call(lambda: train.main([]), "update_fn")
    # Importing the file forbids it, and a comparison moves values.
    jax.config.update("jax_transfer_guard", "allow")
    return Made(jax.device_get(call.args), {"step": call.function, "call": call})


def make_maxtext(train: Any) -> Made:
    given = {
        "run_name": "tiny",
        "base_output_directory": tempfile.gettempdir(),
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "log_config": False,
        "steps": 3,
        "dtype": "float32",
        "attention": "dot_product",
        "base_emb_dim": 32,
        "base_mlp_dim": 64,
        "base_num_decoder_layers": 2,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_target_length": 8,
        "per_device_batch_size": ROWS // jax.device_count(),
        "sharding_tolerance": 1.0,
    }
    base = Path(train.pyconfig.__file__).with_name("base.yml")
    config = train.pyconfig.initialize(["", str(base)], **given)
    call = first_call(lambda: train.run(config, None), "train_step")
    return Made(jax.device_get(call.args), {"step": call.function, "call": call})


def step_of_main(train: Any, bound: dict[str, Any]) -> Any:
    return bound["step"]


def as_its_main_shards(train: Any, made: Made) -> jax.stages.Lowered:
    return made.bound["call"].lowered


MAINS = {
    "big_vision": Program(
        *("google-research/big_vision", "big_vision/train.py"),
        *(make_big_vision, step_of_main),
        own=as_its_main_shards,
    ),
    "maxtext": Program(
        *("AI-Hypercomputer/maxtext", "src/maxtext/trainers/pre_train/train.py"),
        *(make_maxtext, step_of_main),
        own=as_its_main_shards,
        python=(3, 12),
    ),
}
