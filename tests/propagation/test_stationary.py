"""In: steps with leaves that stay where they are stored. Out: as the plain step, with
activations moved around the leaves, and no more bytes than that takes.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plan_helpers import assert_steps_alike, cpu_mesh
from tiers import exhaustively

import shardfn
from shardfn._core import limits
from shardfn.testing import assert_same

pytestmark = pytest.mark.standard_promotion

ROWS, D, F, VOCAB, EXPERTS, CAPACITY = 24, 24, 96, 480, 24, 4
FLOAT = 4


def mlp(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def layers(p: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.checkpoint(mlp)(w, x / (1 + jnp.abs(x).mean())), None

    return jax.lax.scan(layer, x, p)[0]


def table(p: Any, ids: jax.Array) -> jax.Array:
    return jnp.tanh(p["table"][ids]) @ p["out"]


def tied(p: Any, ids: jax.Array) -> jax.Array:
    return jnp.tanh(p["table"][ids]) @ p["table"].T


def experts(p: Any, x: jax.Array) -> jax.Array:
    """One expert for each token, and so many tokens for each, as in GShard."""
    gates = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
    place = (jnp.cumsum(chosen, 1) * chosen - 1).max(-1).astype(jnp.int32)
    sent = chosen[..., None] * jax.nn.one_hot(place, CAPACITY)[:, :, None]
    taken = jnp.einsum("gtec,gtd->egcd", sent, x)
    made = jnp.einsum("egcf,efd->egcd", jnp.tanh(taken @ p["up"][:, None]), p["down"])
    weights = sent * gates.max(-1)[..., None, None]
    return jnp.einsum("gtec,egcd->gtd", weights, made)


def images(p: Any, x: jax.Array) -> jax.Array:
    numbers = "NHWC", "HWIO", "NHWC"
    rows = jax.lax.conv_general_dilated(
        x, p["conv"], (1, 1), "SAME", dimension_numbers=numbers
    )
    return jnp.tanh(rows).reshape(len(x), -1) @ p["dense"]


MLP = {"up": (D, F), "bias": (F,), "down": (F, D)}
COLUMNS = {"*up": {"data": 1}}
CASES: dict[str, tuple[Callable[..., Any], Mapping[str, Any], Any, Any]] = {
    "rows": (mlp, MLP, (ROWS, D), None),
    "columns": (mlp, MLP, (ROWS, D), COLUMNS),
    "scan": (
        layers,
        {k: (2, *v) for k, v in MLP.items()},
        (ROWS, D),
        {"*up": {"data": 2}},
    ),
    "rows of a table": (table, {"table": (VOCAB, D), "out": (D, 2)}, (ROWS, 3), None),
    "columns of a table": (
        table,
        {"table": (VOCAB, D), "out": (D, 2)},
        (ROWS, 3),
        {"*table": {"data": -1}},
    ),
    "images": (
        images,
        {"conv": (3, 3, 4, 16), "dense": (5 * 6 * 16, 240)},
        (ROWS, 5, 6, 4),
        None,
    ),
    "tied": (tied, {"table": (VOCAB, D)}, (ROWS,), None),
    "experts": (
        experts,
        {"router": (D, EXPERTS), "up": (EXPERTS, D, F), "down": (EXPERTS, F, D)},
        (ROWS, 5, D),
        {"*up": {"data": 0}, "*down": {"data": 0}},
    ),
}


def make_case(name: str) -> tuple[Callable[..., Any], Any, dict[str, Any], Any]:
    fn, shapes, inputs, shard = CASES[name]
    rng = np.random.default_rng(0)
    params = {
        k: jnp.asarray(rng.normal(size=s) / np.sqrt(s[-2:][0]), jnp.float32)
        for k, s in shapes.items()
    }
    tx = optax.sgd(0.1, momentum=0.9)  # smooth: rounding decides no sign

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return (fn(params, batch["x"]) ** 2 * batch["weight"]).mean()

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    ids = "table" in params
    x = rng.integers(0, VOCAB, inputs) if ids else rng.normal(size=inputs)
    out = jax.eval_shape(fn, params, x)
    batch = {
        "x": jnp.asarray(x, jnp.int32 if ids else jnp.float32),
        "weight": jnp.asarray(rng.normal(size=out.shape), jnp.float32),
    }
    return train_step, (params, tx.init(params)), batch, shard


@pytest.mark.parametrize(
    "devices, name",
    [
        *itertools.product([(3,), (2, 4)], CASES),
        *(((8,), x) if x == "rows" else exhaustively((8,), x) for x in CASES),
    ],
    ids=str,
)
def test_the_leaves_stay(name: str, devices: tuple[int, ...]) -> None:
    train_step, plain, batch, shard = make_case(name)
    mesh = cpu_mesh(*devices)
    step = shardfn.fully_shard(
        train_step,
        mesh,
        axis=mesh.axis_names,
        min_size=D,
        stationary=True,
        shard=shard and {k: {mesh.axis_names[-1]: v["data"]} for k, v in shard.items()},
    )
    state = assert_steps_alike(train_step, step, plain, batch)
    plan = step.plan(state, batch)
    # What moves has rows of the batch, is a norm's sum, or a gradient over replicas.
    last = mesh.axis_names[-1]
    moved = [c for c in plan.collectives if c.axis == last and c.elements > 1]
    # Else several such are one, or a window's rows are what three devices split.
    moved = [c for c in moved if not c.parts and "conv" not in c.path]
    assert all(ROWS in c.shape for c in moved if c.phase != "backward" or not c.path)


def sends(name: str, **options: Any) -> shardfn.Plan:
    train_step, state, batch, shard = make_case(name)
    step = shardfn.fully_shard(
        train_step, cpu_mesh(8), min_size=D, shard=shard, **options
    )
    return step.plan(state, batch)


def test_an_mlp_of_columns_and_rows_moves_what_its_batch_takes() -> None:
    """The input is gathered once for both passes, and the gradient of the result; the
    result is reduce-scattered, each of them once."""
    plan = sends("columns", stationary=True)
    large = [c for c in plan.collectives if len(c.shape) == 2]
    assert sorted((c.op, c.phase, c.shape) for c in large) == [
        ("all_gather", "backward", (ROWS, D)),
        ("all_gather", "forward", (ROWS, D)),
        ("psum_scatter", "forward", (ROWS, D)),
    ]
    part = ROWS * D * FLOAT * 7 // 8
    assert sum(c.total_bytes for c in large) == 3 * part


def test_lookups_in_columns_move_ids_and_rows() -> None:
    """Every device reads its columns of all rows, which go home by an all-to-all, and
    their gradients come the same way."""
    plan = sends("columns of a table", stationary=True)
    rows = [c for c in plan.collectives if c.shape == (ROWS, 3, D)]
    assert {c.op for c in rows} <= {"all_to_all"}
    assert all(c.total_bytes == ROWS * 3 * D * FLOAT // 8 * 7 // 8 for c in rows)
    (ids,) = (c for c in plan.collectives if c.dtype == "int32")
    assert (ids.op, ids.total_bytes) == ("all_gather", ROWS * 3 * FLOAT * 7 // 8)


@pytest.mark.parametrize("stationary", [{"*dense": True, "*conv": False}, "auto"])
def test_other_leaves_move_as_they_did(
    stationary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes from a convolution to a leaf that stays, and its gradient, is exchanged
    on the way; the moments of the convolution do not stay with it."""
    for limit in ("BYTES", "SHARE"):
        at = f"shardfn._lowering.choose_stationary.STATIONARY_{limit}"
        monkeypatch.setattr(at, 0)
    plan = sends("images", stationary=stationary)
    gathered = sends("images", stationary=False)
    moved = [c for c in plan.collectives if c.shape[:1] == (ROWS,) or c.parts]
    assert {c.shape for c in moved if c.op == "all_to_all"} == {(ROWS, 480)}
    assert not [c for c in plan.collectives if len(c.shape) == 4 and not c.path]
    of_conv = [[c for c in p.collectives if "conv" in c.path] for p in (plan, gathered)]
    assert of_conv[0] == of_conv[1]


