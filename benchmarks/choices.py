"""What a plan's choices save: bytes that a device sends, holds and computes with each
choice and without, planned for 64 H100s. Nothing is compiled.

    python benchmarks/choices.py
    python benchmarks/choices.py --case generation --plan

Cases: four LSTM cells of 8192 units over 128 time steps; a Llama of 8B on rows of
32,768 tokens, its MLP over parts of 1024 tokens; a Llama of 1.6B that generates 511
tokens and is trained on them; Llama 3 70B with matrices in NF4, whose norms are
trained; a network on random points; those of `choices_loops.py`. Without a choice, it
is left out, or its limit is so that it takes nothing.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from choices_loops import discriminator, factored, generator, minibatches, squashed
from criteria_cases import LLAMA3_8B, Model
from criteria_models import attend, init, mlp, narrow, norm
from jax import lax

import shardfn
from shardfn._api import planner
from shardfn._lowering import choose_generated, choose_loops, choose_narrow_gathers
from shardfn._propagation import decide_node, rounds
from shardfn.analysis import targets

DEVICES = 64
WITHOUT = {
    "loops": (choose_loops, "LOOP_MOST", 0),
    "narrow": (choose_narrow_gathers, "NARROW_SHARE", 2),
    "generated": (choose_generated, "GENERATED_FLOPS", 2**80),
    "factors behind": (planner, "sum_before_factors", lambda program: program),
    "once in front": (decide_node.Decider, "shares", lambda _, n: (1,) * len(n.inputs)),
    "begins again": (rounds.Rounds, "price", lambda *_: 0),
}
"""By choice, the limit with which it takes nothing, or what leaves it out."""

Step = Callable[[Any, Any], Any]
Shape = jax.ShapeDtypeStruct
KEY = jax.eval_shape(lambda: jax.random.key(0))


def trained(loss: Callable[[Any, Any], jax.Array], lr: float = 1e-4) -> Step:
    """A step of AdamW on the `params` of a state."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = optax.adamw(lr).update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt": moments}, value

    return step


def state_of(params: Any, **others: Any) -> Any:
    return {
        "params": params,
        "opt": jax.eval_shape(optax.adamw(1e-4).init, params),
        **others,
    }


def entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits.astype(jnp.float32), targets).mean()


