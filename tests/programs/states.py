"""In: nothing. Out: states made of everything a pytree may hold: integers, booleans,
scalars, empty leaves, None, float16, weak types, named tuples, keys.
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from ._data import vectors
from ._program import Program, register
from ._train import perceptron, squared_error, train


class Counters(NamedTuple):
    seen: jax.Array
    flags: jax.Array
    nothing: None = None


@flax.struct.dataclass
class Everything:
    params: Any
    counters: Counters
    extras: dict[str, Any]
    kind: str = flax.struct.field(pytree_node=False, default="static")


@register("state_of_everything")
def state_of_everything() -> Program:
    def init(key):
        counters = Counters(jnp.int32(0), jnp.arange(18) % 2 == 0)
        extras = {
            "empty": jnp.zeros((0,)),
            "empty_rows": jnp.zeros((0, 3)),
            "empty_ints": jnp.zeros((3, 0), jnp.int32),
            "none": None,
            "tuple": (jnp.float32(2.0), [jnp.uint8(3)], ()),
            "weak": jnp.asarray(0.5),
            "weak_int": jnp.asarray(3),
            "half": jnp.linspace(0, 1, 24, dtype=jnp.float16),
            "brain": jnp.linspace(0, 1, 24, dtype=jnp.bfloat16),
            "ints": jnp.arange(33, dtype=jnp.int8),
            "key": jax.random.key(5),
            "keys": jax.random.split(jax.random.key(6), 9),
            "words": jnp.arange(16, dtype=jnp.uint32).reshape(8, 2),
        }
        return Everything(perceptron(key), counters, extras)

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(squared_error)(state.params, batch)
        counters, extras = state.counters, dict(state.extras)
        extras["weak"] = extras["weak"] * 0.9
        extras["weak_int"] = extras["weak_int"] + 1
        extras["half"] = extras["half"] * jnp.float16(0.5)
        extras["brain"] = -extras["brain"]
        extras["ints"] = extras["ints"] + jnp.int8(batch["x"].shape[1])
        extras["key"] = jax.random.fold_in(extras["key"], counters.seen)
        extras["empty_rows"] = extras["empty_rows"] + 1.0
        rate = 0.1 * extras["weak"] * (1 + 0 * extras["empty"].sum())
        params = jax.tree.map(lambda p, g: p - rate * g, state.params, grads)
        flags = jnp.logical_xor(counters.flags, loss > 1)
        counters = counters._replace(seen=counters.seen + 1, flags=flags)
        state = state.replace(params=params, counters=counters, extras=extras)
        metrics = {
            "loss": loss,
            "flags": flags.sum(),
            "weak": loss > 0,
            "none": None,
            "constant": 3,
            "literal": 2.5,
            "shape": jnp.int32(batch["x"].shape[0]),
            "passed": extras["words"],
            "input": batch["x"],
        }
        return state, metrics

    return Program("state_of_everything", init, train_step, vectors)


@register("state_is_one_array")
def state_is_one_array() -> Program:
    """No container at all, and a loss that is the only metric."""

    def init(key):
        return jax.random.normal(key, (7, 5))

    def train_step(state, batch):
        def loss_fn(w):
            return ((batch["x"] @ w - batch["y"]) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(state)
        return state - 0.1 * grad, {"loss": loss}

    return Program("state_is_one_array", init, train_step, vectors)


@register("state_float16")
def state_float16() -> Program:
    """float16 parameters, float32 master copy, a loss scale that grows."""

    def init(key):
        master = perceptron(key)
        half = jax.tree.map(lambda p: p.astype(jnp.float16), master)
        return {"master": master, "half": half, "scale": jnp.float32(128.0)}

    def train_step(state, batch):
        scale = state["scale"]
        half_batch = jax.tree.map(lambda x: x.astype(jnp.float16), batch)

        def loss_fn(half):
            loss = squared_error(half, half_batch)
            return loss.astype(jnp.float32) * scale

        loss, grads = jax.value_and_grad(loss_fn)(state["half"])
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        finite = jnp.isfinite(optax.tree.norm(grads))
        master = jax.tree.map(
            lambda p, g: jnp.where(finite, p - 0.1 * g, p), state["master"], grads
        )
        half = jax.tree.map(lambda p: p.astype(jnp.float16), master)
        scale = jnp.where(finite, scale * 2, scale / 2)
        return {"master": master, "half": half, "scale": scale}, {"loss": loss / scale}

    # float16 rounds at 2**-11; the gradients and the loss are sums of such values.
    return Program("state_float16", init, train_step, vectors, tol=1e-2)


@register("state_partly_unused")
def state_partly_unused() -> Program:
    """Leaves that pass through, are swapped, are reset, or are never read."""

    def init(key):
        a, b = jax.random.split(key)
        w = perceptron(a)
        big = jax.random.normal(b, (36, 11))
        return {"params": w, "past": big, "older": big + 1, "reset": big * 2}

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(squared_error)(state["params"], batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        new = {
            "params": params,
            "past": state["older"],
            "older": state["past"],
            "reset": jnp.full((36, 11), 7.0),
        }
        return new, {"loss": loss}

    return Program("state_partly_unused", init, train_step, vectors)


@register("state_transposed_moment")
def state_transposed_moment() -> Program:
    """A statistic kept transposed and one kept flat: other shapes than the weight."""

    def init(key):
        w = jax.random.normal(key, (40, 7)) * 0.3
        return {"w": w, "transposed": jnp.zeros((7, 40)), "flat": jnp.zeros(280)}

    def train_step(state, batch):
        def loss_fn(w):
            return ((jnp.tanh(batch["x"] @ w.T).sum(-1) - batch["y"][:, 0]) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        transposed = 0.9 * state["transposed"] + grad.T
        flat = 0.9 * state["flat"] + grad.reshape(-1) ** 2
        w = state["w"] - 0.01 * transposed.T / jnp.sqrt(flat.reshape(40, 7) + 1e-3)
        return {"w": w, "transposed": transposed, "flat": flat}, {"loss": loss}

    return Program("state_transposed_moment", init, train_step, vectors)


@register("state_tuple_adam")
def state_tuple_adam() -> Program:
    """Parameters in nested tuples with one scalar parameter."""

    def init_params(key):
        return (perceptron(key), (jnp.float32(0.5), ()))

    def loss_fn(params, batch):
        dense, (scale, _) = params
        return squared_error(dense, batch | {"y": scale * batch["y"] + scale**2})

    tx = optax.adam(1e-2)
    return train("state_tuple_adam", init_params, loss_fn, tx, vectors)
