"""A case in; its training step as each program under comparison, lowered, out.

The plain step is `train_step`. `shardfn` and the first two baselines take it as it is;
the last two edit the model by hand, as their users have to.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from criteria_cases import Model
from criteria_models import STACKS, UNEDITED, Hand, Params, init, mean_loss
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfn

MIN_SIZE = 2**14
"""Leaves with fewer elements stay replicated: `fully_shard`'s default."""

ADAMW = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)

Lowering = Callable[[Model, Mesh], jax.stages.Lowered]
Gradients = tuple[jax.Array, Params]


def gradients(params: Params, batch: Any, model: Model, loss_of: Any) -> Gradients:
    """Mean loss and gradient, added up over microbatches if there are several."""
    one = jax.value_and_grad(functools.partial(loss_of, model=model))
    if model.microbatches == 1:
        return one(params, batch)

    def add(total: Gradients, part: Any) -> tuple[Gradients, None]:
        return jax.tree.map(jnp.add, total, one(params, part)), None

    zero = jax.tree.map(jnp.zeros_like, params)
    loss = 0 * jnp.mean(batch["inputs"], dtype=jnp.float32)  # as varied as a loss
    total, _ = lax.scan(add, (loss, zero), batch)
    return jax.tree.map(lambda x: x / model.microbatches, total)


def clip(grads: Params, square: jax.Array) -> Params:
    scale = jnp.minimum(1.0, lax.rsqrt(square + 1e-6))
    return jax.tree.map(lambda g: g * scale, grads)


def update(state: Any, grads: Params) -> Any:
    updates, moments = ADAMW.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": moments}


def train_step(state: Any, batch: Any, *, model: Model, hand: Hand = UNEDITED):
    """One step on one device: `(state, batch) -> (state, loss)`."""
    loss_of = functools.partial(mean_loss, hand=hand)
    loss, grads = gradients(state["params"], batch, model, loss_of)
    square = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    return update(state, clip(grads, square)), loss


def create(model: Model) -> Any:
    params = init(model)
    return {"params": params, "opt": ADAMW.init(params)}


def arguments(model: Model, devices: int) -> tuple[Any, Any]:
    """State and batch as shapes."""
    state = jax.eval_shape(functools.partial(create, model))
    rows = model.rows * devices
    shape = (rows, model.context)
    if model.microbatches > 1:
        shape = (model.microbatches, rows // model.microbatches, model.context)
    names = ["inputs", "targets"] + ["decoder_inputs"] * (model.family == "t5")
    return state, {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}


def batch_spec(model: Model) -> P:
    return P(None, "data") if model.microbatches > 1 else P("data")


def state_specs(model: Model, state: Any, devices: int) -> Any:
    """The largest dimension that the devices divide, of every leaf that is not small;
    not that of a scanned stack's layers."""

    def spec(path: Any, leaf: Any) -> P:
        stacked = model.scan and any(_key(k) in STACKS for k in path)
        sizes = {
            size: d
            for d, size in reversed(list(enumerate(leaf.shape)))
            if size % devices == 0 and d >= stacked
        }
        if leaf.size < MIN_SIZE or not sizes:
            return P()
        return P(*[None] * sizes[max(sizes)], "data")

    return jax.tree_util.tree_map_with_path(spec, state)


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "name", "")))


def sharded(model: Model, mesh: Mesh, **options: Any) -> shardfn.ShardedStep:
    """The unedited step through `fully_shard`."""
    step = functools.partial(train_step, model=model)
    functools.update_wrapper(step, train_step)
    return shardfn.fully_shard(
        step,
        mesh,
        batch_spec=batch_spec(model) if model.microbatches > 1 else None,
        **options,
    )


def jitted(model: Model, mesh: Mesh, specs: Any, hand: Hand = UNEDITED):
    """The step under `jit`, its state stored by `specs`: a tree, or one for all."""
    state, batch = arguments(model, mesh.size)
    tree = specs(model, state, mesh.size) if callable(specs) else specs
    stored = jax.tree.map(lambda s: NamedSharding(mesh, s), tree)
    step = jax.jit(
        functools.partial(train_step, model=model, hand=hand),
        in_shardings=(stored, NamedSharding(mesh, batch_spec(model))),
        out_shardings=(stored, None),
        donate_argnums=0,
    )
    return step.lower(state, batch)


def constrained(model: Model, mesh: Mesh) -> jax.stages.Lowered:
    """NamedSharding, and the batch dimension of activations constrained by hand."""
    rows = NamedSharding(mesh, P("data"))
    hand = Hand(activations=lambda x: lax.with_sharding_constraint(x, rows))
    return jitted(model, mesh, state_specs, hand)


def all_but_gathers(primitive: Any, *_: Any, **__: Any) -> bool:
    """What a layer without remat saves: not the whole weights."""
    return not primitive.name.startswith("all_gather")


def by_hand(model: Model, mesh: Mesh) -> jax.stages.Lowered:
    """ZeRO-3 in `shard_map`: weights are gathered where they are used, layer by layer,
    and autodiff turns that into reduce-scatters."""
    state, batch = arguments(model, mesh.size)
    specs = state_specs(model, state, mesh.size)

    def gather(w: jax.Array, spec: P) -> jax.Array:
        if "data" not in spec:
            return w
        return lax.all_gather(w, "data", axis=spec.index("data"), tiled=True)

    def weights(tree: Any, name: str) -> Any:
        own = specs["params"][name]
        if name in STACKS:
            own = jax.tree.map(lambda s: P(*s[1:]), own) if model.scan else own[0]
        return jax.tree.map(gather, tree, own)

    hand = Hand(weights=weights, policy=all_but_gathers)

    def loss_of(params: Params, batch: Any, model: Model) -> jax.Array:
        return mean_loss(params, batch, model, hand) / mesh.size

    def step(state: Any, batch: Any) -> Any:
        loss, grads = gradients(state["params"], batch, model, loss_of)
        pairs = list(
            zip(jax.tree.leaves(grads), jax.tree.leaves(specs["params"]), strict=True)
        )
        parts = sum(jnp.sum(g**2) for g, spec in pairs if "data" in spec)
        wholes = sum(jnp.sum(g**2) for g, spec in pairs if "data" not in spec)
        square = lax.psum(parts, "data") + wholes
        return update(state, clip(grads, square)), lax.psum(loss, "data")

    whole = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, batch_spec(model)),
        out_specs=(specs, P()),
    )
    return jax.jit(whole, donate_argnums=0).lower(state, batch)
