"""Bytes that each of 8 devices sends in small steps, whose batches are tiny or whose
layers are frozen: what shardfn plans, what the compiled program sends, and what the
same step sends under `jit` with the state stored alike. CPU programs; nothing runs.

    python benchmarks/small_steps.py
    python benchmarks/small_steps.py --case ppo --plan
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import beside
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import shardfn

DEVICES = 8
RESULTS = Path(__file__).parent / "results" / "cpu" / "small_steps.json"
HEADER = ("case", "gathered", "planned", "compiled", "jit", "compiled / jit")

Case = tuple[Callable[..., Any], tuple[Any, ...]]
"""A plain step, and its arguments as shapes, the state first."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def trained(
    init: Callable[[jax.Array], Any],
    loss_fn: Callable[..., jax.Array],
    tx: optax.GradientTransformation,
    *batch: Any,
) -> Case:
    def create(key: jax.Array) -> Any:
        params = init(key)
        return params, tx.init(params)

    def train_step(state: Any, *batch: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return train_step, (jax.eval_shape(create, jax.random.key(0)), *batch)


def equinox_mnist() -> Case:
    """Equinox's example: a convolution and three layers, 64 images."""

    def build(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        return (
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jnp.ravel,
            eqx.nn.Linear(1728, 512, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(512, 64, key=keys[2]),
            jax.nn.relu,
            eqx.nn.Linear(64, 10, key=keys[3]),
            jax.nn.log_softmax,
        )

    fixed = eqx.partition(build(jax.random.key(0)), eqx.is_array)[1]

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def model(image: jax.Array) -> jax.Array:
            for layer in eqx.combine(params, fixed):
                image = layer(image)
            return image

        pred = jax.vmap(model)(x)
        return -jnp.mean(jnp.take_along_axis(pred, y[:, None], axis=1))

    def init(key: jax.Array) -> Any:
        return eqx.filter(build(key), eqx.is_array)

    return trained(init, loss_fn, optax.adamw(3e-4), f32(64, 1, 28, 28), ids(64))


class Cnn(nn.Module):
    """Flax's mnist example."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64):
            x = nn.relu(nn.Conv(width, kernel_size=(3, 3))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape((x.shape[0], -1))))
        return nn.Dense(10)(x)


def flax_mnist() -> Case:
    """Flax's example: two convolutions and two layers, 128 images."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = Cnn().apply({"params": params}, x)
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(y, 10)).mean()

    def init(key: jax.Array) -> Any:
        return Cnn().init(key, jnp.ones((1, 28, 28, 1)))["params"]

    return trained(
        init, loss_fn, optax.sgd(0.1, momentum=0.9), f32(128, 28, 28, 1), ids(128)
    )


class ActorCritic(nn.Module):
    """Flax's ppo example."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x.astype(jnp.float32) / 255.0
        for width, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(width, (kernel, kernel), (stride, stride))(x))
        x = nn.relu(nn.Dense(512)(x.reshape((x.shape[0], -1))))
        return nn.log_softmax(nn.Dense(4)(x)), nn.Dense(1)(x)


def ppo(frames: int = 1024, rows: int = 256) -> Case:
    """Flax's example: four minibatches of 256 frames, an update for each."""
    tx = optax.adam(2.5e-4)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, actions, old, returns, gain = batch
        log_p, values = ActorCritic().apply({"params": params}, x)
        values, p = values[:, 0], jnp.exp(log_p)
        value_loss = jnp.mean(jnp.square(returns - values))
        entropy = jnp.sum(-p * log_p, axis=1).mean()
        taken = jax.vmap(lambda lp, a: lp[a])(log_p, actions)
        ratio = jnp.exp(taken - old)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        clipped = gain * jax.lax.clamp(0.9, ratio, 1.1)
        won = jnp.mean(jnp.minimum(ratio * gain, clipped))
        return -won + 0.5 * value_loss - 0.01 * entropy

    def create(key: jax.Array) -> Any:
        params = ActorCritic().init(key, jnp.ones((1, 84, 84, 4)))["params"]
        return params, tx.init(params)

    def train_step(state: Any, trajectories: Any) -> Any:
        parts = jax.tree.map(
            lambda x: x.reshape((frames // rows, rows) + x.shape[1:]), trajectories
        )
        loss = jnp.float32(0)
        for batch in zip(*parts, strict=True):
            params, opt = state
            part, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, opt = tx.update(grads, opt, params)
            state, loss = (optax.apply_updates(params, updates), opt), loss + part
        return state, loss

    uint8 = jax.ShapeDtypeStruct((frames, 84, 84, 4), jnp.uint8)
    rest = (ids(frames), f32(frames), f32(frames), f32(frames))
    return train_step, (jax.eval_shape(create, jax.random.key(0)), (uint8, *rest))


def layers_of(*widths: int) -> Callable[[jax.Array], Any]:
    def init(key: jax.Array) -> Any:
        return [
            {
                "w": jax.random.normal(key, pair) / pair[0] ** 0.5,
                "b": jnp.zeros(pair[1]),
            }
            for pair in zip(widths[:-1], widths[1:], strict=True)
        ]

    return init


def perceptron(params: Any, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def squared(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((perceptron(params, x) - y) ** 2)


def few_rows() -> Case:
    """Three layers of 1024, 32 rows."""
    init = layers_of(1024, 1024, 1024, 256)
    return trained(init, squared, optax.adam(1e-3), f32(32, 1024), f32(32, 256))


def frozen() -> Case:
    """The same with all but the last layer frozen, 256 rows."""
    init = layers_of(1024, 1024, 1024, 256)

    def head(params: Any) -> Any:
        return ["frozen"] * (len(params) - 1) + ["trained"]

    tx = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-3)}, head
    )

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        fixed = jax.lax.stop_gradient(params[:-1])
        return squared([*fixed, params[-1]], x, y)

    return trained(init, loss_fn, tx, f32(256, 1024), f32(256, 256))


def lora() -> Case:
    """Adapters of rank 8 beside frozen layers of 1024, 256 rows."""
    tx = optax.adam(1e-3)
    widths = (1024, 1024, 1024, 256)

    def create(key: jax.Array) -> Any:
        base = layers_of(*widths)(key)
        pairs = zip(widths[:-1], widths[1:], strict=True)
        adapters = [{"a": jnp.ones((i, 8)), "b": jnp.zeros((8, o))} for i, o in pairs]
        return {"base": base, "adapters": adapters, "opt": tx.init(adapters)}

    def train_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(adapters: Any) -> jax.Array:
            h = x
            for i, (w, a) in enumerate(zip(state["base"], adapters, strict=True)):
                h = h @ w["w"] + w["b"] + (h @ a["a"]) @ a["b"]
                h = jax.nn.relu(h) if i + 1 < len(adapters) else h
            return jnp.mean((h - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["adapters"])
        updates, opt = tx.update(grads, state["opt"])
        adapters = optax.apply_updates(state["adapters"], updates)
        return {**state, "adapters": adapters, "opt": opt}, loss

    state = jax.eval_shape(create, jax.random.key(0))
    return train_step, (state, f32(256, 1024), f32(256, 256))


CASES = {
    case.__name__: case
    for case in (equinox_mnist, flax_mnist, ppo, few_rows, frozen, lora)
}


def compared(name: str, shown: bool = False) -> dict[str, float]:
    """Bytes planned with all leaves gathered, planned, compiled, and under `jit`."""
    fn, args = CASES[name]()
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    gathered = shardfn.fully_shard(fn, mesh, stationary=False).plan(*args)
    step = shardfn.fully_shard(fn, mesh)
    plan = step.plan(*args)
    if shown:
        print(plan, end="\n\n")
    ours = beside.figures(step.lower(*args).compile(), mesh)
    theirs = beside.figures(beside.jitted(fn, step, args).compile(), mesh)
    return {
        "gathered": gathered.wire_bytes,
        "planned": plan.wire_bytes,
        "compiled": ours.wire,
        "jit": theirs.wire,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--plan", action="store_true", help="print the plans, too")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for cells in (HEADER, ["---"] * len(HEADER)):
        print(f"| {' | '.join(cells)} |")
    for name in args.case or CASES:
        row = rows[name] = compared(name, args.plan)
        texts = [f"{size / 2**20:,.2f} MiB" for size in row.values()]
        ratio = f"{row['compiled'] / row['jit']:.2f}"
        print(f"| {' | '.join([name, *texts, ratio])} |", flush=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
