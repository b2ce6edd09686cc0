"""In: steps whose gradient of a weight is multiplied with a thin stored factor, as that
of a weight to which LoRA is added. Out: the plain step's values; the thin products are
summed, and never the gradient of the weight.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import GATHERS, assert_steps_alike, cpu_mesh

import shardfn

ROWS, WIDTH, HIDDEN, RANK, LAYERS = 48, 64, 96, 4, 3

Step = Callable[[Any, Any], Any]


def added(p: Any, x: jax.Array) -> Any:
    """LoRA in each of several layers, scanned and rematerialized."""
    frozen = lax.stop_gradient(p["frozen"])

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> Any:
        frozen, thin = w
        up = frozen["up"] + 2.0 * (thin["up"]["a"] @ thin["up"]["b"])
        down = frozen["down"] + 2.0 * (thin["down"]["a"] @ thin["down"]["b"])
        return x + jnp.tanh(x @ up) @ down, None

    def loss_fn(thin: Any) -> jax.Array:
        return jnp.mean(lax.scan(layer, x, (frozen, thin))[0] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(p["thin"])
    thin = jax.tree.map(lambda w, g: w - 0.1 * g, p["thin"], grads)
    return {"frozen": p["frozen"], "thin": thin}, loss


def projected(p: Any, x: jax.Array) -> Any:
    """A gradient that is projected on few dimensions, in which its moments are."""

    def loss_fn(w: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w["up"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(p["frozen"])
    basis = p["thin"]["up"]["a"]
    moment = 0.9 * p["moment"] + basis.T @ grads["up"]
    frozen = {"up": p["frozen"]["up"] - 0.1 * basis @ moment}
    return {"frozen": frozen, "thin": p["thin"], "moment": moment}, loss


def made(step: Step) -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        scale = 1 / np.sqrt(shape[-2])
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    x = weight(ROWS, WIDTH)
    if step is projected:
        thin = {"up": {"a": weight(WIDTH, RANK)}}
        up = weight(WIDTH, HIDDEN)
        moment = jnp.zeros((RANK, HIDDEN))
        return {"frozen": {"up": up}, "thin": thin, "moment": moment}, x
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    frozen = {k: weight(LAYERS, *shape) for k, shape in shapes.items()}
    thin = {
        k: {"a": weight(LAYERS, n, RANK), "b": weight(LAYERS, RANK, m)}
        for k, (n, m) in shapes.items()
    }
    return {"frozen": frozen, "thin": thin}, x


def sharded(step: Step, *sizes: int, **options: Any) -> Any:
    axis = ("replica", "data") if len(sizes) > 1 else "data"
    options = GATHERS | {"axis": axis, "min_size": 32} | options
    return shardfn.fully_shard(step, cpu_mesh(*sizes), **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [added, projected])
@pytest.mark.parametrize("sizes", [(8,), (3,), (2, 4)], ids=str)
def test_steps_are_those_of_the_plain_step(step: Step, sizes: Any) -> None:
    assert_steps_alike(step, sharded(step, *sizes), *made(step))


@pytest.mark.parametrize("step", [added, projected])
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_no_gradient_of_a_weight_is_summed(step: Step, sizes: Any) -> None:
    plan = sharded(step, *sizes).plan(*made(step))
    sums = [c for c in plan.collectives if c.op in ("psum_scatter", "all_reduce")]
    thin = [c for c in sums if RANK in c.shape]
    assert thin
    assert not [c for c in sums if {WIDTH, HIDDEN} <= {*c.shape}]


def test_wide_products_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device would make all of them (limits.REPEATED_FLOPS)."""
    at = "shardfn._propagation.op_strategy.REPEATED_FLOPS"
    monkeypatch.setattr(at, RANK / 4)
    plan = sharded(added, 8).plan(*made(added))
    sums = [c for c in plan.collectives if c.op == "psum_scatter"]
    assert len([c for c in sums if {WIDTH, HIDDEN} <= {*c.shape}]) == 2
