"""CPU seconds to trace and plan a training step, beside tracing and lowering it plain.

The step is an unrolled transformer: no scan over its layers, so the number of equations
grows with them. Nothing is compiled or run. Each line is the median over several
repetitions that alternate between the programs; calls that the library makes while it
plans are counted, which is the same in every run.

    python benchmarks/planning.py                     # 12, 24, 48 and 96 layers
    python benchmarks/planning.py --layers 96 --profile
"""

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxprs_in_params

import shardfn

DEVICES, ROWS, TOKENS, WIDTH, HEADS, VOCABULARY = 8, 16, 32, 64, 4, 256
FEW_TOKENS, EXPERT_WIDTH, EXPERT_UNITS = 64, 512, 1024
Made = tuple[Callable[..., Any], Any, Any]
"""A plain step, and the avals of its state and batch."""

HEADER = (
    "equations",
    "plain trace + lower",
    "shardfn trace + plan",
    "ratio",
    "us / equation",
    "calls / equation",
    "shardfn trace to lower",
)

jax.config.update("jax_num_cpu_devices", DEVICES)


def init_layer(key: jax.Array) -> dict[str, jax.Array]:
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    layer = {
        name: 0.02 * jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return layer | {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}


def norm(x_BxTxD: jax.Array, scale_D: jax.Array) -> jax.Array:
    mean_BxTx1 = jnp.mean(x_BxTxD * x_BxTxD, axis=-1, keepdims=True)
    return x_BxTxD * jax.lax.rsqrt(mean_BxTx1 + 1e-6) * scale_D


def block(layer: dict[str, jax.Array], x_BxTxD: jax.Array) -> jax.Array:
    B, T, D = x_BxTxD.shape
    qkv_BxTx3D = norm(x_BxTxD, layer["norm1"]) @ layer["qkv"]
    heads = (B, T, HEADS, D // HEADS)
    q, k, v = (a.reshape(heads) for a in jnp.split(qkv_BxTx3D, 3, axis=-1))
    scores_BxHxTxT = jnp.einsum("bqhk,bshk->bhqs", q, k) * (D // HEADS) ** -0.5
    scores_BxHxTxT = jnp.where(jnp.tri(T, dtype=bool), scores_BxHxTxT, -1e9)
    seen_BxTxHxK = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores_BxHxTxT), v)
    x_BxTxD += seen_BxTxHxK.reshape(B, T, D) @ layer["out"]
    hidden_BxTxF = jax.nn.gelu(norm(x_BxTxD, layer["norm2"]) @ layer["up"])
    return x_BxTxD + hidden_BxTxF @ layer["down"]


def trained(
    loss_fn: Callable[..., jax.Array], create_params: Callable[..., Any], batch: Any
) -> Made:
    """A step that updates parameters by AdamW, clipped."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def create(key: jax.Array) -> Any:
        params = create_params(key)
        return {"params": params, "opt": tx.init(params)}

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return train_step, jax.eval_shape(create, jax.random.key(0)), batch


def make_step(layers: int) -> Made:
    """The transformer."""

    def create(key: jax.Array) -> Any:
        keys = jax.random.split(key, layers + 1)
        embedding = 0.02 * jax.random.normal(keys[0], (VOCABULARY, WIDTH))
        return {"embedding": embedding, "layers": [init_layer(k) for k in keys[1:]]}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x_BxTxD = params["embedding"][batch["tokens"]]
        for layer in params["layers"]:
            x_BxTxD = block(layer, x_BxTxD)
        logits_BxTxV = x_BxTxD @ params["embedding"].T
        losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
            logits_BxTxV, batch["targets"]
        )
        return losses_BxT.mean()

    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    return trained(loss_fn, create, {"tokens": tokens, "targets": tokens})


def make_experts(experts: int) -> Made:
    """Experts that all see all tokens, weighed by a router."""

    def create(key: jax.Array) -> Any:
        up = jnp.ones((EXPERT_WIDTH, EXPERT_UNITS))
        router = jnp.ones((EXPERT_WIDTH, experts))
        return {"router": router, "experts": [{"up": up, "down": up.T}] * experts}

    def loss_fn(params: Any, x_TxD: jax.Array) -> jax.Array:
        gates_TxE = jax.nn.softmax(x_TxD @ params["router"])
        y_TxD = x_TxD
        for e, expert in enumerate(params["experts"]):
            hidden_TxF = jax.nn.gelu(x_TxD @ expert["up"])
            y_TxD += gates_TxE[:, e : e + 1] * (hidden_TxF @ expert["down"])
        return jnp.mean(y_TxD**2)

    batch = jax.ShapeDtypeStruct((FEW_TOKENS, EXPERT_WIDTH), jnp.float32)
    return trained(loss_fn, create, batch)


def equations(jaxpr: Any) -> int:
    """Equations of a jaxpr and of the jaxprs in it; a call counts for what it holds."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        total += sum(map(equations, inner)) if inner else 1
    return total


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def calls(run: Callable[[], Any]) -> int:
    """How often functions of the library call anything while this runs."""
    root, count = os.path.dirname(shardfn.__file__), 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        caller = frame if event == "c_call" else frame.f_back
        if event in ("call", "c_call") and caller is not None:
            count += caller.f_code.co_filename.startswith(root)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def row(name: str, made: Made, repeats: int) -> tuple[str, ...]:
    """One line of the table."""
    step, state, batch = made
    mesh = jax.make_mesh((DEVICES,), ("data",))

    def fresh() -> Callable[..., Any]:
        """The step as a function that JAX has not seen."""
        return lambda state, batch: step(state, batch)

    def sharded() -> shardfn.ShardedStep:
        return shardfn.fully_shard(fresh(), mesh, min_size=WIDTH + 1)

    count = equations(jax.jit(fresh()).trace(state, batch).jaxpr)
    plain, planned, lowered = [], [], []
    for _ in range(repeats + 1):
        plain.append(seconds(lambda: jax.jit(fresh()).trace(state, batch).lower()))
        planned.append(seconds(lambda: sharded().plan(state, batch)))
        lowered.append(seconds(lambda: sharded().lower(state, batch)))
    # The first repetition fills JAX's caches of what the step calls.
    pairs = zip(planned[1:], plain[1:], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    plan = statistics.median(planned[1:])
    return (
        name,
        str(count),
        f"{statistics.median(plain[1:]):.2f} s",
        f"{plan:.2f} s",
        f"{ratio:.2f}",
        f"{1e6 * plan / count:.0f}",
        f"{calls(lambda: sharded().plan(state, batch)) / count:.0f}",
        f"{statistics.median(lowered[1:]):.2f} s",
    )


def profile(made: Made) -> None:
    """Prints where the planning of a step with warm caches spends its time."""
    step, state, batch = made
    mesh = jax.make_mesh((DEVICES,), ("data",))
    for run in (lambda f: f(), cProfile.Profile().runcall):
        sharded = shardfn.fully_shard(lambda s, b: step(s, b), mesh, min_size=WIDTH + 1)
        run(lambda s=sharded: s.plan(state, batch))
    pstats.Stats(run.__self__).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 24, 48, 96])
    parser.add_argument("--experts", type=int, nargs="*", help="instead of layers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    kind = "layers" if arguments.experts is None else "experts"
    make = make_step if arguments.experts is None else make_experts
    sizes = getattr(arguments, kind)
    if arguments.profile:
        return profile(make(sizes[-1]))
    header = kind, *HEADER
    print("  ".join(header))
    for size in sizes:
        cells = row(str(size), make(size), arguments.repeats)
        pairs = zip(cells, header, strict=True)
        print("  ".join(cell.rjust(len(name)) for cell, name in pairs), flush=True)


if __name__ == "__main__":
    main()
