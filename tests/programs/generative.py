"""In: nothing. Out: models that make data: a U-Net, an autoencoder with noise in the
middle, a diffusion step, and two networks against each other.
"""

import jax
import jax.numpy as jnp
import optax

from ._data import ROWS, images, vectors
from ._program import Program, register
from ._train import dense_apply, dense_params, normal_params, train


@register("unet")
def unet() -> Program:
    """Down by a strided convolution, groups in the middle, up by a transposed one,
    with the skipped features joined; one class per pixel."""

    def init_params(key):
        return normal_params(
            key,
            first=(3, 3, 3, 12),
            down=(3, 3, 12, 20),
            middle=(3, 3, 5, 20),
            up=(3, 3, 20, 12),
            last=(1, 1, 24, 7),
        )

    def conv(x, w, **options):
        numbers = ("NHWC", "HWIO", "NHWC")
        options = dict(window_strides=(1, 1), padding="SAME") | options
        return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)

    def loss_fn(params, batch):
        skip = jnp.tanh(conv(batch["image"], params["first"]))
        x = jnp.tanh(conv(skip, params["down"], window_strides=(2, 2)))
        x = jnp.tanh(conv(x, params["middle"], feature_group_count=4))
        x = jax.lax.conv_transpose(x, params["up"], (2, 2), "SAME")
        logits = conv(jnp.concatenate((jnp.tanh(x), skip), -1), params["last"])
        labels = jnp.where(batch["image"][..., 0] > 0, batch["label"][:, None, None], 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    return train("unet", init_params, loss_fn, optax.adam(1e-3), images)


@register("variational_autoencoder")
def variational_autoencoder() -> Program:
    """Noise at the code, drawn with a key that the state holds."""

    def init(key):
        a, b, loop_key = jax.random.split(key, 3)
        params = {"in": dense_params(a, 7, 36, 10), "out": dense_params(b, 5, 36, 7)}
        return {"params": params, "key": loop_key}

    def train_step(state, batch):
        key, noise_key = jax.random.split(state["key"])

        def loss_fn(params):
            mean, log_std = jnp.split(dense_apply(params["in"], batch["x"]), 2, axis=-1)
            noise = jax.random.normal(noise_key, mean.shape)
            code = mean + jnp.exp(log_std) * noise
            error = ((dense_apply(params["out"], code) - batch["x"]) ** 2).sum(-1)
            kl = (mean**2 + jnp.exp(2 * log_std) - 1 - 2 * log_std).sum(-1) / 2
            return (error + kl).mean(), kl.mean()

        (loss, kl), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
        return {"params": params, "key": key}, {"loss": loss, "kl": kl}

    return Program("variational_autoencoder", init, train_step, vectors)


@register("diffusion")
def diffusion() -> Program:
    """A time per row, looked up in a schedule; an average of the parameters is kept."""
    betas = jnp.linspace(1e-3, 0.2, 20)
    alphas, tx = jnp.cumprod(1 - betas), optax.adam(1e-2)

    def init(key):
        a, loop_key = jax.random.split(key)
        params = dense_params(a, 15, 36, 7)
        average = jax.tree.map(jnp.copy, params)
        opt = tx.init(params)
        return {"params": params, "average": average, "opt": opt, "key": loop_key}

    def train_step(state, batch):
        key, time_key, noise_key = jax.random.split(state["key"], 3)
        time = jax.random.randint(time_key, (ROWS,), 0, 20)
        noise = jax.random.normal(noise_key, batch["x"].shape)
        alpha = alphas[time][:, None]
        noisy = jnp.sqrt(alpha) * batch["x"] + jnp.sqrt(1 - alpha) * noise
        angle = time[:, None] / 10.0 ** jnp.arange(4.0)
        x = jnp.concatenate((noisy, jnp.sin(angle), jnp.cos(angle)), -1)

        def loss_fn(params):
            return ((dense_apply(params, x) - noise) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        new = {"params": params, "average": average, "opt": opt, "key": key}
        return new, {"loss": loss}

    return Program("diffusion", init, train_step, vectors)


@register("adversarial")
def adversarial() -> Program:
    """A generator and a critic, each with its own optimizer; the second update sees
    the first."""
    txs = {"make": optax.adam(1e-2), "judge": optax.rmsprop(1e-3)}

    def init(key):
        a, b, loop_key = jax.random.split(key, 3)
        params = {"make": dense_params(a, 5, 36, 7), "judge": dense_params(b, 7, 36, 1)}
        opt = {k: txs[k].init(params[k]) for k in txs}
        return {"params": params, "opt": opt, "key": loop_key}

    def train_step(state, batch):
        key, code_key = jax.random.split(state["key"])
        code = jax.random.normal(code_key, (ROWS, 5))

        def judge_loss(judge, make):
            real = dense_apply(judge, batch["x"])
            fake = dense_apply(judge, jax.lax.stop_gradient(dense_apply(make, code)))
            return (jax.nn.softplus(-real) + jax.nn.softplus(fake)).mean()

        def make_loss(make, judge):
            return jax.nn.softplus(-dense_apply(judge, dense_apply(make, code))).mean()

        def update(name, loss_fn, params, other):
            loss, grads = jax.value_and_grad(loss_fn)(params[name], params[other])
            updates, opt = txs[name].update(grads, state["opt"][name])
            params = params | {name: optax.apply_updates(params[name], updates)}
            return params, opt, loss

        params, judge, loss = update("judge", judge_loss, state["params"], "make")
        params, make, made = update("make", make_loss, params, "judge")
        opt = {"make": make, "judge": judge}
        return {"params": params, "opt": opt, "key": key}, {"loss": loss, "made": made}

    return Program("adversarial", init, train_step, vectors)
