"""In: a number of rows. Out: one decoded token of an 8B Llama with a cache, as a plain
step, and as Megatron splits it, by hand in `shard_map`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P


@dataclass(frozen=True)
class Llama:
    """Sizes; those of Llama 3 8B, of which `heads` are the keys' and values'."""

    rows: int
    layers: int = 32
    width: int = 4096
    heads: int = 8
    queries: int = 4
    head_width: int = 128
    mlp_width: int = 14336
    vocabulary: int = 128256
    context: int = 2048


def arguments(m: Llama) -> tuple[Any, ...]:
    """Parameters, cache, tokens and their place, as shapes."""
    L, D, F, V = m.layers, m.width, m.mlp_width, m.vocabulary
    KV, R, K = m.heads, m.queries, m.head_width

    def bf16(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layers = {
        "norm": bf16(L, D),
        "norm2": bf16(L, D),
        "q": bf16(L, D, KV, R, K),
        "k": bf16(L, D, KV, K),
        "v": bf16(L, D, KV, K),
        "o": bf16(L, KV, R, K, D),
        "gate": bf16(L, D, F),
        "up": bf16(L, D, F),
        "down": bf16(L, F, D),
    }
    params = {
        "table": bf16(V, D),
        "layers": layers,
        "norm": bf16(D),
        "head": bf16(D, V),
    }
    cache = {name: bf16(L, m.rows, m.context, KV, K) for name in ("k", "v")}
    token = jax.ShapeDtypeStruct((m.rows,), jnp.int32)
    return params, cache, token, jax.ShapeDtypeStruct((), jnp.int32)


COLUMNS = {
    **{f"layers/{name}": {"data": 2} for name in ("q", "k", "v", "gate", "up")},
    **{f"layers/{name}": {"data": 1} for name in ("o", "down")},
    "head": {"data": 1},
}
"""The dimensions that Megatron splits: heads, hidden units and the vocabulary."""

BY_ROWS, BY_HEADS = P(None, "data"), P(None, None, None, "data")
BATCH_SPECS = {
    "": ({"k": BY_ROWS, "v": BY_ROWS}, P("data"), P()),
    ", cache by heads": ({"k": BY_HEADS, "v": BY_HEADS}, P("data"), P()),
}
"""How the cache, the tokens and their place are split."""


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    root = lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    return (wide * root).astype(x.dtype) * scale


Edit = Callable[[Any], Any]


def unedited(x: Any) -> Any:
    return x


def decode_token(
    params: Any,
    cache: Any,
    token: jax.Array,
    place: jax.Array,
    *,
    embed: Edit = unedited,
    enter: Edit = unedited,
    leave: Edit = unedited,
    to_cache: Edit = unedited,
    from_cache: Edit = unedited,
) -> tuple[Any, jax.Array]:
    """The new cache and the next token's logits. What is done by hand goes in through
    `embed` of a lookup, `enter` and `leave` around what is split, and `to_cache` and
    `from_cache` around attention."""

    def layer(x: jax.Array, slices: Any) -> Any:
        w, keys, values = slices
        h = enter(norm(x, w["norm"]))
        q = jnp.einsum("bd,dgrk->bgrk", h, w["q"])
        k, v = (jnp.einsum("bd,dgk->bgk", h, w[n]) for n in ("k", "v"))
        q, *new = to_cache((q, k, v))
        keys, values = (
            lax.dynamic_update_slice(old, x[:, None], (0, place, 0, 0))
            for old, x in zip((keys, values), new, strict=True)
        )
        scores = jnp.einsum("bgrk,bsgk->bgrs", q, keys) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.arange(keys.shape[1]) <= place, scores, -1e9)
        mixed = jnp.einsum("bgrs,bsgk->bgrk", jax.nn.softmax(scores), values)
        x = x + leave(jnp.einsum("bgrk,grkd->bd", from_cache(mixed), w["o"]))
        h = enter(norm(x, w["norm2"]))
        hidden = jax.nn.silu(h @ w["gate"]) * (h @ w["up"])
        return x + leave(hidden @ w["down"]), (keys, values)

    x = embed(params["table"][token])
    slices = params["layers"], cache["k"], cache["v"]
    x, (keys, values) = lax.scan(layer, x, slices)
    return {"k": keys, "v": values}, enter(norm(x, params["norm"])) @ params["head"]


def _gather(x: jax.Array, dim: int) -> jax.Array:
    return lax.all_gather(x, "data", axis=dim, tiled=True)


def _all_reduced(x: jax.Array) -> jax.Array:
    return lax.psum(x, "data")


def _heads_to_rows(values: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Queries, keys and values of all rows and a device's heads, in one exchange for
    those of its rows and all heads."""
    flat = [x.reshape(*x.shape[:2], -1) for x in values]
    ends = list(itertools.accumulate(x.shape[-1] for x in flat))[:-1]
    moved = lax.all_to_all(jnp.concatenate(flat, -1), "data", 0, 1, tiled=True)
    parts = jnp.split(moved, ends, axis=-1)
    return [
        part.reshape(*part.shape[:2], *x.shape[2:])
        for part, x in zip(parts, values, strict=True)
    ]


CACHE_BY_ROWS = "Megatron, cache by rows"
MEGATRON: dict[str, dict[str, Edit]] = {
    "Megatron, 2 all-reduces": {
        "embed": lambda x: _gather(x, 1),
        "leave": _all_reduced,
    },
    "Megatron, gathers and scatters": {
        "embed": lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True),
        "enter": lambda x: _gather(x, 0),
        "leave": lambda x: lax.psum_scatter(x, "data", tiled=True),
    },
    CACHE_BY_ROWS: {
        "embed": lambda x: _gather(x, 1),
        "leave": _all_reduced,
        "to_cache": _heads_to_rows,
        "from_cache": lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True),
    },
}
"""Shoeybi et al., arXiv:1909.08053, and with rows split between the blocks, as in its
sequence parallelism (Korthikanti et al., arXiv:2205.05198). With a cache that is split
by rows, one exchange in front of attention and one behind it are the least."""


def megatron(m: Llama, mesh: Mesh, name: str) -> jax.stages.Lowered:
    """The step by hand: heads, hidden units and the cache's heads are split, logits
    come back split over the vocabulary."""

    def spec(path: str, leaf: Any) -> P:
        dims = COLUMNS.get(path)
        return P(*[None] * dims["data"], "data") if dims else P()

    params, *batch = arguments(m)
    specs = {
        "table": P(None, "data"),
        "layers": {k: spec(f"layers/{k}", x) for k, x in params["layers"].items()},
        "norm": P(),
        "head": P(None, "data"),
    }
    by = BY_ROWS if name == CACHE_BY_ROWS else BY_HEADS
    cache = {"k": by, "v": by}

    def step(*args: Any) -> Any:
        return decode_token(*args, **MEGATRON[name])

    whole = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, cache, P(), P()),
        out_specs=(cache, P(None, "data")),
        check_vma=False,
    )
    return jax.jit(whole, donate_argnums=1).lower(params, *batch)
