"""In: steps that call functions with derivatives of their own, differentiated from
outside. Out: the user's rules, applied to whole arrays, as for the plain step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import shardfn

W = np.random.default_rng(1).normal(size=(12, 5)).astype(np.float32)
X = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)
MESHES = {"8": ((8,), ("data",)), "2x4": ((2, 4), ("replica", "data"))}


@jax.custom_jvp
def through(x):
    """Rounds; its derivative is three times that of the identity."""
    return jnp.round(x * 4) / 4


@through.defjvp
def _through_jvp(primals, tangents):
    return through(*primals), 3 * tangents[0]


@jax.custom_vjp
def clipped(x):
    """Its gradient is clipped by the norm over the whole array: not elementwise."""
    return x * 1.5


def _clipped_bwd(x, cotangent):
    norm = jnp.sqrt(jnp.sum(cotangent**2)) + jnp.sum(x) * 0.0
    return (cotangent / jnp.maximum(norm, 1e-2),)


clipped.defvjp(lambda x: (clipped(x), x), _clipped_bwd)


@jax.custom_vjp
def linear(x, w, count):
    """A matmul whose rule has two results, and an integer among its arguments."""
    return x @ w, count + 1


linear.defvjp(
    lambda x, w, count: (linear(x, w, count), (x, w)),
    lambda saved, ct: (2 * ct[0] @ saved[1].T, saved[0].T @ ct[0] / 2, None),
)


@jax.custom_jvp
def normal(x):
    """Its rule calls another function with a rule."""
    return x / (1 + jnp.sum(x**2, axis=0))


@normal.defjvp
def _normal_jvp(primals, tangents):
    return normal(*primals), tangents[0] * through(jnp.sum(primals[0], axis=0))


def scanned(w, x):
    def layer(carry, _):
        return through(carry) @ (w @ w.T) / 8, None

    return lax.scan(layer, x, None, length=3)[0].sum()


LOSSES: dict[str, Callable[[Any, Any], jax.Array]] = {
    "jvp of a parameter": lambda w, x: jnp.mean((x @ through(w)) ** 2),
    "jvp of activations": lambda w, x: jnp.mean(through(x @ w) ** 2),
    "jvp in jvp": lambda w, x: jnp.mean(normal(x @ w) ** 2),
    "jvp in a scan": scanned,
    "vjp of a parameter": lambda w, x: jnp.mean((x @ clipped(w)) ** 2),
    "vjp of activations": lambda w, x: jnp.mean(clipped(x @ w) ** 2),
    "vjp of a scalar": lambda w, x: clipped(jnp.mean((x @ w) ** 2)),
    "vjp of both": lambda w, x: jnp.mean(linear(x, w, 1)[0] ** 2),
}


def step_of(loss: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
    return lambda w, x: (w * 2, loss(w, x))


def sharded(loss: Callable[[Any, Any], jax.Array], mesh: str = "8") -> Any:
    sizes, names = MESHES[mesh]
    made = jax.make_mesh(sizes, names)
    return shardfn.fully_shard(step_of(loss), made, axis=names, min_size=0)


def local(loss: Callable[..., jax.Array], check_vma: bool = True) -> Any:
    step = shardfn.fully_shard(step_of(loss), axis="data", min_size=0)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def run(w, x):
        return step(step.shard(w), x)[1]

    return jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )


def assert_close(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_from_outside_is_the_users(name: str, mesh: str) -> None:
    run = sharded(LOSSES[name], mesh)
    got = jax.grad(lambda w, x: run(w, x)[1], argnums=(0, 1))(W, X)
    assert_close(got, jax.grad(LOSSES[name], argnums=(0, 1))(W, X))


@pytest.mark.parametrize("name", [n for n in LOSSES if n.startswith("jvp")])
def test_second_derivatives_from_outside(name: str) -> None:
    run = sharded(LOSSES[name])

    def second(loss):
        return jax.jvp(lambda w: jax.grad(loss)(w, X), (W,), (W[::-1],))

    assert_close(second(lambda w, x: run(w, x)[1]), second(LOSSES[name]))


@pytest.mark.parametrize("name", ["jvp of activations", "vjp of both"])
def test_checkpointed_vmapped_and_jitted(name: str) -> None:
    run, plain = sharded(LOSSES[name]), LOSSES[name]
    both = np.stack([W, W[::-1]])

    def gradients(loss):
        grad = jax.grad(jax.checkpoint(loss))
        return jax.jit(grad)(W, X), jax.vmap(grad, (0, None))(both, X)

    assert_close(gradients(lambda w, x: run(w, x)[1]), gradients(plain))


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_a_local_step(name: str) -> None:
    got = jax.jit(jax.grad(local(LOSSES[name])))(W, X)
    assert_close(got, jax.grad(LOSSES[name])(W, X))


def test_gradient_where_jax_checks_no_types_is_refused() -> None:
    """It would be wrong by a factor of the number of devices, or worse."""
    run = jax.jit(local(LOSSES["vjp of both"], check_vma=False))
    run(W, X)
    with pytest.raises(shardfn.ShardingError) as error:
        jax.grad(run)(W, X)
    assert "JAX does not know which values are replicated" in str(error.value)
    assert "jax.shard_map(check_vma=True)" in str(error.value)


def test_forward_mode_through_a_reverse_rule_is_jaxs_own_error() -> None:
    run = sharded(LOSSES["vjp of a parameter"])
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda w: run(w, X)[1], (W,), (W,))


def test_calls_share_one_gather() -> None:
    """XLA inlines both calls, and would merge two equal gathers in them."""

    def loss(w, x):
        return jnp.mean(linear(x, w, 1)[0] * linear(x + 1, w, 1)[0])

    run = sharded(loss)
    plan = run.plan(W, X)
    (gather,) = [c for c in plan.collectives if c.op == "all_gather"]
    assert gather.times == 1
    hlo = run.lower(W, X).compile().as_text()
    assert hlo.count(" all-gather(") + hlo.count(" all-gather-start(") == 1


TIED = np.round(X)
EXTREMES: dict[str, Callable[[Any, Any], jax.Array]] = {
    "one of all": lambda w, x: jnp.max(x @ w) * jnp.min(w),
    "ties on several devices": lambda w, x: jnp.max(x, axis=0) @ w.sum(1),
    "softmax over the batch": lambda w, x: jnp.var(jax.nn.softmax(x @ w, axis=0)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", EXTREMES)
def test_derivative_of_a_maximum_over_devices(name: str, mesh: str) -> None:
    run = sharded(EXTREMES[name], mesh)

    def both(loss):
        grad = jax.grad(loss, argnums=(0, 1))
        return jax.jvp(lambda w: grad(w, TIED), (W,), (W[::-1],))

    assert_close(both(lambda w, x: run(w, x)[1]), both(EXTREMES[name]))


def test_no_derivative_of_other_maxima_over_devices() -> None:
    rows = jnp.arange(16) % 3
    run = sharded(lambda w, x: jax.ops.segment_max(x @ w, rows, 3).sum())
    with pytest.raises(shardfn.ShardingError) as error:
        jax.grad(lambda w: run(w, X)[1])(W)
    message = str(error.value)
    assert "differentiated through a maximum or minimum over mesh axis" in message
    assert "Take the gradient inside the step" in str(error.value)
