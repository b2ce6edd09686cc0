"""Continues prompts: from a run's sharded state, or from an exported file.

python examples/lm_pretrain/generate.py --run-dir runs/NAME --devices 8 --prompt "The "
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro
from attention import PADDING
from config import ConfigError, ModelConfig, from_json
from documents import DataError
from export import read_weights
from llama import empty_cache
from models import Batch, Params, merge_llama
from saving import SaveError, read_last
from tokens import Tokenizer, load_tokenizer

import shardfn


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prints continuations of prompts."""

    run_dir: str | None = None
    """Folder of a run with a checkpoint: its state is sharded over the devices."""
    weights: str | None = None
    """A file that export.py wrote: its weights go to one device."""
    best: bool = False
    """Of that run, take the checkpoint with the lowest held-out loss, not the last."""
    prompt: tuple[str, ...] = ("The ",)
    tokens: int = 100
    """How many to add to each prompt."""
    temperature: float = 0.8
    """Zero always takes the likeliest token."""
    seed: int = 0
    rate: bool = True
    """Generate twice, and print tokens per second of the second time."""
    plan: bool = False
    """Print what the devices send for these prompts, and nothing else."""
    devices: int | None = None
    """Make this many CPU devices; none stands for the devices that JAX finds."""


def prompts(texts: Sequence[str], tokenizer: Tokenizer) -> Batch:
    """Returns the prompts, padded in front so that all end at the same place."""
    encoded = [[tokenizer.end, *tokenizer.encode(text).tolist()] for text in texts]
    P = max(map(len, encoded))
    places = [np.arange(P) - (P - len(row)) for row in encoded]
    positions_BxP = np.maximum(places, 0)
    segments_BxP = np.where(np.array(places) < 0, PADDING, 0)
    inputs_BxP = [[0] * (P - len(row)) + row for row in encoded]
    batch = {"inputs": inputs_BxP, "segments": segments_BxP, "positions": positions_BxP}
    return {name: np.asarray(x, np.int32) for name, x in batch.items()}


def sample(key: jax.Array, logits_BxV: jax.Array, temperature: float) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits_BxV / temperature).astype(jnp.int32)


def continue_prompts(
    params: Params,
    batch: Batch,
    key: jax.Array,
    config: ModelConfig,
    length: int,
    temperature: float,
) -> jax.Array:
    """Returns `length` tokens for each prompt, [B, N]."""

    def extend(*args):  # the module is put together anew inside of the loop's trace
        return merge_llama(config, params).extend(*args)

    B, P = batch["inputs"].shape
    cache = empty_cache(config, B, P + length)
    rows = (batch["inputs"], batch["segments"], batch["positions"])
    logits_BxV, cache = extend(*rows, cache, 0)
    last_Bx1 = batch["positions"][:, -1:]

    def add(carry, i: jax.Array):
        logits_BxV, cache = carry
        token_B = sample(jax.random.fold_in(key, i), logits_BxV, temperature)
        token_Bx1 = token_B[:, None]
        rows = (token_Bx1, jnp.zeros_like(token_Bx1), last_Bx1 + 1 + i)
        return extend(*rows, cache, P + i), token_B

    _, tokens_NxB = jax.lax.scan(add, (logits_BxV, cache), jnp.arange(length))
    return tokens_NxB.T


def to_texts(tokens_BxN: jax.Array, tokenizer: Tokenizer) -> list[str]:
    """Returns the continuations, each up to an `end` token."""
    texts = []
    for tokens_N in np.asarray(tokens_BxN):
        (ends,) = np.nonzero(tokens_N == tokenizer.end)
        texts.append(tokenizer.decode(tokens_N[: ends[0] if len(ends) else None]))
    return texts


def main(flags: Flags) -> list[str]:
    """Returns what follows each prompt."""
    if (flags.run_dir is None) == (flags.weights is None):
        raise ConfigError("give one of --run-dir and --weights.")
    if not flags.prompt:
        raise ConfigError('--prompt: give at least one text, such as --prompt "The ".')
    if flags.weights:
        config, params = read_weights(Path(flags.weights))
    else:
        config = from_json(Path(str(flags.run_dir)) / "config.json")
        machine.start(dataclasses.replace(config, devices=flags.devices))
    if config.model.family != "llama":
        raise ConfigError(f"{config.model.family} has no cache: only llama generates.")
    tokenizer = load_tokenizer(config.data)
    key, sent = jax.random.key(flags.seed), 0.0

    def run(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        choices = (config.model, flags.tokens, flags.temperature)
        return continue_prompts(params, batch, key, *choices)

    batch = prompts(flags.prompt, tokenizer)
    if flags.weights:
        generate = jax.jit(run)
    else:
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        generate = shardfn.fully_shard(run, mesh)
        like = {"params": machine.abstract_state(config).params}
        _, state = read_last(Path(str(flags.run_dir)), generate, like, flags.best)
        params = state["params"]
        plan = generate.plan(params, batch, key)
        sent = plan.wire_bytes / flags.tokens
        if flags.plan:
            return [f"{plan}\n{sent:,.0f} bytes per token from each device"]
    tokens_BxN = jax.block_until_ready(generate(params, batch, key))
    if flags.rate:
        start = time.perf_counter()
        jax.block_until_ready(generate(params, batch, key))
        rate = tokens_BxN.size / (time.perf_counter() - start)
        wire = f", {sent:,.0f} bytes per token from each device" if sent else ""
        print(f"{rate:,.0f} tokens per second{wire}", file=sys.stderr)
    return to_texts(tokens_BxN, tokenizer)


if __name__ == "__main__":
    flags = tyro.cli(Flags)
    try:
        texts = main(flags)
    except (ConfigError, DataError, SaveError, shardfn.ShardingError) as error:
        sys.exit(f"error: {error}")
    if flags.plan:
        print(*texts)
        sys.exit()
    for prompt, text in zip(flags.prompt, texts, strict=True):
        print(f"{prompt}{text}\n")
