"""Bytes that each device sends where activations are smaller than weights: all leaves
gathered, what the plan chooses, and what it chooses with the best dimensions stored,
beside the least that activations take. Nothing is compiled: plans are deterministic.

    python benchmarks/stationary.py                 # all cases, 8 devices
    python benchmarks/stationary.py --case decode --plan
    python benchmarks/stationary.py --on h100:8     # predicted times too; extra `aot`
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import shardfn

DEVICES = 8
HEADER = ("case", "gathered", "chosen", "asked", "least")


@dataclass(frozen=True)
class Case:
    """A step in which leaves are larger than what they meet.

    Attributes:
      step: the plain step.
      args: its arguments, the state first.
      columns: the dimensions on which leaves are best stored, by path.
      least: bytes that each device has to send if no leaf moves.
      options: others of `fully_shard`.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    columns: Mapping[str, Mapping[str, int]]
    least: float
    options: Mapping[str, Any]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


PART = (DEVICES - 1) / DEVICES
"""What a gather or a reduce-scatter sends of a value; an all-to-all sends that of one
device's block."""


def sgd(loss_fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def train_step(params: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train_step


def lookup() -> Case:
    """Rows of a table of 16 million, 26 for each of 8192 examples, and its update."""
    rows, features, width = 8192, 26, 64

    def loss_fn(params: Any, found: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.mean(params["table"][found] * weights[:, :, None])

    values = rows * features * width * 4
    return Case(
        sgd(loss_fn),
        ({"table": f32(2**24, width)}, ids(rows, features), f32(rows, features)),
        {"table": {"data": -1}},
        values / DEVICES * PART + 2 * rows * features * 4 * PART,
        {},
    )


def experts() -> Case:
    """64 experts of 1024 x 4096, 8 groups of 1024 tokens, as in GShard."""
    count, width, inner, groups, tokens, capacity = 64, 1024, 4096, 8, 1024, 16

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(jnp.einsum("gtd,de->gte", x, params["router"]))
        chosen = jax.nn.one_hot(gates.argmax(-1), count, dtype=x.dtype)
        place = (jnp.cumsum(chosen, 1) * chosen - 1).max(-1).astype(jnp.int32)
        slot = jax.nn.one_hot(place, capacity, dtype=x.dtype)
        sent = chosen[..., None] * slot[:, :, None]
        taken = jnp.einsum("gtec,gtd->egcd", sent, x)
        hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", taken, params["up"]))
        made = jnp.einsum("egcf,efd->egcd", hidden, params["down"])
        out = jnp.einsum("gtec,egcd->gtd", sent * gates.max(-1)[..., None, None], made)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    moved = count * groups * capacity * width * 2 / DEVICES * PART
    return Case(
        sgd(loss_fn),
        (
            {
                "router": bf16(width, count),
                "up": bf16(count, width, inner),
                "down": bf16(count, inner, width),
            },
            bf16(groups, tokens, width),
        ),
        {"up": {"data": 0}, "down": {"data": 0}},
        3 * moved,
        {},
    )


def mlp_loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["up"])
    return jnp.mean((x + hidden @ params["down"]).astype(jnp.float32) ** 2)


def mlp() -> Case:
    """The MLP of T5-11B, 1024 x 65536, for 512 rows."""
    rows, width, inner = 512, 1024, 65536
    return Case(
        sgd(mlp_loss),
        ({"up": bf16(width, inner), "down": bf16(inner, width)}, bf16(rows, width)),
        {"up": {"data": -1}, "down": {"data": 0}},
        3 * rows * width * 2 * PART,
        {},
    )


def evaluation() -> Case:
    """An MLP of 4096 x 16384 for 8 rows, forward alone."""
    rows, width, inner = 8, 4096, 16384
    return Case(
        mlp_loss,
        ({"up": f32(width, inner), "down": f32(inner, width)}, f32(rows, width)),
        {"up": {"data": -1}, "down": {"data": 0}},
        2 * rows * width * 4 * PART,
        {},
    )


def decode() -> Case:
    """One token of an 8B Llama for 8 rows, with a cache of 2048."""
    L, D, H, KV, K, F, V, S, B = 32, 4096, 32, 8, 128, 14336, 128256, 2048, 8

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(
            x.dtype
        ) * scale

    def step(params: Any, cache: Any, token: jax.Array, place: jax.Array) -> Any:
        def layer(x: jax.Array, slices: Any) -> Any:
            w, keys, values = slices
            h = norm(x, w["norm"])
            q = jnp.einsum("bd,dgrk->bgrk", h, w["q"])
            new = [jnp.einsum("bd,dgk->bgk", h, w[n])[:, None] for n in ("k", "v")]
            keys, values = (
                jax.lax.dynamic_update_slice(old, x, (0, place, 0, 0))
                for old, x in zip((keys, values), new, strict=True)
            )
            scores = jnp.einsum("bgrk,bsgk->bgrs", q, keys) / K**0.5
            scores = jnp.where(jnp.arange(S) <= place, scores, -1e9)
            mixed = jnp.einsum("bgrs,bsgk->bgrk", jax.nn.softmax(scores), values)
            x = x + jnp.einsum("bgrk,grkd->bd", mixed, w["o"])
            h = norm(x, w["norm2"])
            return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], (
                keys,
                values,
            )

        x = params["table"][token]
        slices = params["layers"], cache["k"], cache["v"]
        x, (keys, values) = jax.lax.scan(layer, x, slices)
        return {"k": keys, "v": values}, norm(x, params["norm"]) @ params["head"]

    R = H // KV
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
    cache = {"k": bf16(L, B, S, KV, K), "v": bf16(L, B, S, KV, K)}
    rows = PartitionSpec(None, "data")
    return Case(
        step,
        (params, cache, ids(B), jax.ShapeDtypeStruct((), jnp.int32)),
        {
            **{f"layers/{name}": {"data": 2} for name in ("q", "k", "v", "gate", "up")},
            **{f"layers/{name}": {"data": 1} for name in ("o", "down")},
            "head": {"data": 1},
        },
        4 * L * B * D * 2 * PART,
        {
            "batch_spec": (
                {"k": rows, "v": rows},
                PartitionSpec("data"),
                PartitionSpec(),
            )
        },
    )


CASES = {case.__name__: case for case in (lookup, experts, mlp, evaluation, decode)}


def text(size: float) -> str:
    return f"{size / 2**20:,.2f} MiB"


def run(case: Case, on: str | None, shown: bool) -> list[str]:
    mesh = jax.make_mesh((DEVICES,), ("data",))
    out = []
    for stationary, columns in ((False, None), ("auto", None), ("auto", case.columns)):
        step = shardfn.fully_shard(
            case.step, mesh, stationary=stationary, shard=columns, **case.options
        )
        plan = step.plan(*case.args)
        if shown:
            print(plan, end="\n\n")
        sent = text(sum(line.total_bytes for line in plan.collectives))
        if on:
            report = step.on(on, *case.args)
            sent += f", {1e3 * report.step_seconds:.2f} ms"
        out.append(sent)
    return [*out, text(case.least)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--plan", action="store_true", help="print the plans, too")
    parser.add_argument("--on", help="compile for these devices, such as h100:8")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(" | ".join(HEADER))
    for name in args.case or CASES:
        print(" | ".join([name, *run(CASES[name](), args.on, args.plan)]), flush=True)


if __name__ == "__main__":
    main()
