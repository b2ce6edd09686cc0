"""In: nothing. Out: the same small perceptron in NNX (split and merge), Equinox and
Haiku; the last two only where they are installed.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ._data import vectors
from ._program import Program, register
from ._train import train


@register("nnx_split_merge")
def nnx_split_merge() -> Program:
    tx = optax.adamw(1e-3)

    class Mlp(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            # No bias: batch norm subtracts it, so that its true gradient is zero.
            self.first = nnx.Linear(7, 36, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(36, rngs=rngs)
            self.second = nnx.Linear(36, 5, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.norm(self.first(x))))

    graphdef, _, _ = nnx.split(Mlp(nnx.Rngs(0)), nnx.Param, ...)

    def init(key):
        _, params, rest = nnx.split(Mlp(nnx.Rngs(key)), nnx.Param, ...)
        return {"params": params, "rest": rest, "opt": tx.init(params)}

    def train_step(state, batch):
        def loss_fn(params):
            model = nnx.merge(graphdef, params, state["rest"], copy=True)
            loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
            _, _, rest = nnx.split(model, nnx.Param, ...)
            return loss, rest

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, rest), grads = grad_fn(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "rest": rest, "opt": opt}, {"loss": loss}

    return Program("nnx_split_merge", init, train_step, vectors)


@register("equinox_mlp", needs="equinox")
def equinox_mlp() -> Program:
    import equinox as eqx

    tx = optax.adam(1e-3)

    def build(key):
        return eqx.nn.MLP(7, 5, width_size=36, depth=2, key=key)

    static = eqx.partition(build(jax.random.key(0)), eqx.is_array)[1]

    def init(key):
        params = eqx.filter(build(key), eqx.is_array)
        return params, tx.init(params)

    def train_step(state, batch):
        params, opt = state

        def loss_fn(params):
            model = eqx.combine(params, static)
            return ((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt)
        return (eqx.apply_updates(params, updates), opt), {"loss": loss}

    return Program("equinox_mlp", init, train_step, vectors)


@register("haiku_mlp", needs="haiku")
def haiku_mlp() -> Program:
    import haiku as hk

    def forward(x):
        return hk.nets.MLP((36, 21, 5), activation=jnp.tanh)(x)

    model = hk.without_apply_rng(hk.transform(forward))

    def init_params(key):
        return model.init(key, jnp.zeros((1, 7)))

    def loss_fn(params, batch):
        return ((model.apply(params, batch["x"]) - batch["y"]) ** 2).mean()

    tx = optax.adam(1e-3)
    return train("haiku_mlp", init_params, loss_fn, tx, vectors)