@pytest.mark.parametrize("fill", [None, 0, 0.5])
def test_lookups_out_of_bounds_stay(fill: float | None) -> None:
    """What lies outside is filled by one device, as by `jnp.take` and `nn.Embed`."""

    def train_step(p: Any, ids: jax.Array) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            rows = p["table"].at[ids].get(mode="fill", fill_value=fill)
            return jnp.nansum(rows**2)

        loss, grads = jax.value_and_grad(loss_fn)(p)
        return {"table": p["table"] - 0.1 * grads["table"]}, loss

    rng = np.random.default_rng(0)
    plain = {"table": jnp.asarray(rng.normal(size=(VOCAB, D)), jnp.float32)}
    ids = jnp.asarray(rng.integers(-2 * VOCAB, 2 * VOCAB, ROWS), jnp.int32)
    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=D, stationary=True)
    state, loss = step(step.shard(plain), ids)
    expected, plain_loss = jax.jit(train_step)(plain, ids)
    assert_same(plain_loss, loss, "loss", tol=1e-4)
    assert_same(expected, step.unshard(state), "state", tol=1e-4)
    moves = step.plan(state, ids).collectives
    assert not [c for c in moves if VOCAB in c.shape]


def test_counts_of_what_is_looked_up_are_summed_alone() -> None:
    """How often each row of a table is looked up, as lazy Adam divides by, is a number
    per row; what is summed over devices is one per lookup."""

    def train_step(p: Any, ids: jax.Array) -> Any:
        count = jnp.zeros(VOCAB).at[ids].add(0.5)[ids]
        table = p["table"].at[ids].add(-p["table"][ids] / count[:, None])
        return {"table": table}, count

    rng = np.random.default_rng(0)
    plain = {"table": jnp.asarray(rng.normal(size=(VOCAB, D)), jnp.float32)}
    ids = jnp.asarray(rng.integers(0, VOCAB // 30, ROWS), jnp.int32)
    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=D, stationary=True)
    state, count = step(step.shard(plain), ids)
    expected, plain_count = jax.jit(train_step)(plain, ids)
    assert_same(plain_count, count, "count", tol=0)
    assert_same(expected, step.unshard(state), "state", tol=1e-4)
    moves = step.plan(state, ids).collectives
    assert not [c for c in moves if VOCAB in c.shape]


def test_terms_go_to_the_rows_of_the_batch() -> None:
    """The gradient of what a leaf meets goes to rows, not to the dimension of a scale
    that it meets next and that is gathered."""

    def train_step(p: Any, x: jax.Array) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            rows = x @ p["first"]
            return ((rows + mlp(p, rows * p["scale"])) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss

    rng = np.random.default_rng(0)
    shapes = MLP | {"first": (D, D), "scale": (D,)}
    plain = {
        k: jnp.asarray(0.1 * rng.normal(size=s), jnp.float32) for k, s in shapes.items()
    }
    x = jnp.asarray(rng.normal(size=(ROWS, D)), jnp.float32)
    step = shardfn.fully_shard(
        train_step,
        cpu_mesh(8),
        min_size=D,
        stationary={"up": True, "bias": True, "down": True, "*": False},
        shard=COLUMNS,
    )
    state, loss = step(step.shard(plain), x)
    expected, plain_loss = jax.jit(train_step)(plain, x)
    assert_same(plain_loss, loss, "loss", tol=1e-4)
    assert_same(expected, step.unshard(state), "state", tol=1e-4)
    assert "all_to_all" not in {c.op for c in step.plan(state, x).collectives}


@pytest.mark.parametrize("width", [D, 8])
def test_what_a_broadcast_repeats_moves(width: int) -> None:
    """Rows stay where they are looked up, and the weights that they are multiplied with
    come to them before they are repeated along the features: once, also where each
    device has one column, and to exchange the gradient's rows would send as much."""

    def train_step(p: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            return (p["table"][batch["x"]] * batch["weight"][..., None]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(p)
        return jax.tree.map(lambda w, g: w - g, p, grads), loss

    rng = np.random.default_rng(0)
    plain = {"table": jnp.asarray(rng.normal(size=(VOCAB, width)), jnp.float32)}
    ids = rng.integers(0, VOCAB, (ROWS, 3))
    batch = {
        "x": jnp.asarray(ids, jnp.int32),
        "weight": jnp.asarray(rng.normal(size=(ROWS, 3)), jnp.float32),
    }
    step = shardfn.fully_shard(
        train_step,
        cpu_mesh(8),
        min_size=D,
        stationary=True,
        shard={"table": {"data": 1}},
    )
    state, loss = step(step.shard(plain), batch)
    moves = step.plan(state, batch).collectives
    expected, plain_loss = jax.jit(train_step)(plain, batch)
    assert_same(plain_loss, loss, "loss", tol=1e-4)
    assert_same(expected, step.unshard(state), "state", tol=1e-4)
    assert all(c.elements <= ROWS * 3 for c in moves)
    assert sum(c.total_bytes for c in moves) <= 2 * ROWS * 3 * FLOAT * 7 // 8 + 7


def decode(p: Any, cache: Any, x: jax.Array, at: jax.Array) -> Any:
    """One token of two layers, of four heads of eight."""

    def layer(x: jax.Array, slices: Any) -> Any:
        w, keys, values = slices
        h = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1) * w["scale"]
        q, k, v = (jnp.einsum("bd,dhk->bhk", h, w[n]) for n in ("q", "k", "v"))
        keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, at, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v[:, None], (0, at, 0, 0))
        shares = jax.nn.softmax(jnp.einsum("bhk,bshk->bhs", q, keys))
        x = x + jnp.einsum("bhs,bshk,hkd->bd", shares, values, w["o"])
        return x + mlp(w, x), (keys, values)

    x, (keys, values) = jax.lax.scan(layer, x, (p, cache["k"], cache["v"]))
    return {"k": keys, "v": values}, x


@pytest.mark.covering(2)
@pytest.mark.parametrize("devices", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize(
    "columns, by, most", [(True, "heads", 2), (True, "rows", 4), (False, "rows", 4)]
)
def test_few_collectives_are_sent(
    devices: tuple[int, ...], columns: bool, by: str, most: int
) -> None:
    """A layer takes as many as Megatron's, two all-reduces, and those between heads and
    the cache's rows: q, k and v are exchanged together. The scales of all layers are
    gathered at once."""
    rng, heads = np.random.default_rng(0), 8
    shapes = {n: (2, D, heads, 4) for n in ("q", "k", "v")}
    shapes |= {"o": (2, heads, 4, D), "up": (2, D, F), "bias": (2, F)}
    shapes |= {"down": (2, F, D), "scale": (2, D)}
    p = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    cache = {n: jnp.zeros((2, ROWS, 5, heads, 4)) for n in ("k", "v")}
    x = jnp.asarray(rng.normal(size=(ROWS, D)), jnp.float32)
    mesh = cpu_mesh(*devices)
    last, rows = mesh.axis_names[-1], jax.sharding.PartitionSpec(mesh.axis_names)
    split = jax.sharding.PartitionSpec(None, *rows)
    if by == "heads":
        split = jax.sharding.PartitionSpec(None, mesh.axis_names[:-1], None, last)
    dims = {"q": 2, "k": 2, "v": 2, "o": 1, "up": 2, "bias": 1, "down": 1}
    step = shardfn.fully_shard(
        decode,
        mesh,
        axis=mesh.axis_names,
        min_size=D,
        stationary=True if not columns else {"scale": False, "*": True},
        shard={n: {last: dim} for n, dim in dims.items()} if columns else None,
        state_argnums=0,
        donate=False,
        batch_spec=(split, rows, None),
    )
    args = step.shard(p), cache, x, jnp.asarray(3)
    plan = step.plan(*args)
    assert plan.verify(step.lower(*args).compile()).ok
    made = step(*args)
    assert_same(jax.jit(decode)(p, cache, x, args[-1]), made, "decoded", tol=1e-4)
    each = [c.op for c in plan.collectives if c.times == 2]
    assert len(each) == most and each.count("all_reduce") == 2
    assert any("limits.LATENCY_BYTES" in note for note in plan.notes)
    scales = [c for c in plan.collectives if c.shape == (2, D)]
    assert [(c.op, c.times) for c in scales] == [("all_gather", 1)] * columns
    for joined in [c for c in plan.collectives if c.parts][:1]:
        assert "limits.JOINED_BYTES" in plan.explain(joined.place.split()[0])


def test_experts_are_in_no_collective() -> None:
    plan = sends("experts", stationary={"*up": True, "*down": True, "*": False})
    tokens = [c for c in plan.collectives if len(c.shape) > 3]
    assert {c.op for c in tokens} == {"all_to_all"}
    assert len(tokens) == 3


@pytest.mark.parametrize("prefetch", [0, exhaustively(1), "first"])
def test_what_sends_less_is_chosen(prefetch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step's bytes decide, with the least that is worth it named. What would
    be gathered ahead was not tried as staying."""
    for name, limit in (("BYTES", 0), ("SHARE", 0), ("PART", 1)):
        at = f"shardfn._lowering.choose_stationary.STATIONARY_{name}"
        monkeypatch.setattr(at, limit)
    monkeypatch.setattr("shardfn._core.sent_bytes.LATENCY_BYTES", 0)
    for name in CASES:
        gathered, stays, chosen = (
            sum(
                c.total_bytes
                for c in sends(name, stationary=s, prefetch=prefetch).collectives
            )
            for s in (False, True, "auto")
        )
        assert chosen <= min(gathered, stays), name


@pytest.mark.parametrize("between", [True, False])
def test_two_leaves_are_tried_together(
    between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is between the two of an MLP stays, too, and is larger than either; if it
    goes elsewhere, neither is tried."""
    for name in ("BYTES", "SHARE"):
        at = f"shardfn._lowering.choose_stationary.STATIONARY_{name}"
        monkeypatch.setattr(at, 0)
    monkeypatch.setattr("shardfn._core.sent_bytes.LATENCY_BYTES", 0)

    def train_step(p: Any, x: jax.Array) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            hidden = jnp.tanh(x @ p["up"])
            hidden = hidden if between else jnp.cumsum(hidden, 1)
            return ((hidden @ p["down"]) ** 2).sum()

        loss, grads = jax.value_and_grad(loss_fn)(p)
        return jax.tree.map(lambda w, g: w - 0.01 * g, p, grads), loss

    rows, width, inner = 96, 16, 256
    rng = np.random.default_rng(0)
    shapes = {"up": (width, inner), "down": (inner, width)}
    plain = {
        k: jnp.asarray(rng.normal(size=s) / 9, jnp.float32) for k, s in shapes.items()
    }
    x = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)
    dims = {"up": {"data": 1}, "down": {"data": 0}}
    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=D, shard=dims)
    state = step.shard(plain)
    plan = step.plan(state, x)
    assert any(n.startswith("stationary, so") for n in plan.notes) == between
    expected, plain_loss = jax.jit(train_step)(plain, x)
    state, loss = step(state, x)
    assert_same(plain_loss, loss, "loss", tol=1e-4)
    assert_same(expected, step.unshard(state), "state", tol=1e-4)
    assert all(c.elements <= rows * width for c in plan.collectives) or not between


def test_little_is_not_worth_it() -> None:
    plan = sends("columns", stationary="auto")
    assert sends("columns", stationary=False).collectives == plan.collectives
    why = plan.explain("0/up")
    assert "; not stationary: " in why
    assert "saves less than 256.0 KiB (limits.STATIONARY_BYTES)" in why


def test_collectives_have_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("BYTES", "SHARE"):
        at = f"shardfn._lowering.choose_stationary.STATIONARY_{limit}"
        monkeypatch.setattr(at, 0)
    monkeypatch.setattr("shardfn._core.sent_bytes.LATENCY_BYTES", 2**30)
    plan = sends("tied", stationary="auto")
    why = plan.explain("0/table")
    assert "; not stationary: " in why
    assert "a collective counts as 256.0 KiB (limits.LATENCY_BYTES)" in why


def test_plans_say_what_stays() -> None:
    wide = limits.STATIONARY_BYTES // FLOAT // 8

    def evaluate(params: Any, x: jax.Array) -> Any:
        return params, jnp.tanh(x @ params["up"]).mean()

    step = shardfn.fully_shard(evaluate, cpu_mesh(8))
    shapes = {"up": jax.ShapeDtypeStruct((16, wide), jnp.float32)}
    plan = step.plan(shapes, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert any(
        "stationary, so that what meets them moves: 'up': " in n for n in plan.notes
    )
    assert "; stationary: " in plan.explain("up")
    asked = shardfn.fully_shard(evaluate, cpu_mesh(8), stationary=True)
    plan = asked.plan(shapes, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert "; stationary: asked for" in plan.explain("up")


def test_leaves_do_not_stay_at_the_cost_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backward pass has the whole batch of each of sixteen layers; of weights only
    those of one layer are gathered at once."""

    def train_step(layers: Any, x: jax.Array) -> Any:
        def loss_fn(layers: Any) -> jax.Array:
            rows = x
            for p in layers:
                rows = jnp.tanh(mlp(p, rows))
            return rows.sum()

        loss, grads = jax.value_and_grad(loss_fn)(layers)
        return jax.tree.map(lambda w, g: w - g, layers, grads), loss

    struct = jax.ShapeDtypeStruct
    layer = {"up": (128, 512), "bias": (512,), "down": (512, 128)}
    layers = [{k: struct(s, jnp.float32) for k, s in layer.items()}] * 16
    step = shardfn.fully_shard(
        train_step, cpu_mesh(8), shard={"*up": {"data": 1}, "*down": {"data": 0}}
    )
    args = layers, struct((64, 128), jnp.float32)
    assert "; stationary: " in step.plan(*args).explain("0/up")
    monkeypatch.setattr("shardfn._lowering.choose_stationary.STATIONARY_LIVE", 0)
    step = shardfn.fully_shard(
        train_step, cpu_mesh(8), shard={"*up": {"data": 1}, "*down": {"data": 0}}
    )
    plan = step.plan(*args)
    assert "; not stationary: " in (why := plan.explain("0/up"))
    assert "more than 0 B (limits.STATIONARY_LIVE)" in why
    assert any("not stationary, for memory: " in note for note in plan.notes)


def test_what_memory_decided_beside_leaves_that_stay_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head stays, as it is gathered at more cost of memory; the layers would send
    less, and are said not to stay for that."""

    def train_step(state: Any, x: jax.Array) -> Any:
        def loss_fn(state: Any) -> jax.Array:
            rows = x
            for p in state["layers"]:
                rows = jnp.tanh(mlp(p, rows))
            return jnp.tanh(rows[:8] @ state["head"]).sum()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - g, state, grads), loss

    struct = jax.ShapeDtypeStruct
    layer = {"up": (128, 128), "bias": (128,), "down": (128, 128)}
    layers = [{k: struct(s, jnp.float32) for k, s in layer.items()}] * 16
    args = {"head": struct((128, 2048), jnp.float32), "layers": layers}
    columns = {"*up": {"data": 1}, "*down": {"data": 0}, "head": {"data": 1}}

    def explained(leaf: str) -> str:
        step = shardfn.fully_shard(train_step, cpu_mesh(8), shard=columns)
        return step.plan(args, struct((128, 128), jnp.float32)).explain(leaf)

    assert "; stationary: " in explained("head")
    assert "; stationary: " in explained("layers/0/up")
    monkeypatch.setattr("shardfn._lowering.choose_stationary.STATIONARY_LIVE", -(2**18))
    assert "; stationary: " in explained("head")
    assert "; not stationary: if it stayed, too, less would be sent, but " in explained(
        "layers/0/up"
    )


def test_leaves_that_are_padded_or_flattened_do_not_stay() -> None:
    """Which `explain` says; others do, and are in no move."""
    shapes = {"padded": (16, 1003), "flat": (7, 9, 5), "even": (16, 1024)}
    p = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}

    def evaluate(p: Any, x: jax.Array) -> Any:
        made = [jnp.tensordot(x[:, : w.shape[0]], w, 1) for w in p.values()]
        return p, sum(jnp.tanh(y).sum() for y in made)

    step = shardfn.fully_shard(
        evaluate,
        cpu_mesh(8),
        min_size=2,
        stationary=True,
        shard={"padded": {"data": 1}, "even": {"data": 1}},
    )
    plan = step.plan(p, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    why = "; not stationary: it is stored padded or flattened, and of such leaves only"
    assert [why in plan.explain(k) for k in shapes] == [True, True, False]
    even = shardfn.fully_shard(evaluate, cpu_mesh(8), stationary=True)
    plan = even.plan({"w": p["even"]}, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert "M = 0 B: no parameter is gathered, so bytes are not counted" in str(plan)


@pytest.mark.parametrize(
    "dim, why",
    [
        (2, "dimension 2 of state leaf 'up' over 8 devices, which it does not have"),
        (-3, "dimension -3 of state leaf 'up' over 8 devices, which it does not have"),
        (0, "and padding its 12 elements to 16 is more than 1%"),
    ],
)
def test_a_dimension_that_cannot_be_split(dim: int, why: str) -> None:
    step = shardfn.fully_shard(
        lambda state, x: (state, x.sum()),
        cpu_mesh(8),
        min_size=2,
        shard={"up": {"data": dim}},
    )
    with pytest.raises(shardfn.ShardingError) as error:
        step.shard({"up": jnp.ones((12, 16))})
    assert why in str(error.value)
    assert "Name another dimension, or the mesh axis alone" in str(error.value)


def accumulated(train: Callable[..., Any]) -> Callable[..., Any]:
    """Two microbatches, whose gradients a scan adds up."""

    def train_step(state: Any, batch: Any) -> Any:
        def body(sums: Any, rows: Any) -> Any:
            loss, grads = jax.value_and_grad(train)(state, rows)
            return jax.tree.map(jnp.add, sums, grads), loss

        rows = batch.reshape(2, -1, D)
        grads, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, state), rows)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), losses.sum()

    return train_step


@pytest.mark.parametrize("options", [{}, {"accumulate": "defer"}], ids=str)
def test_gradients_that_a_loop_adds_up_stay(options: Any) -> None:
    """What a loop adds up is where the leaf is: nothing of its shape moves after it."""
    rng = np.random.default_rng(0)
    plain = {
        k: jnp.asarray(0.1 * rng.normal(size=s), jnp.float32) for k, s in MLP.items()
    }
    x = jnp.asarray(rng.normal(size=(48, D)), jnp.float32)
    train_step = accumulated(lambda w, x: (mlp(w, x) ** 2).mean())
    step = shardfn.fully_shard(
        train_step, cpu_mesh(8), min_size=D, stationary=True, shard=COLUMNS, **options
    )
    state = assert_steps_alike(train_step, step, plain, x)
    shapes = {(D, F), (F, D)}
    assert not [c for c in step.plan(state, x).collectives if c.shape in shapes]


def test_an_axis_that_is_left_to_xla_splits_too() -> None:
    """A column-parallel and a row-parallel weight over `model` stay over `data`."""
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axes)
    rng = np.random.default_rng(0)
    plain = {
        "up": jnp.asarray(0.1 * rng.normal(size=(D, F)), jnp.float32),
        "bias": jnp.zeros(F),
        "down": jnp.asarray(0.1 * rng.normal(size=(F, D)), jnp.float32),
    }
    spec = jax.sharding.PartitionSpec
    specs = {"up": spec(None, "model"), "bias": spec(), "down": spec("model")}
    x = jnp.asarray(rng.normal(size=(ROWS, D)), jnp.float32)

    def train_step(w: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda w: (mlp(w, x) ** 2).mean())(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), loss

    step = shardfn.fully_shard(train_step, mesh, min_size=D, stationary=True)
    state = step.shard(
        jax.tree.map(
            lambda w, s: jax.device_put(w, jax.sharding.NamedSharding(mesh, s)),
            plain,
            specs,
        )
    )
    state = assert_steps_alike(train_step, step, plain, x, state)
    moves = step.plan(state, x).collectives
    gathered = {c.path for c in moves if c.op == "all_gather"}
    assert not gathered & {"up", "down"}


