"""Where the weights of a Llama go that Hugging Face's files have, in a `TrainState`.

In: a model's sizes. Out: what `shardfn.storage.safetensors.load_safetensors` takes as
`names`. PyTorch's linear layers have weights [out, in], and a tensor per layer.
"""

from typing import Any

from config import ModelConfig

LAYER = r"model\.layers\.(\d+)\."
LINEAR = "o i -> i o"

EMBEDDING = "params/embedding/embedding"
HEAD = ("params/head/kernel", LINEAR)

NAMES: dict[str, Any] = {
    r"model\.embed_tokens\.weight": EMBEDDING,
    LAYER + r"input_layernorm\.weight": r"params/blocks/attention_norm/scale[\1]",
    LAYER + r"self_attn\.([qkv])_proj\.weight": (
        r"params/blocks/attention/\2/kernel[\1]",
        LINEAR,
    ),
    LAYER + r"self_attn\.o_proj\.weight": (
        r"params/blocks/attention/out/kernel[\1]",
        LINEAR,
    ),
    LAYER + r"post_attention_layernorm\.weight": r"params/blocks/mlp_norm/scale[\1]",
    LAYER + r"mlp\.(gate|up|down)_proj\.weight": (
        r"params/blocks/mlp/\2/kernel[\1]",
        LINEAR,
    ),
    r"model\.norm\.weight": "params/final_norm/scale",
    r"lm_head\.weight": HEAD,
}
"""What each tensor is for in a model with a head of its own, of files with one."""

OTHERS = ("opt_state", "step")
"""What files of weights do not have of a state; it begins at zero."""


def names(config: ModelConfig, has_head: bool = True) -> dict[str, Any]:
    """What each tensor is for.

    Args:
      config: the model. If its head is the embedding, the files' head is left out.
      has_head: whether the files have a head; if not, it is their embedding.
    """
    if config.tied:
        return NAMES | {r"lm_head\.weight": None}
    if not has_head:
        return NAMES | {r"model\.embed_tokens\.weight": [EMBEDDING, HEAD]}
    return NAMES
