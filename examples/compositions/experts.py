"""Experts that stay on the devices of mesh axis `expert`, and tokens that go to them.

The batch is split over both axes of the mesh. Each group of tokens chooses experts of a
fixed capacity by products with one-hots (GShard, Switch): over `expert` the tokens
move, there and back, and the experts do not; over `data` their gradients are summed.
All other parameters are sharded and gathered. Shapes: Groups, Tokens, Dimension,
Experts, Capacity, Feed-forward.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import shardfn

D, E, C, F, CLASSES = 16, 8, 4, 48, 16


def create_state(key):
    shapes = {"up": (E, D, F), "down": (E, F, D), "router": (D, E)}
    shapes |= {"first": (D, D), "head": (D, CLASSES)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    made = {
        name: jax.random.normal(keys[name], shape) / shape[-2] ** 0.5
        for name, shape in shapes.items()
    }
    experts = {name: made.pop(name) for name in ("up", "down")}
    params = made | {"experts": experts}
    return {"params": params, "momenta": jax.tree.map(jnp.zeros_like, params)}


def routes(router, x_GxTxD):
    """Which place in which expert's buffer each token has, and with what weight."""
    weights_GxTxE = jax.nn.softmax(x_GxTxD @ router)
    chosen_GxTxE = jax.nn.one_hot(jnp.argmax(weights_GxTxE, axis=-1), E)
    place_GxTxE = jnp.cumsum(chosen_GxTxE, axis=1).astype(jnp.int32) - 1
    places_GxTxExC = jax.nn.one_hot(place_GxTxE, C) * chosen_GxTxE[..., None]
    return places_GxTxExC, places_GxTxExC * weights_GxTxE[..., None]


def experts(params, router, x_GxTxD):
    sent, weighted = routes(router, x_GxTxD)
    x_ExGxCxD = jnp.einsum("gtec,gtd->egcd", sent, x_GxTxD)
    h_ExGxCxF = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", x_ExGxCxD, params["up"]))
    y_ExGxCxD = jnp.einsum("egcf,efd->egcd", h_ExGxCxF, params["down"])
    return jnp.einsum("gtec,egcd->gtd", weighted, y_ExGxCxD)


def train_step(state, batch):
    def loss_fn(params):
        x = jnp.tanh(batch["x"] @ params["first"])
        x += experts(params["experts"], params["router"], x)
        scores = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["y"][..., None], axis=-1))

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momenta)
    return {"params": params, "momenta": momenta}, {"loss": loss}


def make_batch(key, groups=8, tokens=8):
    x = jax.random.normal(key, (groups, tokens, D))
    return {"x": x, "y": jnp.argmax(x, axis=-1)}


def make_mesh():
    return jax.make_mesh((2, 4), ("data", "expert"), (AxisType.Auto,) * 2)


def sharded(mesh):
    return shardfn.fully_shard(
        train_step,
        mesh,
        axis=("data", "expert"),
        shard={"*experts*": {"expert": 0}},
        stationary={"*experts*": True, "*": False},
        min_size=64,
    )


def main():
    mesh = make_mesh()
    step, batch = sharded(mesh), make_batch(jax.random.key(1))
    state = step.init(create_state, jax.random.key(0))
    print(step.plan(state, batch))
    print("up is split by", state["params"]["experts"]["up"].sharding.spec)
    for i in range(5):
        state, metrics = step(state, batch)
        print(f"step {i}  loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # leave this out on accelerators
    main()
