"""In: weights that a step makes of elements and scales in few bits: int8, float8, int4,
NF4 packed in bytes; frozen, with trained adapters. Out: plans that gather what is in
few bits, and the numbers of the plain step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn
from shardfn._core import sent_bytes
from shardfn.testing import assert_parity

LAYERS, WIDE, BLOCK, ROWS = 3, 32, 16, 16
CODES = np.linspace(-1, 1, 16, dtype=np.float32)
OPTIONS: dict[str, Any] = {"min_size": 0, "stationary": False}
SCALES = jnp.linspace(0.01, 0.02, LAYERS * WIDE * WIDE // BLOCK)


@pytest.fixture(autouse=True)
def latencies_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_bytes, "LATENCY_BYTES", 0)


def scaled(q: jax.Array, s: jax.Array) -> jax.Array:
    blocks = q.reshape(-1, BLOCK).astype(jnp.float32) * s.reshape(-1, 1)
    return blocks.reshape(WIDE, WIDE)


def unpacked(q: jax.Array, s: jax.Array) -> jax.Array:
    """NF4: two codes in a byte, of a table."""
    codes = jnp.stack([q >> 4, q & 15], -1).reshape(-1).astype(jnp.int32)
    return 20 * scaled(jnp.asarray(CODES)[codes], s)


def rows(q: jax.Array, s: jax.Array) -> jax.Array:
    return q.astype(jnp.float32) * s


def whole_numbers(dtype: Any, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), shape, -7, 8).astype(dtype)


PACKED = jax.random.randint(jax.random.key(2), (LAYERS, WIDE * WIDE // 2), 0, 256)
CASES = {
    "int8 blocks": (
        scaled,
        {
            "q": whole_numbers(jnp.int8, LAYERS, WIDE, WIDE),
            "s": SCALES.reshape(LAYERS, -1),
        },
    ),
    "float8 rows": (
        rows,
        {
            "q": whole_numbers(jnp.float8_e4m3fn, LAYERS, WIDE, WIDE),
            "s": SCALES[: LAYERS * WIDE].reshape(LAYERS, 1, WIDE),
        },
    ),
    "nf4 packed": (
        unpacked,
        {"q": PACKED.astype(jnp.uint8), "s": SCALES.reshape(LAYERS, -1)},
    ),
}


def adapted(make: Any, remat: bool) -> Any:
    """Layers of weights that are made so, each with a trained adapter."""

    def loss(trained: Any, base: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, both: Any) -> Any:
            base, p = both
            w = make(base["q"], base["s"])
            return x + jnp.tanh(x @ w + x @ p["a"] @ p["b"]), None

        layer = jax.checkpoint(layer) if remat else layer
        return jnp.square(lax.scan(layer, x, (base, trained))[0]).mean()

    def step(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["lora"], state["base"], x)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, state["lora"], grads)
        return {**state, "lora": new}, value

    return step


def arguments(base: Any) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(3), 3)
    lora = {
        "a": jax.random.normal(keys[0], (LAYERS, WIDE, 8)) / 8,
        "b": jax.random.normal(keys[1], (LAYERS, 8, WIDE)) / 8,
    }
    x = jax.random.normal(keys[2], (ROWS, WIDE))
    return {"base": base, "lora": lora}, x


@pytest.mark.covering(1)
@pytest.mark.parametrize("prefetch", ["auto", "first", 2])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_in_few_bits_is_gathered(
    name: str, remat: bool, prefetch: str | int
) -> None:
    """Where it is used, or in an iteration before."""
    make, base = CASES[name]
    state, x = arguments(base)
    options = {"prefetch": prefetch, **OPTIONS}
    step = shardfn.fully_shard(adapted(make, remat), cpu_mesh(8), **options)
    plan = step.plan(state, x)
    gathers = [c for c in plan.collectives if c.path.startswith("base")]
    assert {c.path for c in gathers} == {"base/q", "base/s"}
    assert {c.dtype for c in gathers if c.path == "base/q"} == {str(base["q"].dtype)}
    assert {c.op for c in gathers} == {"all_gather"}
    assert {bool(c.ahead) for c in gathers} == {prefetch != "auto"}
    (line,) = [n for n in plan.notes if n.startswith("gathered before it becomes")]
    assert "test_choose_narrow_gathers.py:" in line
    args = step.shard(state), x
    assert plan.verify(step.lower(*args).compile()).ok


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_plain_step(name: str, mesh: tuple[int, ...]) -> None:
    make, base = CASES[name]
    state, x = arguments(base)
    axis = ("replica", "data")[-len(mesh) :]
    assert_parity(adapted(make, True), cpu_mesh(*mesh), state, x, axis=axis, **OPTIONS)


def test_the_narrowest_of_all_in_between_is_gathered() -> None:
    """What is made of two weights in float32 is bfloat16 in between."""

    def cast(q: jax.Array, s: jax.Array) -> jax.Array:
        half = q.astype(jnp.bfloat16) * s.astype(jnp.bfloat16)
        return half.astype(jnp.float32)

    weight = jax.random.normal(jax.random.key(4), (LAYERS, WIDE, WIDE))
    state, x = arguments({"q": weight, "s": 1 + weight})
    step = shardfn.fully_shard(adapted(cast, True), cpu_mesh(8), **OPTIONS)
    plan = step.plan(state, x)
    gathers = [c for c in plan.collectives if c.shape == (WIDE, WIDE)]
    assert {(c.op, c.dtype) for c in gathers} == {("all_gather", "bfloat16")}


def test_thin_factors_that_are_added_to_a_weight_are_gathered() -> None:
    """The product of an adapter's factors is made on every device, as it takes less
    time than to send it."""
    make, base = CASES["int8 blocks"]

    def loss(trained: Any, base: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, both: Any) -> Any:
            base, p = both
            return jnp.tanh(x @ (make(base["q"], base["s"]) + p["a"] @ p["b"])), None

        return jnp.square(lax.scan(jax.checkpoint(layer), x, (base, trained))[0]).mean()

    def step(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["lora"], state["base"], x)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, state["lora"], grads)
        return {**state, "lora": new}, value

    state, x = arguments(base)
    lora = {"a": state["lora"]["a"][:, :, :2], "b": state["lora"]["b"][:, :2]}
    state = {**state, "lora": lora}
    plan = shardfn.fully_shard(step, cpu_mesh(8), **OPTIONS).plan(state, x)
    gathers = {(c.path, c.dtype) for c in plan.collectives if c.op == "all_gather"}
    floats = {(name, "float32") for name in ("base/s", "lora/a", "lora/b")}
    assert gathers == {("base/q", "int8"), *floats}
    assert_parity(step, cpu_mesh(8), state, x, **OPTIONS)


def evaluate(base: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, base: Any) -> Any:
        return x + jnp.tanh(x @ rows(base["q"], base["s"])), None

    return jnp.square(lax.scan(layer, x, base)[0]).mean()


@pytest.mark.parametrize("stationary", ["auto", True])
def test_they_stay_where_that_sends_less_or_is_asked(stationary: Any) -> None:
    """Eight rows of 2048 numbers are less than a matrix of as many rows."""
    wide = 2048
    base = {
        "q": jax.ShapeDtypeStruct((LAYERS, wide, wide), jnp.int8),
        "s": jax.ShapeDtypeStruct((LAYERS, 1, wide), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((8, wide), jnp.float32)
    sent = {}
    for asked in (stationary, False):
        step = shardfn.fully_shard(evaluate, cpu_mesh(8), stationary=asked)
        plan = step.plan(base, x)
        sent[asked] = plan.wire_bytes
        narrow = any(n.startswith("gathered before it becomes") for n in plan.notes)
        assert narrow == (asked is False)
    assert sent[stationary] < sent[False] / 10


def test_they_are_not_where_every_layer_would_wait_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without rematerialization, for the backward pass (limits.LOOP_LIVE)."""
    make, base = CASES["int8 blocks"]
    state, x = arguments(base)
    at = "shardfn._lowering.choose_narrow_gathers.LOOP_LIVE"
    monkeypatch.setattr(at, WIDE * WIDE)
    for remat in (False, True):
        step = shardfn.fully_shard(adapted(make, remat), cpu_mesh(8), **OPTIONS)
        notes = step.plan(state, x).notes
        assert any(n.startswith("gathered before") for n in notes) == remat


def test_weights_may_be_made_by_any_number_of_operations() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(600):
            w = jnp.sin(w)
        return jnp.mean(x @ w)

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jax.grad(loss)(w, x), x.mean()

    plan = shardfn.fully_shard(step, cpu_mesh(8), **OPTIONS).plan(
        jnp.ones((WIDE, WIDE)), jnp.ones((ROWS, WIDE))
    )
    assert plan.collectives
