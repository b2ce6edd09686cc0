"""In: nothing. Out: small perceptrons in NNX, Equinox and Haiku, without and with state
of the library's own; the last two libraries only where they are installed.
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


@register("nnx_optimizer")
def nnx_optimizer() -> Program:
    """The model, its `nnx.Optimizer` and its `nnx.Rngs` are one graph in the state."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(7, 36, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)
            self.second = nnx.Linear(36, 5, rngs=rngs)

        def __call__(self, x):
            return self.second(self.dropout(nnx.relu(self.first(x))))

    def build(key):
        model = Net(nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1)))
        return nnx.split((model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)))

    graphdef, _ = build(jax.random.key(0))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)

        def loss_fn(model):
            return ((model(batch["x"]) - batch["y"]) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    return Program("nnx_optimizer", lambda key: build(key)[1], train_step, vectors)


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


@register("equinox_batch_norm", needs="equinox")
def equinox_batch_norm() -> Program:
    """`filter_value_and_grad` of a stateful model under `vmap` with an axis name."""
    import equinox as eqx

    tx = optax.adam(1e-3)

    class Net(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        second: eqx.nn.Linear

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.first = eqx.nn.Linear(7, 36, use_bias=False, key=a)
            self.norm = eqx.nn.BatchNorm(36, "row", mode="batch")
            self.second = eqx.nn.Linear(36, 5, key=b)

        def __call__(self, x, state):
            x, state = self.norm(self.first(x), state)
            return self.second(jax.nn.relu(x)), state

    def build(key):
        model, state = eqx.nn.make_with_state(Net)(key)
        return eqx.partition((model, state), eqx.is_inexact_array)

    static = build(jax.random.key(0))[1]

    def init(key):
        arrays = build(key)[0]
        return {"arrays": arrays, "opt": tx.init(arrays[0])}

    def train_step(state, batch):
        model, carried = eqx.combine(state["arrays"], static)

        @eqx.filter_value_and_grad(has_aux=True)
        def loss_fn(model):
            axes = dict(axis_name="row", in_axes=(0, None), out_axes=(0, None))
            out, after = jax.vmap(model, **axes)(batch["x"], carried)
            return ((out - batch["y"]) ** 2).mean(), after

        (loss, carried), grads = loss_fn(model)
        params = state["arrays"][0]
        updates, opt = tx.update(grads, state["opt"], params)
        model = eqx.apply_updates(model, updates)
        arrays, _ = eqx.partition((model, carried), eqx.is_inexact_array)
        return {"arrays": arrays, "opt": opt}, {"loss": loss}

    return Program("equinox_batch_norm", init, train_step, vectors)


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


@register("haiku_state", needs="haiku")
def haiku_state() -> Program:
    """`transform_with_state`: batch norm's averages, and a key for dropout."""
    import haiku as hk

    def forward(x):
        x = hk.Linear(36, with_bias=False)(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        return hk.Linear(5)(hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(x)))

    model = hk.transform_with_state(forward)

    def init(key):
        params, averages = model.init(key, jnp.zeros((2, 7)))
        return {"params": params, "averages": averages, "key": jax.random.key(4)}

    def train_step(state, batch):
        key, use_key = jax.random.split(state["key"])

        def loss_fn(params):
            averages = state["averages"]
            out, averages = model.apply(params, averages, use_key, batch["x"])
            return ((out - batch["y"]) ** 2).mean(), averages

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, averages), grads = grad_fn(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "averages": averages, "key": key}, {"loss": loss}

    return Program("haiku_state", init, train_step, vectors)