@pytest.mark.parametrize("asked", ["none", "all", "other", "own"])
@pytest.mark.parametrize("name", ["down", "up"])
def test_sums_behind_a_leaf_are_made_in_its_reduce_dtype(name: str, asked: str) -> None:
    """(256 + 1) + (-256 + 0) is 1, and 0 if a term is rounded before the sum: of what a
    leaf makes if it is split along what it contracts, and of its input's gradient."""
    wide, dtypes = asked in ("all", "own"), {"other": "other", "own": name, "all": "*"}
    dtype = "float32" if asked != "none" else None

    def apply(p: Any, x: jax.Array) -> jax.Array:
        if name == "down":
            return x @ p[name]
        value = lambda y: (y @ p[name] * x).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(value)(jnp.zeros((2, 2), jnp.bfloat16))

    terms = jnp.asarray([256, 1, -256, 0], jnp.bfloat16)[:, None]
    down = jnp.concatenate([terms, terms], 1)
    p = {name: down if name == "down" else down.T, "other": jnp.ones((2, 2))}
    x = jnp.ones((2, 4), jnp.bfloat16)
    step = shardfn.fully_shard(
        lambda p, x: (p, apply(p, x)),
        cpu_mesh(2),
        min_size=2,
        stationary=True,
        shard={name: {"data": 0 if name == "down" else 1}},
        reduce_dtype={dtypes.get(asked, "*"): dtype},
    )
    state = step.shard(p)
    moves = step.plan(state, x).collectives
    summed = {c.dtype for c in moves if c.op == "psum_scatter"}
    assert summed == {"float32" if wide else "bfloat16"}
    exact = {"xla_allow_excess_precision": False}
    made = step.lower(state, x).compile(exact)(jax.tree.leaves(state), (x,))
    assert set(np.array(made[-1], np.float32).ravel()) == {float(wide)}
