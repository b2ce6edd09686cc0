"""In: files with the names, shapes and dtype of Hugging Face's Llamas. Out: the
language model example's state on 8 devices, leaf by leaf and by its loss as with the
same weights put in by hand, and back from its own export.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from config import ModelConfig
from export import weight_name
from hugging_face import OTHERS, names
from machine import abstract_state
from safetensors.numpy import save_file
from step import eval_step

import shardfn
from shardfn.storage.safetensors import (
    LoadError,
    load_safetensors,
    write_safetensors,
)
from shardfn.testing import assert_same

pytestmark = pytest.mark.standard_promotion


def tensors(c: ModelConfig, has_head: bool) -> dict[str, np.ndarray]:
    """Names and shapes as `LlamaForCausalLM` of transformers writes them."""
    D, F, K, V = c.width, c.mlp_width, c.head_width, c.vocabulary
    layer = {
        "self_attn.q_proj.weight": (c.heads * K, D),
        "self_attn.k_proj.weight": (c.kv_heads * K, D),
        "self_attn.v_proj.weight": (c.kv_heads * K, D),
        "self_attn.o_proj.weight": (D, c.heads * K),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }
    shapes = {"model.embed_tokens.weight": (V, D)}
    for i in range(c.layers):
        shapes |= {f"model.layers.{i}.{name}": s for name, s in layer.items()}
    shapes["model.norm.weight"] = (D,)
    if has_head:
        shapes["lm_head.weight"] = (V, D)
    rng = np.random.default_rng(0)
    return {
        name: (rng.normal(size=shape) / 10 + (len(shape) == 1)).astype(
            ml_dtypes.bfloat16
        )
        for name, shape in shapes.items()
    }


def write(folder: Path, found: dict[str, np.ndarray]) -> None:
    """Two files, cut within a layer, and their index."""
    files: dict[str, str] = {}
    cut = len(found) // 2
    for i, part in enumerate((list(found)[:cut], list(found)[cut:])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({k: found[k] for k in part}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
    size = sum(x.nbytes for x in found.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def by_hand(c: ModelConfig, found: dict[str, np.ndarray]) -> Any:
    """The same weights as `llama.Llama` has them."""
    t = {k: x.astype(np.float32) for k, x in found.items()}

    def stack(name: str, transposed: bool = True) -> jax.Array:
        layers = [t[f"model.layers.{i}.{name}.weight"] for i in range(c.layers)]
        return jnp.stack([x.T if transposed else x for x in layers])

    params: dict[str, Any] = {
        "embedding": {"embedding": t["model.embed_tokens.weight"]},
        "blocks": {
            "attention": {
                "q": {"kernel": stack("self_attn.q_proj")},
                "k": {"kernel": stack("self_attn.k_proj")},
                "v": {"kernel": stack("self_attn.v_proj")},
                "out": {"kernel": stack("self_attn.o_proj")},
            },
            "attention_norm": {"scale": stack("input_layernorm", False)},
            "mlp": {
                "gate": {"kernel": stack("mlp.gate_proj")},
                "up": {"kernel": stack("mlp.up_proj")},
                "down": {"kernel": stack("mlp.down_proj")},
            },
            "mlp_norm": {"scale": stack("post_attention_layernorm", False)},
        },
        "final_norm": {"scale": t["model.norm.weight"]},
    }
    if not c.tied:
        head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
        params["head"] = {"kernel": head.T}
    return jax.tree.map(jnp.asarray, params)


BATCH = {
    "inputs": np.arange(64, dtype=np.int32).reshape(8, 8) % 31,
    "targets": np.arange(64, dtype=np.int32).reshape(8, 8) % 29,
    "segments": np.zeros((8, 8), np.int32),
    "positions": np.tile(np.arange(8, dtype=np.int32), (8, 1)),
}


@pytest.mark.parametrize(
    "tied, has_head", [(False, True), (False, False), (True, True), (True, False)]
)
def test_a_llama_of_hugging_face(tied, has_head, tiny, tmp_path) -> None:
    sizes = dict(layers=3, width=32, heads=4, kv_heads=2, mlp_width=72, vocabulary=61)
    model = ModelConfig(**sizes, tied=tied, dtype="float32", context=8)
    config = dataclasses.replace(tiny, model=model)
    found = tensors(model, has_head)
    write(tmp_path, found)
    like, step = (
        abstract_state(config),
        shardfn.fully_shard(eval_step, MESH, min_size=8),
    )
    state = load_safetensors(
        *(tmp_path, like, step),
        names=names(model, has_head),
        allow_missing=OTHERS,
    )
    params = by_hand(model, found)
    whole = step.unshard(state)
    assert_same(params, whole.params, "loaded", tol=0.0)
    for x in jax.tree.leaves((whole.opt_state, whole.step)):
        assert not x.any()
    write_safetensors(tmp_path / "out", state, step, names=weight_name)
    again = load_safetensors(tmp_path / "out", like.params, step)
    assert_same(params, step.unshard(again), "exported and loaded", tol=0.0)
    if not tied and has_head:  # the other models compute the same from their weights
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        plain = zeros.replace(params=params)
        expected = jax.jit(eval_step)(plain, BATCH)
        got = step(state, BATCH)
        assert_same(expected, got, "losses", tol=1e-5)


MESH = jax.make_mesh((8,), ("data",))


def test_another_model_is_refused(tiny, tmp_path) -> None:
    """A narrower MLP, one layer more, and a head that the model does not have."""
    model = ModelConfig(layers=2, width=32, mlp_width=72, vocabulary=61, tied=True)
    write(tmp_path, tensors(dataclasses.replace(model, layers=3, mlp_width=80), True))
    like = abstract_state(dataclasses.replace(tiny, model=model))
    with pytest.raises(LoadError) as error:
        load_safetensors(
            *(tmp_path, like),
            names=names(dataclasses.replace(model, tied=False)),
            allow_missing=OTHERS,
        )
    lines = str(error.value).splitlines()
    file = "in model-00001-of-00002.safetensors"
    for line in (
        f"    different: 'model.layers.0.mlp.gate_proj.weight' bfloat16[80,32] {file}"
        " cannot become 'params/blocks/mlp/gate/kernel'[0] float32[32,72] by "
        "'o i -> i o'",
        "    no such index: 'params/blocks/mlp_norm/scale'[2] of [2,32], for "
        "'model.layers.2.post_attention_layernorm.weight' bfloat16[32] in "
        "model-00002-of-00002.safetensors",
        "    no such leaf: 'params/head/kernel', for 'lm_head.weight' bfloat16[61,32] "
        "in model-00002-of-00002.safetensors",
    ):
        assert line in lines