def recurrent() -> tuple[Step, Any, Any]:
    """Cells of projected LSTMs, as in Jozefowicz et al., arXiv:1602.02410."""
    units, width, words, rows, steps = 8192, 1024, 32000, 2048, 128
    cell = {
        "gates": Shape((2 * width, 4 * units), jnp.float32),
        "bias": Shape((4 * units,), jnp.float32),
        "down": Shape((units, width), jnp.float32),
    }
    table = Shape((words, width), jnp.float32)
    params = {
        "table": table,
        "cells": [cell] * 4,
        "head": Shape((width, words), jnp.float32),
    }

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        p = narrow(params)

        @jax.checkpoint
        def step(carry: Any, tokens: jax.Array) -> Any:
            x, new = p["table"][tokens], []
            for (h, c), w in zip(carry, p["cells"], strict=True):
                gates = jnp.concatenate([x, h], -1) @ w["gates"] + w["bias"]
                i, f, g, o = jnp.split(gates, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                x = (jax.nn.sigmoid(o) * jnp.tanh(c)) @ w["down"]
                new.append((x, c))
            return new, x

        shapes = (rows, width), (rows, units)
        start = [tuple(jnp.zeros(s, jnp.bfloat16) for s in shapes)] * 4
        _, x = lax.scan(step, start, tokens[:, :-1].T)
        return entropy(x @ p["head"], tokens[:, 1:].T)

    return trained(loss), state_of(params), Shape((rows, steps + 1), jnp.int32)


def layer(x: jax.Array, w: Any, model: Model, parts: int = 1) -> jax.Array:
    """A layer of a Llama, the MLP over parts of the tokens."""
    w = narrow(w)
    y = norm(x, w["attention"]["norm"])
    x = x + attend(w["attention"], y, y, model, None, True)

    @jax.checkpoint
    def one(x: jax.Array) -> jax.Array:
        return x + mlp(w["mlp"], norm(x, w["mlp"]["norm"]), model)

    if parts == 1:
        return x + mlp(w["mlp"], norm(x, w["mlp"]["norm"]), model)
    cut = jnp.moveaxis(x.reshape(x.shape[0], parts, -1, x.shape[-1]), 1, 0)
    return jnp.moveaxis(lax.map(one, cut), 0, 1).reshape(x.shape)


def next_words(
    params: Any, tokens: jax.Array, model: Model, parts: int = 1
) -> jax.Array:
    x = params["embedding"].astype(jnp.bfloat16)[tokens]
    body = jax.checkpoint(lambda x, w: (layer(x, w, model, parts), None))
    x = lax.scan(body, x, params["layers"])[0]
    return norm(x, params["norm"].astype(x.dtype)) @ params["head"].astype(x.dtype)


def parts_of_tokens() -> tuple[Step, Any, Any]:
    model, length = LLAMA3_8B, 32768

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = next_words(params, tokens[:, :-1], model, length // 1024)
        return entropy(logits, tokens[:, 1:])

    params = jax.eval_shape(lambda: init(model))
    return trained(loss), state_of(params), Shape((DEVICES, length + 1), jnp.int32)


def generation() -> tuple[Step, Any, Any]:
    """Tokens that the policy itself has made, weighted by how good their rows are."""
    model = replace(
        LLAMA3_8B, layers=16, width=2048, heads=16, kv_heads=16, mlp_width=8192
    )
    rows, length = 512, 512
    params = jax.eval_shape(lambda: init(model))
    heads = model.heads, model.head_width

    def token(params: Any, cache: Any, tokens: jax.Array, at: jax.Array) -> Any:
        x = params["embedding"].astype(jnp.bfloat16)[tokens][:, None]

        def one(x: jax.Array, both: Any) -> Any:
            w, cache = both
            y = norm(x, w["attention"]["norm"])
            q, k, v = (jnp.einsum("btd,dhk->bthk", y, w["attention"][n]) for n in "qkv")
            new = jnp.stack([k, v])
            cache = lax.dynamic_update_slice(cache, new, (0, 0, at, 0, 0))
            scores = jnp.einsum("bthk,bshk->bhts", q, cache[0]).astype(jnp.float32)
            seen = jnp.arange(length) <= at
            scores = jnp.where(seen, scores * model.head_width**-0.5, -1e30)
            mixed = jax.nn.softmax(scores).astype(x.dtype)
            mixed = jnp.einsum("bhts,bshk->bthk", mixed, cache[1])
            x = x + jnp.einsum("bthk,hkd->btd", mixed, w["attention"]["out"])
            return x + mlp(w["mlp"], norm(x, w["mlp"]["norm"]), model), cache

        x, cache = lax.scan(one, x, (params["layers"], cache))
        x = norm(x, params["norm"].astype(x.dtype))
        return cache, (x @ params["head"].astype(x.dtype))[:, 0]

    def step(state: Any, batch: Any) -> Any:
        cache = jnp.zeros((model.layers, 2, rows, length, *heads), jnp.bfloat16)

        def sample(carry: Any, at: jax.Array) -> Any:
            cache, tokens = carry
            cache, logits = token(half, cache, tokens, at)
            key = jax.random.fold_in(batch["key"], at)
            made = jax.random.categorical(key, logits.astype(jnp.float32))
            return (cache, made), made

        half, start = narrow(state["params"]), (cache, batch["first"])
        _, made = lax.scan(sample, start, jnp.arange(length - 1))
        tokens = jnp.concatenate([batch["first"][None], made]).T

        def loss(params: Any, rows: Any) -> jax.Array:
            logits = next_words(params, tokens[:, :-1], model)
            chosen = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), tokens[:, 1:]
            )
            return (chosen.mean(1) * rows).mean()

        return trained(loss)(state, (tokens % 2).mean(1) - 0.5)

    batch = {"first": Shape((rows,), jnp.int32), "key": KEY}
    return step, state_of(params), batch


