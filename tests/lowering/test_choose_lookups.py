"""In: steps that look up rows of tables, and rows that are spread evenly, skewed or out
of bounds. Out: rows are asked of the devices that own them where that sends less, and
the numbers are the plain step's, in however many rounds.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._lowering import choose_lookups, plan_jaxpr
from shardfn._trace.row_requests import RowRequests
from shardfn.analysis import targets
from shardfn.testing import assert_parity

MESH = cpu_mesh(8)
WIDTH, BATCH, FEATURES = 7, 160, 3
NOTE = "rows are asked of the devices that own them"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are asked of their owners though tables of tests are too small for it."""
    monkeypatch.setattr(choose_lookups, "_saved", lambda *_: 1)
    monkeypatch.setattr(choose_lookups, "least_saved", lambda *_: 0)
    monkeypatch.setattr(plan_jaxpr, "are_worth", lambda *_: True)


def rows_of(kind: str, table: int, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(0).integers(0, table, shape)
    if kind == "even":
        return random.astype(np.int32)
    if kind == "one row":
        return np.full(shape, 3, np.int32)
    if kind == "one owner":
        return (random % (table // 8)).astype(np.int32)
    return (random * 3 - table).astype(np.int32)  # a third of them in the table


def update_rows(state: Any, batch: Any) -> Any:
    """Row-wise Adagrad: two lookups and two updates of the same rows."""
    ids = batch["ids"]

    def loss_fn(rows: jax.Array, out: jax.Array) -> jax.Array:
        made = jnp.tanh(rows).reshape(len(rows), -1) @ out
        return jnp.square(made - batch["y"][:, None]).mean()

    rows = state["rows"][ids]
    loss, (grads, d_out) = jax.value_and_grad(loss_fn, (0, 1))(rows, state["out"])
    sums = state["sums"].at[ids].add((grads**2).mean(-1))
    scaled = grads * jax.lax.rsqrt(sums[ids] + 1e-6)[..., None]
    new = {"rows": state["rows"].at[ids].subtract(0.1 * scaled), "sums": sums}
    return new | {"out": state["out"] - 0.1 * d_out}, loss


def dense_gradient(state: Any, batch: Any) -> Any:
    """The gradient of the table itself, in two microbatches, with momentum."""

    def loss_fn(w: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
        rows = jax.checkpoint(lambda t: jnp.sin(t[ids]))(w["rows"])
        made = rows.reshape(len(ids), -1) @ w["out"]
        return jnp.square(made - y[:, None]).mean()

    def one(total: Any, part: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(weights, *part)
        return jax.tree.map(jnp.add, total, grads), loss

    weights = {"rows": state["rows"], "out": state["out"]}
    parts = jax.tree.map(
        lambda x: x.reshape(2, -1, *x.shape[1:]), (batch["ids"], batch["y"])
    )
    zeros = jax.tree.map(jnp.zeros_like, weights)
    grads, losses = jax.lax.scan(one, zeros, parts)
    sums = 0.9 * state["sums"] + jnp.square(grads["rows"]).mean(-1)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
    return new | {"sums": sums}, losses.mean()


def example(table: int, kind: str) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    state = {
        "rows": jax.random.normal(keys[0], (table, WIDTH)),
        "sums": jnp.zeros(table),
        "out": jax.random.normal(keys[1], (FEATURES * WIDTH, 2)),
    }
    ids = rows_of(kind, table, (BATCH, FEATURES))
    return state, {"ids": ids, "y": jax.random.normal(keys[2], (BATCH,))}


KINDS = ("even", "one row", "one owner", "outside")
SIZES = [(8, 4000), (8, 3999), (5, 3999), (2, 3999)]


@pytest.mark.covering(1)
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("step", [update_rows, dense_gradient])
@pytest.mark.parametrize("devices, table", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_asked_of_their_owners(
    step: Any, devices: int, table: int, kind: str
) -> None:
    """Tables whose rows the devices divide, and tables that are stored padded."""
    state, batch = example(table, kind)
    mesh = cpu_mesh(devices)
    plan = shardfn.fully_shard(step, mesh, min_size=0, stationary=True).plan(
        state, batch
    )
    assert NOTE in str(plan)
    rows = {c.op for c in plan.collectives if c.shape[-1:] == (WIDTH,)}
    assert rows == {"all_to_all"}
    assert not [c for c in plan.collectives if c.path == "rows"]
    asked_for = {"stationary": True, "steps": 3, "tol": 2e-5, "verify": "error"}
    assert_parity(step, mesh, state, batch, **asked_for)  # pyright: ignore


MODES = ("promise_in_bounds", "clip", "fill")
DTYPES = ("float32", "bfloat16", "complex64", "int32", "uint8")


@pytest.mark.covering(1)
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", ("int32", "uint8", "int8"))
def test_rows_outside_of_a_table_are_what_jax_makes_of_them(
    mode: str, dtype: str, index: str
) -> None:
    random = np.random.default_rng(1)
    rows = random.integers(0, 100, (96, 3)).astype(dtype)
    kind = "even" if mode == "promise_in_bounds" else "outside"
    ids = rows_of(kind, 96, (16, 2, 2)).astype(index)

    def step(table: jax.Array, ids: jax.Array) -> Any:
        found = table.at[ids].get(mode=mode)
        write = "drop" if mode == "fill" else mode
        table = table.at[ids].add(found[..., :1] * 0 + 1, mode=write)
        return table, (found, table.at[ids].get(mode="fill", fill_value=7))

    asked_for = {"stationary": True, "shard": {"state": {"data": 0}}, "tol": 2e-2}
    exact = asked_for if dtype == "bfloat16" else asked_for | {"tol": 1e-6}
    plan = shardfn.fully_shard(
        step, MESH, min_size=0, stationary=True, shard={"state": {"data": 0}}
    ).plan(rows, ids)
    assert NOTE in str(plan)
    assert_parity(step, MESH, rows, ids, **exact)  # pyright: ignore


@pytest.mark.usefixtures("asked")
def test_gradients_go_through_a_step_that_asks_for_rows() -> None:
    """Its loops' rounds depend on data: JAX has no gradient of such a loop."""
    state, batch = example(3999, "one owner")
    options: Any = {"min_size": 0, "stationary": True, "donate": False}
    step = shardfn.fully_shard(update_rows, MESH, **options)
    stored = step.shard(state)

    def loss_of(run: Any, state: Any) -> Any:
        def loss(rows: jax.Array) -> jax.Array:
            new, value = run(state | {"rows": rows}, batch)
            return value + jnp.square(new["rows"]).sum()

        return loss

    tangent = jnp.cos(jnp.arange(3999.0 * WIDTH)).reshape(3999, WIDTH)
    sharded = step.shard(state | {"rows": tangent})["rows"]
    plain = loss_of(update_rows, state), state["rows"]
    ours = loss_of(step, stored), stored["rows"]
    expected = jax.grad(plain[0])(plain[1])
    for differentiated in (jax.grad(ours[0]), jax.jit(jax.grad(ours[0]))):
        got = step.unshard({**stored, "rows": differentiated(ours[1])})["rows"]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    along = (
        jax.jvp(f, (at,), (t,)) for (f, at), t in ((ours, sharded), (plain, tangent))
    )
    for got, exact in zip(*along, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4)


def read_twice(state: Any, batch: Any) -> Any:
    """What lies outside of the table is once a number, and once another."""
    at = state["rows"].at[batch["ids"]]
    first, other = (at.get(mode="fill", fill_value=x) for x in (2.0, 5.0))
    return state, (jnp.sin(first).sum(), other.sum())


def same_rows_in_all_layers(state: Any, batch: Any) -> Any:
    """A loop that looks up the same rows in each iteration."""

    def layer(h: jax.Array, scale: jax.Array) -> Any:
        return jnp.tanh(h * scale + state["rows"][batch["ids"]]), None

    h = jnp.zeros((*batch["ids"].shape, WIDTH))
    h, _ = jax.lax.scan(layer, h, jnp.arange(1.0, 4.0))
    return state, jnp.square(h.sum() - batch["y"]).mean()


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("kind", ["even", "outside"])
def test_rows_that_are_read_twice_are_asked_for_once(kind: str) -> None:
    """XLA merges loops that do the same, and the plan has to say what it runs."""
    state, batch = example(3999, kind)
    options: Any = {"min_size": 0, "stationary": True}
    plan = shardfn.fully_shard(read_twice, MESH, **options).plan(state, batch)
    rows = [c for c in plan.collectives if c.shape[-1:] == (WIDTH,)]
    assert [c.op for c in rows] == ["all_to_all"]
    assert_parity(read_twice, MESH, state, batch, **options, verify="error")


@pytest.mark.usefixtures("asked")
def test_what_is_the_same_in_each_iteration_is_not_asked_for_in_it() -> None:
    """XLA asks once, in front of the loop."""
    state, batch = example(3999, "even")
    options: Any = {"min_size": 0, "stationary": True}
    step = shardfn.fully_shard(same_rows_in_all_layers, MESH, **options)
    assert NOTE not in str(step.plan(state, batch))
    assert_parity(same_rows_in_all_layers, MESH, state, batch, **options)


def wide_example(devices: int, table: int, rows: int) -> tuple[Any, Any]:
    """Shapes of a step whose tables nothing would be sent of but rows."""

    def create() -> Any:
        out = jnp.zeros((2 * 61, 2))
        return {"rows": jnp.zeros((table, 61)), "sums": jnp.zeros(table), "out": out}

    ids = jax.ShapeDtypeStruct((rows * devices, 2), jnp.int32)
    y = jax.ShapeDtypeStruct((rows * devices,), jnp.float32)
    return jax.eval_shape(create), {"ids": ids, "y": y}


def test_rows_are_asked_for_where_that_sends_less() -> None:
    """Of 131,072 lookups every device would give its part, 16 times as much."""
    state, batch = wide_example(8, 8_000_003, 16_384)
    plan = shardfn.fully_shard(update_rows, MESH).plan(state, batch)
    (line,) = (line for line in str(plan).splitlines() if line.startswith(NOTE))
    at_once = RowRequests(8_000_003, 8, 32_768, "data").at_once
    assert at_once == 4096 + 6 * 64
    assert f"at most {at_once} of each at once (limits.ASKED_SPREAD)" in line
    assert "less even in 4 rounds (limits.ASKED_ROUNDS)" in line
    assert "test_choose_lookups.py" in line
    rows = [c for c in plan.collectives if c.shape[-1:] == (61,)]
    assert {c.op for c in rows} == {"all_to_all"}
    sent = sum(c.wire_bytes for c in rows)  # there, and back
    assert sent == 2 * at_once * 8 * 61 * 4 * 7 / 8
    assert "nothing moves it" in plan.explain("rows")


def test_tables_stay_where_microbatches_look_rows_up() -> None:
    """The gather of a table that left the loop is for what the loop does with it."""
    state, batch = wide_example(8, 8_000_003, 16_384)
    plan = shardfn.fully_shard(dense_gradient, MESH).plan(state, batch)
    assert "nothing moves it" in plan.explain("rows")
    (line,) = (line for line in str(plan).splitlines() if line.startswith(NOTE))
    assert "instead of 162.1 MiB" in line, "if each device gave its part"
    table = 8_000_003 * 61 * 4
    assert sum(c.wire_bytes * c.each for c in plan.collectives) < table / 50


@pytest.mark.parametrize(
    "devices, sizes, table, rows, why",
    [
        (8, (8,), 8_000_003, 256, "collectives more cost what few rows save"),
        (8, (8,), 40_000, 16_384, "a small table is gathered"),
        (8, (2, 4), 8_000_003, 16_384, "replicas have rows of the batch, too"),
        (8, (8,), 8_000_003, 16_381, "the devices do not divide the lookups"),
    ],
)
def test_rows_are_not_asked_for_elsewhere(
    devices: int, sizes: tuple[int, ...], table: int, rows: int, why: str
) -> None:
    state, batch = wide_example(devices, table, rows)
    if "divide" in why:

        def step(state: Any, batch: Any) -> Any:
            return update_rows(state, {k: x[5:] for k, x in batch.items()})

    else:
        step = update_rows
    axis = ("replica", "data")[-len(sizes) :]
    sharded = shardfn.fully_shard(step, cpu_mesh(*sizes), axis=axis)
    assert NOTE not in str(sharded.plan(state, batch)), why


def test_chance_asks_for_a_second_round_in_one_step_of_400() -> None:
    """As `limits.ASKED_SPREAD` says: rows asked of one other are Poisson's."""
    requests = RowRequests(100_000_000, 512, 65_536, "data")
    mean = requests.lookups / requests.devices
    more = sum(
        math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
        for k in range(requests.at_once + 1, 1000)
    )
    assert 1 / 500 < more * requests.devices**2 < 1 / 300


@pytest.mark.parametrize(
    "kind, lookups, rounds",
    [("even", 800, 1), ("one row", 800, 1), ("one owner", 800, 4)],
)
def test_rounds_go_on_until_all_rows_are_served(
    kind: str, lookups: int, rounds: int
) -> None:
    """A row that is looked up often is asked for once."""
    requests = RowRequests(8 * 640, 8, lookups, "data")
    where = jnp.asarray(rows_of(kind, 8 * 640, (8, lookups)))
    assert requests.at_once == 100 + 60
    assert int(requests.routed(where)[-1]) <= rounds
    if kind == "one owner":
        assert int(requests.routed(where)[-1]) > 1


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("h100:64", marks=pytest.mark.aot("h100:64")),
        pytest.param(
            "tpu:v5p:2x2x2",
            marks=[pytest.mark.aot("tpu:v5p:2x2x2"), pytest.mark.exhaustive],
        ),
    ],
)
def test_the_compiler_makes_what_is_planned(target: str) -> None:
    mesh = targets.mesh(target)
    state, batch = wide_example(mesh.size, 8_000_003, 16_384)
    report = shardfn.fully_shard(update_rows, mesh).on(target, state, batch)
    assert NOTE in str(report.plan)
    found = report.verification
    # libtpu all-reduces what it cannot scatter.
    assert {line.status for line in found.lines} <= {"present", "all-reduced"}, found
    assert not found.extra


def test_other_dimensions_are_found_where_rows_are_asked_for() -> None:
    """With features of a row on each device, rows are whole where their numbers are:
    26 numbers and weights of each example are gathered, in place of its rows."""

    def step(state: Any, ids: jax.Array, weights: jax.Array) -> Any:
        def loss_fn(state: Any) -> jax.Array:
            return jnp.mean(state["table"][ids] * weights[:, :, None])

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    state = {"table": jax.ShapeDtypeStruct((2**24, 64), jnp.float32)}
    kinds = jnp.int32, jnp.float32
    batch = [jax.ShapeDtypeStruct((8192, 26), kind) for kind in kinds]
    mesh = targets.mesh("h100:8")
    asked = shardfn.fully_shard(step, mesh).plan(state, *batch)
    assert any(note.startswith(NOTE) for note in asked.notes)
    (advice,) = [n for n in asked.notes if n.startswith("with shard_for=")]
    assert "by other dimensions of 'table'" in advice
    options = {"shard_for": (state, *batch)}
    by_use = shardfn.fully_shard(step, mesh, **options).plan(state, *batch)
    assert by_use.wire_bytes < asked.wire_bytes / 5
