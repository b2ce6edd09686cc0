"""In: nothing. Out: steps that change how a gradient is made or used: microbatches
given as such, gradients per example of a convolution, noise, a scaled loss, low-rank
updates, every named policy of `jax.checkpoint`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ._data import ROWS, images, tokens, vectors
from ._program import Program, register
from ._train import (
    cross_entropy,
    dense_apply,
    dense_params,
    descend,
    normal_params,
    perceptron,
    squared_error,
    train,
)


@register("accumulate_given")
def accumulate_given() -> Program:
    """The batch comes as microbatches `[2, 16, ...]`, split on dimension 1."""

    def init(key):
        return perceptron(key)

    def train_step(state, batch):
        def body(total, microbatch):
            loss, grads = jax.value_and_grad(squared_error)(state, microbatch)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, state)
        grads, losses = jax.lax.scan(body, zeros, batch)
        state = jax.tree.map(lambda p, g: p - 0.05 * g, state, grads)
        return state, {"loss": losses.mean(), "losses": losses}

    def batch(seed):
        halves = vectors(seed), vectors(seed + 100)
        return jax.tree.map(lambda *x: np.stack(x), *halves)

    name, spec = "accumulate_given", P(None, "data")
    return Program(name, init, train_step, batch, batch_spec=spec)


@register("per_example_conv")
def per_example_conv() -> Program:
    """DP-SGD on a convolution: clipped gradients per example, then noise."""

    def init(key):
        key, loop_key = jax.random.split(key)
        params = normal_params(key, conv=(3, 3, 3, 12), out=(12, 7))
        return {"params": params, "key": loop_key}

    def loss_fn(params, image, label):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            image[None], params["conv"], (2, 2), "SAME", dimension_numbers=numbers
        )
        return cross_entropy(jnp.tanh(x).mean((1, 2)) @ params["out"], label[None])

    def train_step(state, batch):
        key, noise_key = jax.random.split(state["key"])
        row = jax.vmap(jax.value_and_grad(loss_fn), (None, 0, 0))
        losses, grads = row(state["params"], batch["image"], batch["label"])
        scale = jnp.minimum(1.0, 0.5 / jax.vmap(optax.tree.norm)(grads))
        grads = jax.tree.map(lambda g: jnp.tensordot(scale, g, 1) / ROWS, grads)
        noise = optax.tree.random_like(noise_key, grads, jax.random.normal)
        params = jax.tree.map(
            lambda p, g, n: p - 0.1 * (g + 0.01 * n), state["params"], grads, noise
        )
        return {"params": params, "key": key}, {"loss": losses.mean()}

    return Program("per_example_conv", init, train_step, images)


@register("gradient_noise")
def gradient_noise() -> Program:
    tx = optax.chain(optax.add_noise(0.01, 0.5, 7), optax.sgd(0.1))
    return train("gradient_noise", perceptron, squared_error, tx, vectors)


@register("loss_scale_cond")
def loss_scale_cond() -> Program:
    """A scaled loss; the third batch is not finite, and a cond skips the update."""
    tx = optax.adam(1e-2)

    def init(key):
        params = perceptron(key)
        state = {"params": params, "opt": tx.init(params)}
        return state | {"scale": jnp.float32(512.0), "good": jnp.int32(0)}

    def train_step(state, batch):
        scale = state["scale"]

        def loss_fn(params):
            loss = squared_error(params, batch)
            return loss * batch["factor"] * scale, loss

        grad_fn = jax.grad(loss_fn, has_aux=True)
        grads, loss = grad_fn(state["params"])
        grads = jax.tree.map(lambda g: g / scale, grads)
        leaves = jax.tree.leaves(grads)
        finite = jnp.stack([jnp.isfinite(g).all() for g in leaves]).all()

        def update():
            updates, opt = tx.update(grads, state["opt"])
            params = optax.apply_updates(state["params"], updates)
            grown = jnp.where(state["good"] == 1, scale * 2, scale)
            return params, opt, grown, (state["good"] + 1) % 2

        def skip():
            return state["params"], state["opt"], scale / 2, jnp.int32(0)

        params, opt, scale, good = jax.lax.cond(finite, update, skip)
        new = {"params": params, "opt": opt, "scale": scale, "good": good}
        return new, {"loss": loss, "finite": finite}

    def batch(seed):
        return vectors(seed) | {"factor": np.float32(np.inf if seed == 2 else 1)}

    return Program("loss_scale_cond", init, train_step, batch)


@register("low_rank")
def low_rank() -> Program:
    """LoRA: the optimizer holds the two thin factors, the matrices stay."""
    tx = optax.adam(1e-2)

    def init(key):
        a, b = jax.random.split(key)
        thin = normal_params(b, a=(7, 3), b=(3, 36), c=(36, 3), d=(3, 5))
        return {"base": perceptron(a), "thin": thin, "opt": tx.init(thin)}

    def train_step(state, batch):
        def loss_fn(thin):
            first, last = state["base"]
            first = first | {"w": first["w"] + thin["a"] @ thin["b"]}
            x = batch["x"]
            h = jnp.tanh(x @ first["w"] + first["b"])
            out = h @ last["w"] + (h @ thin["c"]) @ thin["d"] + last["b"]
            return ((out - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["thin"])
        updates, opt = tx.update(grads, state["opt"])
        thin = optax.apply_updates(state["thin"], updates)
        return {"base": state["base"], "thin": thin, "opt": opt}, {"loss": loss}

    return Program("low_rank", init, train_step, vectors)


def _policies() -> dict:
    policies = jax.checkpoint_policies
    save_dots = policies.dots_saveable
    offload = dict(offload_src="device", offload_dst="pinned_host")
    names = dict(names_which_can_be_saved=["sum"], names_which_can_be_offloaded=["act"])
    return {
        "everything_saveable": policies.everything_saveable,
        "nothing_saveable": policies.nothing_saveable,
        "dots_saveable": save_dots,
        "checkpoint_dots": policies.checkpoint_dots,
        "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
        "checkpoint_dots_with_no_batch_dims": (
            policies.checkpoint_dots_with_no_batch_dims
        ),
        "offload_dot_with_no_batch_dims": policies.offload_dot_with_no_batch_dims(
            *offload.values()
        ),
        "save_anything_except_these_names": policies.save_anything_except_these_names(
            "act"
        ),
        "save_any_names_but_these": policies.save_any_names_but_these("act"),
        "save_only_these_names": policies.save_only_these_names("sum"),
        "save_from_both_policies": policies.save_from_both_policies(
            save_dots, policies.save_only_these_names("act")
        ),
        "save_and_offload_only_these_names": policies.save_and_offload_only_these_names(
            **names, **offload
        ),
    }


@register("every_checkpoint_policy")
def every_checkpoint_policy() -> Program:
    """One layer per policy that JAX names; two of them offload to the host."""
    policies = _policies()
    given = {n for n in dir(jax.checkpoint_policies) if not n.startswith("_")}
    assert given <= {*policies}, f"policies without a layer: {given - {*policies}}"

    def init_params(key):
        return normal_params(key, **dict.fromkeys(policies, (7, 7)))

    def layer(w, x):
        total = checkpoint_name(x @ w, "sum")
        return x + checkpoint_name(jnp.tanh(total), "act")

    def loss_fn(params, batch):
        x = batch["x"]
        for name, policy in policies.items():
            x = jax.checkpoint(layer, policy=policy)(params[name], x)
        return ((x[:, :5] - batch["y"]) ** 2).mean()

    tx = optax.sgd(0.01)
    return train("every_checkpoint_policy", init_params, loss_fn, tx, vectors)


@register("loops_over_rows")
def loops_over_rows() -> Program:
    """`lax.map` over examples, by one and in blocks, `vmap` inside the loss."""

    def loss_fn(params, batch):
        def row(x):
            return dense_apply(params, x)

        out = jax.lax.map(row, batch["x"])
        again = jax.lax.map(row, batch["x"], batch_size=2)
        third = jax.vmap(row)(batch["x"])
        error = ((out + again + third - 3 * batch["y"]) ** 2).mean()
        return error, {"out": out}

    name = "loops_over_rows"
    return descend(name, perceptron, loss_fn, vectors, rate=0.005)


@register("associative_scan")
def associative_scan() -> Program:
    """A linear recurrence over time by `lax.associative_scan`."""

    def init_params(key):
        return normal_params(key, table=(101, 21), gate=(21,), head=(21, 101))

    def loss_fn(params, batch):
        x = params["table"][batch["tokens"]]
        decay = jnp.broadcast_to(jax.nn.sigmoid(params["gate"]), x.shape)

        def join(a, b):
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, h = jax.lax.associative_scan(join, (decay, x), axis=1)
        return cross_entropy(jnp.tanh(h) @ params["head"], batch["labels"])

    name, tx = "associative_scan", optax.adam(1e-2)
    return train(name, init_params, loss_fn, tx, tokens)


@register("ordinary_differential")
def ordinary_differential() -> Program:
    """A neural ODE: an adaptive solver in a while loop, its adjoint another one."""
    from jax.experimental.ode import odeint

    def loss_fn(params, batch):
        def velocity(h, time, params):
            return dense_apply(params, h) * jnp.cos(time)

        times = jnp.array([0.0, 0.7])
        h = odeint(velocity, batch["x"], times, params, rtol=1e-3, atol=1e-3)
        return ((h[-1, :, :5] - batch["y"]) ** 2).mean(), {}

    def init(key):
        return dense_params(key, 7, 36, 7)

    # The solver's steps depend on a norm over the batch, so on the order of its sum.
    name = "ordinary_differential"
    return descend(name, init, loss_fn, vectors, tol=1e-3, gathers=True)