def quantized() -> tuple[Step, Any, Any]:
    """NF4 (Dettmers et al., arXiv:2305.14314): two codes in a byte, a scale in bfloat16
    for 64 of them. Only norms are trained."""
    model = replace(LLAMA3_8B, layers=80, width=8192, mlp_width=28672, heads=64)
    whole = jax.eval_shape(lambda: init(model))
    codes, length = jnp.linspace(-1, 1, 16), 2048
    weights, structure = jax.tree.flatten(whole["layers"])
    others = {k: w for k, w in whole.items() if k != "layers"}
    half = jax.tree.map(lambda w: Shape(w.shape, jnp.bfloat16), others)
    trains = [len(w.shape) == 2 for w in weights]

    def packed(w: Any) -> Any:
        layers, size = w.shape[0], w.size // w.shape[0]
        return {
            "codes": Shape((layers, size // 2), jnp.uint8),
            "scales": Shape((layers, size // 64), jnp.bfloat16),
        }

    def unpacked(w: Any, shape: tuple[int, ...]) -> jax.Array:
        pairs = jnp.stack([w["codes"] >> 4, w["codes"] & 15], -1).reshape(-1)
        blocks = codes.astype(jnp.bfloat16)[pairs.astype(jnp.int32)].reshape(-1, 64)
        return (blocks * w["scales"][:, None]).reshape(shape)

    def loss(norms: Any, both: Any) -> jax.Array:
        others, base, tokens = both

        @jax.checkpoint
        def body(x: jax.Array, each: Any) -> Any:
            norms, base = map(iter, each)
            made = [
                next(norms) if is_norm else unpacked(next(base), w.shape[1:])
                for is_norm, w in zip(trains, weights, strict=True)
            ]
            return layer(x, structure.unflatten(made), model), None

        x = lax.scan(body, others["embedding"][tokens[:, :-1]], (norms, base))[0]
        return entropy(norm(x, others["norm"]) @ others["head"], tokens[:, 1:])

    def step(state: Any, tokens: jax.Array) -> Any:
        return trained(loss)(state, (state["others"], state["base"], tokens))

    pairs = list(zip(trains, weights, strict=True))
    norms = [w for is_norm, w in pairs if is_norm]
    base = [packed(w) for is_norm, w in pairs if not is_norm]
    state = state_of(norms, base=base, others=half)
    return step, state, Shape((2 * DEVICES, length + 1), jnp.int32)


def points() -> tuple[Step, Any, Any]:
    params = {
        "in": Shape((4096, 16384), jnp.float32),
        "out": Shape((16384, 4096), jnp.float32),
    }

    def loss(params: Any, key: jax.Array) -> jax.Array:
        p = narrow(params)
        x = jax.random.normal(key, (262144, 4096), jnp.bfloat16)
        made = (jax.nn.relu(x @ p["in"]) @ p["out"]).astype(jnp.float32)
        return jnp.square(made).mean()

    return trained(loss), state_of(params), KEY


CASES: Mapping[str, tuple[str, Callable[[], tuple[Step, Any, Any]]]] = {
    "recurrent": ("loops", recurrent),
    "parts": ("loops", parts_of_tokens),
    "generation": ("loops", generation),
    "quantized": ("narrow", quantized),
    "points": ("generated", points),
    "generator": ("generated", generator),
    "squashed": ("factors behind", squashed),
    "factored": ("factors behind", factored),
    "minibatches": ("once in front", minibatches),
    "discriminator": ("begins again", discriminator),
}
HEADER = ("case", "choice", "sent", "of M", "FLOPs", "planned in")


def row(case: str, chosen: bool, shown: bool) -> tuple[str, ...]:
    """A plan's figures, as a line of the table."""
    choice, make = CASES[case]
    step, state, batch = make()
    sharded = shardfn.fully_shard(step, targets.mesh(f"h100:{DEVICES}"))
    module, limit, nothing = WITHOUT[choice]
    value = getattr(module, limit) if chosen else nothing
    start = time.perf_counter()
    with mock.patch.object(module, limit, value), warnings.catch_warnings():
        warnings.simplefilter("ignore", shardfn.ReplicatedComputeWarning)
        plan = sharded.plan(state, batch)
    took = time.perf_counter() - start
    if shown:
        print(plan)
    return (
        case,
        choice if chosen else "",
        f"{plan.wire_bytes / 2**30:,.1f} GiB",
        f"{plan.wire_bytes / plan.parameter_bytes:.2f} M",
        f"{plan.work.flops:.1e}",
        f"{took:.0f} s",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--plan", action="store_true", help="print the plans, too")
    asked = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}", flush=True)
    for case in [asked.case] if asked.case else CASES:
        for chosen in (True, False):
            print(f"| {' | '.join(row(case, chosen, asked.plan))} |", flush=True)


if __name__ == "__main__":
    main()
