"""In: nothing. Out: unusual values: complex, 8-bit and 4-bit leaves, large captured
arrays, sizes that data decide, calls to the host, kernels, random loops.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, pallas as pl

from ._data import ROWS, vectors
from ._program import Program, register
from ._train import dense_apply, descend, normal_params, perceptron, squared_error


@register("complex_weights")
def complex_weights() -> Program:
    """A complex perceptron; the real loss of its modulus."""

    def init(key):
        parts = normal_params(key, a=(7, 36), b=(7, 36), c=(36, 5), d=(36, 5))
        first, last = parts["a"] + 1j * parts["b"], parts["c"] + 1j * parts["d"]
        return {"first": first, "last": last, "bias": jnp.zeros(36, jnp.complex64)}

    def loss_fn(params, batch):
        h = batch["x"].astype(jnp.complex64) @ params["first"] + params["bias"]
        out = (h / (1 + jnp.abs(h))) @ params["last"]
        loss = (jnp.abs(out - batch["y"]) ** 2).mean()
        return loss, {"phase": jnp.angle(out).mean()}

    return descend("complex_weights", init, loss_fn, vectors)


@register("small_leaves")
def small_leaves() -> Program:
    """Frozen weights in 4 and 8 bits, a moment in 8-bit floats with one scale."""

    def init(key):
        a, b, c = jax.random.split(key, 3)
        quarter = jax.random.randint(a, (7, 36), -8, 8).astype(jnp.int4)
        eighth = jax.random.randint(b, (36, 21), -127, 128, jnp.int8)
        w = normal_params(c, w=(21, 5))["w"]
        moment = jnp.zeros((21, 5), jnp.float8_e4m3fn)
        small = {"quarter": quarter, "eighth": eighth, "moment": moment}
        return small | {"w": w, "scale": jnp.float32(1), "seen": jnp.zeros(36, bool)}

    def train_step(state, batch):
        h = jnp.tanh(batch["x"] @ (state["quarter"].astype(jnp.float32) / 8))
        h = jnp.tanh(h @ (state["eighth"].astype(jnp.float32) / 127))

        def loss_fn(w):
            return ((h @ w - batch["y"]) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        moment = 0.5 * state["moment"].astype(jnp.float32) * state["scale"] + grad
        scale = jnp.abs(moment).max() / 448
        new = {
            "quarter": -state["quarter"],
            "eighth": state["eighth"],
            "moment": (moment / scale).astype(jnp.float8_e4m3fn),
            "w": state["w"] - 0.1 * moment,
            "scale": scale,
            "seen": state["seen"] | (jnp.arange(36) < 3),
        }
        return new, {"loss": loss}

    # A sum in another order may round to the neighbour, an eighth away, in some places.
    return Program("small_leaves", init, train_step, vectors, tol=1e-2)


@register("captured_arrays")
def captured_arrays() -> Program:
    """Random features and a mask, captured by the step instead of passed."""
    rng = np.random.default_rng(5)
    features = rng.standard_normal((7, 203), dtype=np.float32)
    mask = jnp.asarray(rng.integers(0, 2, (203, 36)), jnp.float32)

    def loss_fn(params, batch):
        h = jnp.tanh(batch["x"] @ features)
        h = jnp.tanh(h @ (params["w"] * mask))
        return ((h @ params["out"] - batch["y"]) ** 2).mean(), {"kept": mask.sum()}

    def init(key):
        return normal_params(key, w=(203, 36), out=(36, 5))

    return descend("captured_arrays", init, loss_fn, vectors)


@register("sizes_from_data")
def sizes_from_data() -> Program:
    """`nonzero`, `unique` and `bincount` of a given size, `searchsorted`, a histogram:
    of the whole batch, and `searchsorted` in a stored array."""

    def init(key):
        return {"dense": perceptron(key), "edges": jnp.linspace(-1, 1, 21)}

    def loss_fn(state, batch):
        out = dense_apply(state["dense"], batch["x"])
        losses = ((out - batch["y"]) ** 2).mean(-1)
        (hard,) = jnp.nonzero(losses > losses.mean(), size=5, fill_value=0)
        edges = jax.lax.stop_gradient(state["edges"])
        bucket = jnp.searchsorted(edges, jax.lax.stop_gradient(out[:, 0]))
        metrics = {
            "hard": hard,
            "bucket": bucket,
            "unique": jnp.unique(bucket, size=ROWS, fill_value=-1),
            "counts": jnp.bincount(bucket, length=22),
            "histogram": jnp.histogram(losses, bins=5, range=(0, 3))[0],
        }
        return losses.mean() + losses[hard].mean(), metrics

    return descend("sizes_from_data", init, loss_fn, vectors, gathers=True)


@register("host_call")
def host_call() -> Program:
    """`jax.pure_callback` on the predictions: NumPy computes a metric."""

    def loss_fn(params, batch):
        out = dense_apply(params, batch["x"])
        shape = jax.ShapeDtypeStruct((5,), jnp.float32)
        median = jax.pure_callback(
            lambda x: np.median(x, axis=0).astype(np.float32),
            shape,
            jax.lax.stop_gradient(out),
        )
        return ((out - batch["y"]) ** 2).mean(), {"median": median}

    return descend("host_call", perceptron, loss_fn, vectors, gathers=True)


@register("checked")
def checked() -> Program:
    """`checkify` inside the step: whether a check fails comes out as flags."""
    checks = checkify.user_checks | checkify.float_checks

    def check_loss(params, batch):
        loss = squared_error(params, batch)
        checkify.check(loss < 100, "loss {loss} is large", loss=loss)
        return loss

    def loss_fn(params, batch):
        error, loss = checkify.checkify(check_loss, errors=checks)(params, batch)
        flags = [x for x in jax.tree.leaves(error) if x.dtype == bool]
        return loss, {"flags": flags}

    return descend("checked", perceptron, loss_fn, vectors)


@register("kernel")
def kernel() -> Program:
    """A Pallas kernel in interpret mode, on blocks of rows, with its own gradient."""

    def scale_rows(x_ref, scale_ref, out_ref):
        out_ref[...] = jnp.maximum(x_ref[...], 0.0) ** 2 * scale_ref[...]

    @jax.custom_vjp
    def activation(x, scale):
        return pl.pallas_call(
            scale_rows,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(ROWS // 2,),
            in_specs=[
                pl.BlockSpec((2, 36), lambda i: (i, 0)),
                pl.BlockSpec((36,), lambda i: (0,)),
            ],
            out_specs=pl.BlockSpec((2, 36), lambda i: (i, 0)),
            interpret=True,
        )(x, scale)

    def forward(x, scale):
        return activation(x, scale), (x, scale)

    def backward(kept, cotangent):
        x, scale = kept
        positive = jnp.maximum(x, 0.0)
        return 2 * positive * scale * cotangent, (positive**2 * cotangent).sum(0)

    activation.defvjp(forward, backward)

    def init(key):
        return {"dense": perceptron(key), "scale": jnp.ones(36)}

    def loss_fn(params, batch):
        first, last = params["dense"]
        h = activation(batch["x"] @ first["w"] + first["b"], params["scale"])
        return ((h @ last["w"] + last["b"] - batch["y"]) ** 2).mean(), {}

    return descend("kernel", init, loss_fn, vectors, rate=0.01)


@register("random_loops")
def random_loops() -> Program:
    """Distributions that are drawn in loops, until a draw is accepted."""

    def init(key):
        params_key, loop_key = jax.random.split(key)
        return {"dense": perceptron(params_key), "key": loop_key}

    def train_step(state, batch):
        key, *keys = jax.random.split(state["key"], 7)
        random, shape = jax.random, (ROWS, 7)
        noise = {
            "gamma": random.gamma(keys[0], 0.5 + batch["x"] ** 2),
            "poisson": random.poisson(keys[1], 2.0, shape),
            "beta": random.beta(keys[2], 1.5, 2.0, shape),
            "dirichlet": random.dirichlet(keys[3], jnp.ones(7), (ROWS,)),
            "cut": random.truncated_normal(keys[4], -1.0, 2.0, shape),
            "binomial": random.binomial(keys[5], 5, 0.3, shape),
        }
        x = batch["x"] + 0.1 * sum(noise.values())

        def loss_fn(dense):
            return squared_error(dense, batch | {"x": x})

        loss, grads = jax.value_and_grad(loss_fn)(state["dense"])
        dense = jax.tree.map(lambda p, g: p - 0.05 * g, state["dense"], grads)
        return {"dense": dense, "key": key}, {"loss": loss, "noise": noise}

    return Program("random_loops", init, train_step, vectors, gathers=True)
