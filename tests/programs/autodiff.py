"""In: nothing. Out: steps that differentiate in other ways than one reverse pass, or
carry their own derivative rules.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from ._data import vectors
from ._program import Program, register
from ._train import dense_apply, dense_params, squared_error, train


def perceptron(key):
    return dense_params(key, 7, 36, 21, 5)


def descend(name, grad_fn, **kwargs) -> Program:
    """Gradient descent on `grad_fn(params, batch) -> (metrics, grads)`."""

    def train_step(state, batch):
        metrics, grads = grad_fn(state, batch)
        state = jax.tree.map(lambda p, g: p - 0.05 * g, state, grads)
        return state, metrics

    return Program(name, perceptron, train_step, vectors, **kwargs)


@register("per_example_clip")
def per_example_clip() -> Program:
    """vmap of grad: the gradient of each row is clipped before the sum."""

    def grad_fn(params, batch):
        row = jax.value_and_grad(squared_error)
        losses, grads = jax.vmap(row, in_axes=(None, 0))(params, batch)
        norms = jax.vmap(optax.tree.norm)(grads)
        scale = jnp.minimum(1.0, 0.5 / norms)
        grads = jax.tree.map(lambda g: jnp.einsum("b,b...->...", scale, g) / 16, grads)
        return {"loss": losses.mean(), "norms": norms}, grads

    return descend("per_example_clip", grad_fn)


@register("gradient_penalty")
def gradient_penalty() -> Program:
    """A gradient with respect to the inputs, inside the loss."""

    def loss_fn(params, batch):
        def score(x):
            return dense_apply(params, x).sum(-1)

        slopes = jax.vmap(jax.grad(lambda x: score(x[None])[0]))(batch["x"])
        penalty = ((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2).mean()
        return squared_error(params, batch) + 0.1 * penalty

    def grad_fn(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return {"loss": loss}, grads

    return descend("gradient_penalty", grad_fn)


@register("hessian_vector")
def hessian_vector() -> Program:
    """Forward over reverse: the curvature along the gradient sets the step."""

    def grad_fn(params, batch):
        def grad_of(params):
            return jax.grad(squared_error)(params, batch)

        grads = grad_of(params)
        _, curved = jax.jvp(grad_of, (params,), (grads,))
        up = optax.tree.vdot(grads, grads)
        rate = up / (jnp.abs(optax.tree.vdot(grads, curved)) + up)
        scaled = jax.tree.map(lambda g: rate * g, grads)
        return {"loss": squared_error(params, batch), "rate": rate}, scaled

    return descend("hessian_vector", grad_fn)


@jax.custom_vjp
def rounded(x):
    """Rounds to eighths; the gradient passes straight through, clipped."""
    return jnp.round(x * 8) / 8


def _rounded_fwd(x):
    return rounded(x), x


def _rounded_bwd(x, cotangent):
    return (jnp.where(jnp.abs(x) < 2, cotangent, 0.0),)


rounded.defvjp(_rounded_fwd, _rounded_bwd)


@jax.custom_jvp
def softsign(x):
    return x / (1 + jnp.abs(x))


@softsign.defjvp
def _softsign_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return softsign(x), t / (1 + jnp.abs(x)) ** 2


@register("custom_rules")
def custom_rules() -> Program:
    """custom_vjp on weights, custom_jvp on activations, used in and out of the
    differentiated part."""

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = softsign(x @ (layer["w"] + 0.0 * rounded(layer["w"])) + layer["b"])
        return ((x - batch["y"]) ** 2).mean()

    def grad_fn(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = jax.tree.map(softsign, grads)
        return {"loss": loss, "soft": softsign(loss), "hard": rounded(loss)}, grads

    return descend("custom_rules", grad_fn)


@register("remat_policies")
def remat_policies() -> Program:
    """`jax.checkpoint` with a policy, nested in `jax.jit` inside the step."""

    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    def layer(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])

    @jax.jit
    def model(params, x):
        for p in params:
            x = layer(p, x)
        return x

    def loss_fn(params, batch):
        return ((model(params, batch["x"]) - batch["y"]) ** 2).mean()

    tx = optax.adam(1e-2)
    return train("remat_policies", perceptron, loss_fn, tx, vectors)
