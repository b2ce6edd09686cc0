"""In: optimizers of every form whose state lives in the host's memory. Out: the plain
step's numbers, what is copied block by block and what as a whole, and plans that say
it; leaves stay where they are stored over steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._core.memories import memory_of
from shardfn._core.plan import BlockLoop
from shardfn._schedule import host_transfers
from shardfn.testing import assert_same

pytestmark = pytest.mark.standard_promotion

SHAPES = {
    "stack": (3, 16, 32),
    "table": (256, 16),
    "padded": (801, 5),  # one row more than 8 devices divide
    "flat": (5, 23),
    "tiny": (3,),
}
BLOCK = 256
"""Bytes of a block here, so that leaves this small take several."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(host_transfers, "HOST_BLOCK_BYTES", BLOCK)


def params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    each = zip(keys, SHAPES.items(), strict=True)
    return {name: jax.random.normal(k, shape) for k, (name, shape) in each}


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Every leaf meets the batch; gradients of all depend on all rows."""
    h, _ = jax.lax.scan(
        lambda h, w: (jnp.tanh(h @ w)[:, :16], None), x, params["stack"]
    )
    h = h @ params["table"].T
    for name in ("padded", "flat"):
        w = params[name].reshape(-1)[: h.shape[1]]
        h = h[:, : w.shape[0]] * jnp.cos(w)
    return jnp.mean(h**2) + 0.1 * jnp.sum(params["tiny"] ** 2)


def trust_ratio() -> optax.GradientTransformation:
    """Moments, and an update that waits for the norm of what they make (LAMB)."""
    return optax.lamb(1e-2)


def with_average(decay: float = 0.75) -> optax.GradientTransformation:
    return optax.chain(optax.sgd(0.5, momentum=0.5), optax.ema(decay))


OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.5, momentum=0.5),
    "clip + adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2)
    ),
    "lamb": trust_ratio,
    "ema": with_average,
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "bfloat16 moments": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}


def train(tx: optax.GradientTransformation) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (16, 16))


def on_host(state: Any) -> dict[str, bool]:
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): memory_of(x.sharding)
        == "host"
        for p, x in flat
    }


MOMENTS, ALL = "1/*", "*"
rarely = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "name, pattern, devices",
    [
        ("clip + adamw", MOMENTS, 8),
        ("clip + adamw", ALL, 8),
        ("adafactor", MOMENTS, 8),
        pytest.param("lamb", ALL, 8, marks=rarely),
        pytest.param("clip + adamw", ALL, 1, marks=rarely),
        pytest.param("lamb", MOMENTS, 8, marks=rarely),
        pytest.param("ema", ALL, 8, marks=rarely),
        pytest.param("ema", MOMENTS, 1, marks=rarely),
        pytest.param("adafactor", ALL, 8, marks=rarely),
        pytest.param("bfloat16 moments", MOMENTS, 8, marks=rarely),
    ],
)
def test_steps_are_those_of_the_device(name: str, pattern: str, devices: int) -> None:
    tx, x, mesh = OPTIMIZERS[name](), batch(), cpu_mesh(devices)
    plain = shardfn.fully_shard(train(tx), mesh, min_size=16)
    step = shardfn.fully_shard(
        train(tx), mesh, min_size=16, offload={pattern: "host"}, verify="error"
    )
    state = (params(), tx.init(params()))
    expected, given = plain.shard(state), step.shard(state)
    stored = on_host(given)
    assert any(stored.values())
    for _ in range(3):
        expected, loss = plain(expected, x)
        given, found = step(given, x)
        np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert on_host(given) == stored
    # Fused in other ways, products and sums may round once less.
    assert_same(plain.unshard(expected), step.unshard(given), name, tol=2e-6)


def exact(state: Any, x: jax.Array) -> Any:
    """Numbers that float32 holds exactly: no order and no fusion changes a bit."""
    grads = jax.grad(lambda w: jnp.sum((x @ w) * x.sum(1, keepdims=True)))(state["w"])
    momentum = 0.5 * state["m"] + grads
    return {"w": state["w"] - 2.0**-20 * momentum, "m": momentum}


def test_50_steps_are_equal_to_the_bit() -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (8, 16)), jnp.float32)
    mesh = cpu_mesh(8)
    expected = {"w": jnp.ones((16, 24)), "m": jnp.zeros((16, 24))}
    step = shardfn.fully_shard(exact, mesh, min_size=1, offload={"m": "host"})
    state = step.shard(expected)
    plain = jax.jit(exact)
    for _ in range(50):
        state, expected = step(state, x), plain(expected, x)
        assert on_host(state) == {"m": True, "w": False}
    np.testing.assert_array_equal(step.unshard(state)["w"], expected["w"])
    np.testing.assert_array_equal(step.unshard(state)["m"], expected["m"])


def planned(name: str, **options: Any) -> Any:
    tx = OPTIMIZERS[name]()
    step = shardfn.fully_shard(train(tx), cpu_mesh(8), min_size=16, **options)
    return step.plan((params(), tx.init(params())), batch())


def copies(plan: Any, leaf: str) -> set[tuple[str, int]]:
    return {(t.memory, t.blocks) for t in plan.transfers if t.path.endswith(leaf)}


def test_pointwise_updates_come_in_blocks() -> None:
    plan = planned("clip + adamw", offload={"1/*": "host"})
    # 3 x 16 x 4 floats of each device, a layer at a time; 32 x 16 in blocks of 8 rows:
    # a TPU's compiler ends where a block is no multiple of a tile's rows.
    assert copies(plan, "stack") == {("device", 3), ("host", 3)}
    assert copies(plan, "table") == {("device", 4), ("host", 4)}
    # A padded leaf keeps zeros behind its end, which no block knows of.
    assert copies(plan, "padded") == {("device", 1), ("host", 1)}
    assert not copies(plan, "tiny")
    moments = 2 * 4 * sum(np.prod(s) for n, s in SHAPES.items() if n != "tiny")
    sent = sum(t.bytes for t in plan.transfers if t.memory == "device")
    assert moments / 8 <= sent < 1.02 * moments / 8


@pytest.mark.parametrize("pattern", ["1/*", "*"])
def test_new_leaves_are_written_over_the_old_ones(pattern: str) -> None:
    """Parameters are read before the update, gradients by the norm that clips them: a
    new array for what is made of either would be as large as all of the parameters."""
    plan = planned("clip + adamw", offload={pattern: "host"})
    loops = [step for step in plan.body.host.steps if isinstance(step, BlockLoop)]
    assert len(loops) >= 2
    assert all(old is not None for loop in loops for old in loop.into)


def test_parameters_on_the_host_part_no_update() -> None:
    """What the forward pass makes of them is made before all gradients; the update of a
    leaf is one loop all the same."""

    def train(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((x @ jnp.tanh(w)) ** 2)

        m = 0.5 * state["m"] + jax.grad(loss)(state["w"])
        return {"w": state["w"] - m, "m": m}

    state = {k: jax.ShapeDtypeStruct((256, 16), jnp.float32) for k in ("w", "m")}
    step = shardfn.fully_shard(train, cpu_mesh(8), min_size=16, offload="host")
    plan = step.plan(state, jax.ShapeDtypeStruct((64, 256), jnp.float32))
    assert plan.body.host is not None
    loops = [s for s in plan.body.host.steps if isinstance(s, BlockLoop)]
    assert len(loops) == 1 and len(loops[0].made) == 2


def layered_loss(params: Any, x: jax.Array, remat: bool) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> Any:
        return jnp.tanh(h @ w["in"]) @ w["out"], None

    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    h, _ = jax.lax.scan(body, x, params["layers"])
    return jnp.mean((h @ params["head"]) ** 2)


@pytest.mark.parametrize(
    "remat, prefetch",
    [(True, 0), (True, 1), pytest.param(False, 1, marks=rarely)],
)
def test_scans_take_parameters_layer_by_layer(remat: bool, prefetch: int) -> None:
    def train(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(layered_loss)(params, x, remat)
        return jax.tree.map(lambda w, g: w - 0.5 * g, params, grads), loss

    k = jax.random.split(jax.random.key(0), 4)
    state = {
        "layers": {
            "in": jax.random.normal(k[0], (4, 16, 32)),
            "out": jax.random.normal(k[1], (4, 32, 16)),
        },
        "head": jax.random.normal(k[2], (16, 8)),
    }
    x, options = (
        jax.random.normal(k[3], (32, 16)),
        {"min_size": 16, "prefetch": prefetch},
    )
    options |= {"stationary": False}
    plain = shardfn.fully_shard(train, cpu_mesh(8), **options)
    step = shardfn.fully_shard(
        train, cpu_mesh(8), offload="host", verify="error", **options
    )
    expected, given = plain.shard(state), step.shard(state)
    for _ in range(2):
        expected, _ = plain(expected, x)
        given, _ = step(given, x)
    assert_same(plain.unshard(expected), step.unshard(given), "layers", tol=2e-6)
    copies = [t for t in step.plan(given, x).transfers if t.path == "layers/in"]
    found = {(t.phase, t.memory, t.parts) for t in copies}
    slices = f"{4 + prefetch} slices"  # the last layer's come again, as its gathers do
    passes = {("forward", "device", slices), ("backward", "device", slices)}
    assert found == passes | {("update", to, "4 blocks") for to in ("device", "host")}
    assert {t.block_bytes for t in copies} == {16 * 32 * 4 // 8}
    assert f"in {slices} of a scan, each of 256 B" in str(copies[0])


def test_what_waits_for_a_norm_is_read_again() -> None:
    """LAMB takes the norm of its update: what that is made of comes once, and the
    moments do not come again for what follows."""
    plan = planned("lamb", offload={"1/*": "host"})
    moments = [t for t in plan.transfers if t.path.endswith("stack")]
    assert [t.memory for t in moments] == ["device"] * 2 + ["host"] * 2


def test_other_updates_come_as_a_whole() -> None:
    plan = planned("adafactor", offload={"1/*": "host"})
    assert plan.transfers and {t.blocks for t in plan.transfers} == {1}


def test_a_plan_says_what_is_copied_and_why() -> None:
    plan = planned("momentum", offload={"1/*": "host"})
    text = str(plan)
    row = "update  device   3x16x32  float32  3 blocks     768 B  1/0/trace/stack"
    assert row in text, text
    assert "from its host and" in text and "to it per step" in text
    explained = plan.explain("1/0/trace/stack")
    assert "in the host's memory" in explained
    assert "offload='host' asks for the host's memory" in explained
    assert (
        "update copy from the host: 768 B per device, in 3 blocks of dimension 0, each "
        "of 256 B (limits.HOST_BLOCK_BYTES)"
    ) in explained
    explained = plan.explain("1/0/trace/tiny")
    assert "3 elements are fewer than min_size=16" in explained


def test_moves_that_are_one_have_their_copies_in_front() -> None:
    """Also where the second of them is the first to read a leaf on the host."""

    def step(state: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w: w - jnp.sum(x @ w), state), 0.0

    options = {"offload": {"b": "host"}, "bucket_bytes": 2**20, "stationary": False}
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=16, **options)
    state = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    lines = sharded.plan(state, jnp.ones((8, 8))).collectives
    assert [len(c.parts) for c in lines if c.op == "all_gather"] == [2]
    found, _ = sharded(state, jnp.ones((8, 8)))
    expected, _ = step(state, jnp.ones((8, 8)))
    jax.tree.map(np.testing.assert_array_equal, sharded.unshard(found), expected)


def test_without_offload_nothing_is_copied() -> None:
    assert planned("momentum").transfers == () and planned("momentum").on_host == ()
