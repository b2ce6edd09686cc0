"""In: steps whose parameters are gathered, or gradients summed, in eight bits. Out: to
the last bit what a step does that rounds by itself, in whatever way values move; the
bytes and scales of the plan, and the compiled program as it says.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilers import aot
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from layered import ROWS, STATE, UNROLLED, train
from plan_helpers import cpu_mesh, run, shard_fn, walk

import shardfn
from shardfn._core import compat
from shardfn._core.barrier import barrier_p
from shardfn.analysis import targets

BLOCK = 4
LARGE = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
EXACT = {"xla_allow_excess_precision": False}


def rounded(x: Any, dim: int, block: int = BLOCK, dtype: str = "int8") -> Any:
    """`x` as it is read behind the wire; written again, apart from the library."""
    rows = jnp.moveaxis(jnp.asarray(x, jnp.float32), dim, -1)
    blocks = rows.reshape(*rows.shape[:-1], -1, block)
    scale = jnp.abs(blocks).max(-1, keepdims=True) / LARGE[dtype]
    scale = scale.astype(jnp.bfloat16).astype(jnp.float32)
    parts = jnp.where(scale > 0, blocks / scale, 0)
    parts = jnp.clip(
        jnp.round(parts) if dtype == "int8" else parts, -LARGE[dtype], LARGE[dtype]
    )
    back = (parts.astype(dtype).astype(jnp.float32) * scale).reshape(rows.shape)
    return jnp.moveaxis(back, -1, dim).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def straight_through(x: Any, dim: int, dtype: str) -> Any:
    return rounded(x, dim, dtype=dtype)


@straight_through.defjvp
def _identity(dim: int, dtype: str, primals: Any, tangents: Any) -> Any:
    return rounded(*primals, dim, dtype=dtype), tangents[0]


def mlp(weights: Any) -> Any:
    """A step of two layers, whose weights go through `weights` before they are used.

    Its rate is a power of two: a sum may be taken of gradients that it has scaled.
    """

    def loss_fn(state, x):
        h = jnp.tanh(x @ weights(state["a"]))
        return ((h @ weights(state["b"])) ** 2).mean()

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(lambda w, g: w - 0.125 * g, state, grads), loss

    return step


SHAPES = {"a": (16, 32), "b": (32, 8)}
NAMED = {"a": "int8", "b": "int8"}


def named(dtype: Any, names: Any = SHAPES) -> dict[str, Any]:
    """Leaves that are small are named one by one."""
    return dict.fromkeys(names, dtype)


def wire(plan: shardfn.Plan, op: str) -> dict[str, str]:
    return {
        c.path: f"{c.dtype}/{c.block}"
        for c in plan.collectives
        if c.op == op and c.path
    }


@pytest.mark.parametrize("dtype", LARGE)
def test_gathers_round_as_a_step_that_rounds(dtype: str) -> None:
    """And the gradient is that of the rounded weight, of which the exact one is the
    update's start."""
    options = dict(gather_dtype=named(dtype), quantize_block=BLOCK)
    case = shard_fn(mlp(lambda w: w), cpu_mesh(4), SHAPES, (8, 16), **options)
    by_hand = mlp(lambda w: straight_through(w, 1, dtype))
    plain = shard_fn(by_hand, cpu_mesh(4), SHAPES, (8, 16))
    assert wire(case.plan, "all_gather") == {n: f"{dtype}/{BLOCK}" for n in SHAPES}
    for ours, theirs in zip(run(case, 3), run(plain, 3), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert not np.array_equal(
        run(case, 1)[0][1],
        run(shard_fn(mlp(lambda w: w), cpu_mesh(4), SHAPES, (8, 16)), 1)[0][1],
    )


def summed(w: Any, dim: int, dtype: str) -> Any:
    """The reduce-scattered sum of terms that are rounded in parts, on each device.

    A product makes these gradients transposed, so blocks lie along the first dimension.
    """
    parts = jnp.stack(jnp.split(w, 4, axis=dim))
    parts = rounded(parts, 1, dtype=dtype)
    return lax.all_to_all(parts, "data", 0, 0, tiled=True).sum(0)


@pytest.mark.parametrize("dtype", LARGE)
def test_sums_round_each_term_once(dtype: str) -> None:
    options = dict(reduce_dtype=named(dtype), quantize_block=BLOCK)
    case = shard_fn(mlp(lambda w: w), cpu_mesh(4), SHAPES, (8, 16), **options)
    assert wire(case.plan, "all_to_all") == {n: f"{dtype}/{BLOCK}" for n in SHAPES}
    rng = np.random.default_rng(0)
    state = {
        k: rng.standard_normal(s).astype(np.float32) / 4 for k, s in SHAPES.items()
    }
    x = rng.standard_normal((8, 16)).astype(np.float32)

    specs = {k: each.spec for k, each in case.step.shardings(state).items()}
    dims = {k: tuple(spec).index("data") for k, spec in specs.items()}

    def by_hand(state, x):
        def loss_fn(state):
            h = jnp.tanh(x @ state["a"])
            return ((h @ state["b"]) ** 2).sum() / (8 * 8)

        grads = jax.grad(loss_fn)(state)
        return {name: summed(g, dims[name], dtype) for name, g in grads.items()}

    over = jax.shard_map(
        by_hand,
        mesh=jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), P("data")),
        out_specs=specs,
        check_vma=False,
    )
    expected = jax.tree.map(lambda w, g: w - 0.125 * g, state, jax.jit(over)(state, x))
    new, _ = case.step(case.step.shard(state), x)
    for name in SHAPES:
        np.testing.assert_array_equal(new[name], expected[name])


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "kept": ("unrolled", {"reshard_after_forward": False}),
    "within groups": ("scan_remat", {"reshard_after_forward": 2}),
    "ahead": ("scan_remat", {"prefetch": 1}),
    "together": ("scan_remat", {"bucket_bytes": 2**20}),
    "ahead and together": ("unrolled", {"prefetch": 1, "bucket_bytes": 2**20}),
}


def quantized(kind: str, **options: Any) -> Any:
    """A step with everything quantized."""
    shapes = STATE if "scan" in kind else UNROLLED
    every = named("int8", paths_of(shapes))
    return shard_fn(
        train(kind), cpu_mesh(4), shapes, ROWS, compiler_options=EXACT,
        gather_dtype=every, reduce_dtype=every, quantize_block=BLOCK, **options,
    )  # fmt: skip


@functools.cache
def trained(kind: str, **options: Any) -> Any:
    """Two of its runs, and the dtypes that its leaves move in."""
    case = quantized(kind, **options)
    return run(case), {c.dtype for c in case.plan.collectives if c.path}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_change_no_bit(name: str) -> None:
    """Where, when and with what a quantized value moves is not what it is."""
    kind, options = OPTIONS[name]
    (found, dtypes), (alone, _) = trained(kind, **options), trained(kind)
    assert dtypes == {"int8"}
    for ours, theirs in zip(found, alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


KEPT = {
    "kept": ("scan_remat", {"reshard_after_forward": False}),
    "kept, unrolled": ("unrolled", {"reshard_after_forward": False}),
    "a part": ("scan_remat", {"reshard_after_forward": 2}),
    "carried": ("scan_remat", {"prefetch": 1, "reshard_after_forward": True}),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_stays_in_eight_bits(name: str) -> None:
    """Loops stack and carry elements and scales, no weight that was read."""
    kind, options = KEPT[name]
    (found, _), (alone, _) = trained(kind, **options), trained(kind)
    for ours, theirs in zip(found, alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    case = quantized(kind, **options)
    text = case.plan.explain("layers/up" if "scan" in kind else "layers/1/up")
    assert 16 * 32 + 2 * 16 * 32 // BLOCK == 768
    assert "kept in the eight bits that it moves in: 768 B, and 1.0 KiB" in text
    gathered = {(16, 32), (32, 16), (8, 32), (16, 16), (32, 8)}
    for eqn, *_ in walk(case.jaxpr):
        if eqn.primitive.name == "scan":
            shapes = [v.aval.shape for v in eqn.outvars if v.aval.dtype == jnp.bfloat16]
            assert not gathered & {*shapes, *(shape[1:] for shape in shapes)}


def test_what_is_kept_takes_half_of_the_memory() -> None:
    taken = []
    for dtype in (None, "int8"):
        shapes = {"layers": {"up": (8, 256, 256), "down": (8, 256, 256)}}
        case = shard_fn(
            train("scan_remat"), cpu_mesh(4), shapes | {"head": (256, 8)}, (8, 256),
            gather_dtype=dtype and {"layers/*": dtype}, reshard_after_forward=False,
        )  # fmt: skip
        taken.append(case.compile().memory_analysis().temp_size_in_bytes)
    layers = 2 * 8 * 256 * 256
    assert taken[0] - taken[1] > 0.9 * (layers * 2 - layers * (1 + 2 / 128)), taken


def test_what_is_kept_is_not_differentiated_from_outside() -> None:
    case = quantized("scan_remat", reshard_after_forward=False)
    rng = np.random.default_rng(0)
    state, x = jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype),
        (case.state, case.batch),
    )
    with pytest.raises(shardfn.ShardingError) as caught:
        jax.grad(lambda s: case.step(s, x)[1])(case.step.shard(state))
    message = str(caught.value)
    assert "is differentiated through a parameter that stays in eight bits" in message
    assert "Pass reshard_after_forward=True and prefetch=0" in message


def paths_of(shapes: Any) -> list[str]:
    flat, _ = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]


def test_bytes_and_scales_are_those_of_the_compiled_program() -> None:
    options = dict(gather_dtype="int8", reduce_dtype="int8")
    case = shard_fn(
        mlp(lambda w: w),
        cpu_mesh(4),
        {"a": (512, 256), "b": (256, 512)},
        (8, 512),
        **options,
    )
    checked = case.plan.verify(case.compile())
    assert checked.ok and checked.planned_bytes == checked.wire_bytes
    lines = [c for c in case.plan.collectives if c.path]
    assert {(c.dtype, c.block) for c in lines} == {("int8", 128)}
    for line in lines:
        payload = 512 * 256 * 3 // 4
        assert line.scale_bytes == payload * 2 // 128
        assert line.wire_bytes == payload + line.scale_bytes
    assert "int8/128" in str(case.plan) and ", scales 1.5 KiB" in str(case.plan)
    half = shard_fn(
        mlp(lambda w: w), cpu_mesh(4), {"a": (512, 256), "b": (256, 512)}, (8, 512)
    )
    assert case.plan.parameter_bytes == half.plan.parameter_bytes


def test_scales_that_do_not_move_as_planned_are_seen() -> None:
    """They have a collective of their own on CPUs."""
    options = dict(gather_dtype=named("int8"), quantize_block=BLOCK)
    case = shard_fn(mlp(lambda w: w), cpu_mesh(4), SHAPES, (8, 16), **options)
    text = case.compile().as_text()
    assert case.plan.verify(text).ok and "u16[" in text
    wider = case.plan.verify(text.replace("u16[", "f32["))
    assert {c.line.path for c in wider.lines if c.status == "widened"} == set(SHAPES)
    less = [c.wire_bytes for c in case.plan.verify(text).lines if c.line.block]
    assert less == [c.wire_bytes for c in case.plan.collectives if c.block]


@pytest.mark.parametrize("name", ["", "ahead and together", "within groups"])
def test_each_use_may_read_the_bytes_itself(name: str, monkeypatch) -> None:
    """As GPUs' compiler takes them into its matmuls; not a bit changes."""
    kind, options = OPTIONS.get(name, ("unrolled", {}))
    expected, _ = trained(kind, **options)
    monkeypatch.setattr(compat, "reads_inside_matmuls", lambda platform: True)
    found, _ = trained.__wrapped__(kind, **options)
    for ours, theirs in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_use_reads_bytes_behind_a_barrier_of_its_own(monkeypatch) -> None:
    """Or the compiler would make one of equal reads, for none of the matmuls."""
    options = dict(gather_dtype=named("int8"), quantize_block=BLOCK)

    def reads() -> int:
        case = shard_fn(mlp(lambda w: w), cpu_mesh(4), SHAPES, (8, 16), **options)
        waiting = [e for e, *_ in walk(case.jaxpr) if e.primitive is barrier_p]
        return sum(len(e.invars) == 2 and e.invars[1].aval.dtype == "uint16"
                   for e in waiting)  # fmt: skip

    assert reads() == 0
    monkeypatch.setattr(compat, "reads_inside_matmuls", lambda platform: True)
    assert reads() == 1  # the second weight is used forward and backward


def test_small_leaves_stay_exact_unless_named() -> None:
    def plan(**options):
        return shard_fn(mlp(lambda w: w), cpu_mesh(4), SHAPES, (8, 16), **options).plan

    exact = plan()
    for option in ("gather_dtype", "reduce_dtype"):
        asked = plan(**{option: "int8"})
        assert asked.collectives == exact.collectives
        assert f"and {option} does not name this leaf" in asked.explain("a")
        assert "65536 elements (limits.QUANTIZED_ELEMENTS)" in asked.explain("a")
        some = {option: {"a": "int8", "*": None}, "quantize_block": BLOCK}
        found = plan(**some).collectives
        assert {c.path for c in found if c.dtype == "int8"} == {"a"}


def test_a_block_that_divides_nothing() -> None:
    """A leaf that a pattern takes stays exact; one that is named is refused."""
    large = {"a": (512, 521), "b": (521, 8)}
    plan = shard_fn(
        mlp(lambda w: w),
        cpu_mesh(4),
        large,
        (8, 512),
        gather_dtype="int8",
        quantize_block=400,
    ).plan
    assert {c.dtype for c in plan.collectives if c.path == "a"} == {"float32"}
    assert "no dimension of a shard can be cut" in plan.explain("a")
    with pytest.raises(shardfn.ShardingError) as caught:
        _ = shard_fn(
            mlp(lambda w: w),
            cpu_mesh(4),
            SHAPES,
            (8, 16),
            gather_dtype=named("int8"),
            quantize_block=64,
        ).plan
    message = str(caught.value)
    assert message.startswith(
        "gather_dtype names 'a', which cannot be quantized: no dimension of a shard "
        "can be cut into equal blocks of 64, or down to half of it.\n"
        "  step.plan was called"
    )
    assert "What moves has the shape (16, 32)." in message


def test_flattened_leaves_stay_exact() -> None:
    """Their shards are no blocks of a dimension: the plan says so, and a leaf that is
    named is refused."""

    def loss_fn(state, x):
        return (jnp.einsum("bi,ijk->bjk", x, state["a"]) ** 2).mean()

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(lambda w, g: w - 0.125 * g, state, grads), loss

    def plan(dtype: Any) -> Any:
        options = dict(gather_dtype=dtype, reduce_dtype=dtype, quantize_block=41)
        return shard_fn(step, cpu_mesh(4), {"a": (41, 41, 41)}, (8, 41), **options).plan

    found = plan("int8")
    assert {c.dtype for c in found.collectives if c.path} == {"float32"}
    for option in ("gather_dtype", "reduce_dtype"):
        text = f"exact: {option} quantizes along a dimension, and shards are cut out of"
        assert text in found.explain("a")
    with pytest.raises(shardfn.ShardingError) as caught:
        _ = plan({"a": "int8"})
    message = str(caught.value)
    assert message.startswith(
        "gather_dtype names 'a', which cannot be quantized: blocks lie along a "
        "dimension, and shards of it are cut out of the flattened value.\n"
        "  step.plan was called"
    )
    end = "(41, 41, 41). The devices divide no dimension of that: do not name it."
    assert message.endswith(end) and "quantize_block" not in message


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "optimizer, takes_signs", [("lion", True), ("sgd", False), ("clipped", False)]
)
def test_signs_of_quantized_gradients_are_warned_of(optimizer, takes_signs) -> None:
    make = {
        "lion": optax.lion(1e-3),
        "sgd": optax.sgd(0.1),
        "clipped": optax.chain(optax.clip(1.0), optax.adam(1e-3)),
    }[optimizer]

    def step(state, x):
        params, moments = state
        grads = jax.grad(lambda p: ((x @ p["a"]) ** 2).mean())(params)
        updates, moments = make.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    params = {"a": jnp.zeros((16, 32))}
    state, x = (params, make.init(params)), jnp.zeros((8, 16))
    options = dict(min_size=8, stationary=False, quantize_block=BLOCK)

    def messages(reduce_dtype: Any) -> list[str]:
        sharded = shardfn.fully_shard(
            step, cpu_mesh(4), reduce_dtype=reduce_dtype, **options
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sharded.plan(state, x)
        return [
            str(w.message) for w in caught if w.category is shardfn.InexactSignWarning
        ]

    assert not messages(None)
    found = messages({"0/a": "int8"})
    assert bool(found) == takes_signs
    for message in found:
        assert message.startswith(
            "the update takes the sign of the gradient of '0/a', "
        )
        assert "Keep these sums exact, reduce_dtype={'0/a': None, '*': ...}" in message


def tied(state, x):
    """A table that is looked up, and the head."""
    ids = x.astype(jnp.int32) % 16

    def loss_fn(table):
        h = jnp.tanh(table[ids].mean(axis=1))
        return ((h @ table.T) ** 2).mean()

    loss, grad = jax.value_and_grad(loss_fn)(state["a"])
    return {"a": state["a"] - 0.1 * grad}, loss


@pytest.mark.parametrize(
    "step, shapes, options",
    [
        (tied, {"a": (16, 32)}, {}),
        (train("scan", microbatches=2), STATE, {"accumulate": "scatter"}),
        (train("scan", microbatches=2), STATE, {"accumulate": "defer"}),
        (mlp(lambda w: w), SHAPES, {"shard": {"*": False}}),
    ],
    ids=["tied", "scatter", "defer", "whole"],
)
def test_sums_are_near_the_exact_ones(step, shapes, options) -> None:
    """Of tied tables, over microbatches, and where the state is whole everywhere."""
    paths = paths_of(shapes)
    asked = dict(reduce_dtype=named("int8", paths), quantize_block=BLOCK)
    rows = (8, 16) if shapes is not STATE else ROWS
    case, exact = (
        shard_fn(step, cpu_mesh(4), shapes, rows, **options, **each)
        for each in (asked, {})
    )
    found = {c.dtype for c in case.plan.collectives if c.path and c.phase != "forward"}
    assert "int8" in found and found <= {"int8", "bfloat16", "float32"}
    sums = [c for c in case.plan.collectives if c.path and c.op == "psum_scatter"]
    assert not sums
    (ours, _), (theirs, _) = run(case, 1)[0], run(exact, 1)[0]
    (after, _) = run(exact, 2)[1]
    for a, b, later in zip(*map(jax.tree.leaves, (ours, theirs, after)), strict=True):
        moved = np.abs(np.asarray(b) - later).max()
        assert 0 < np.abs(np.asarray(a) - b).max() <= moved / 20


HYBRID = dict(axis=("replica", "data"), quantize_block=BLOCK)


def test_one_axis_of_a_hybrid_mesh_is_quantized() -> None:
    """Inside a host exact, between hosts int8: the shard's sum is exchanged and
    gathered."""
    by_axis = named({"replica": "int8"})
    case, exact = (
        shard_fn(mlp(lambda w: w), cpu_mesh(2, 4), SHAPES, (8, 16), **HYBRID, **options)
        for options in (dict(reduce_dtype=by_axis), {})
    )
    lines = [c for c in case.plan.collectives if c.path and c.phase == "backward"]
    found = {
        (c.op, c.axis, c.dtype)
        for c in lines
        if c.op != "all_gather" or c.axis == "replica"
    }
    assert found == {
        ("psum_scatter", "data", "float32"),
        ("all_to_all", "replica", "int8"),
        ("all_gather", "replica", "int8"),
    }
    assert case.plan.verify(case.compile()).ok
    (ours, _), (theirs, _) = run(case, 1)[0], run(exact, 1)[0]
    for name in SHAPES:
        apart = np.abs(np.asarray(ours[name]) - theirs[name]).max()
        assert 0 < apart < 2e-3
    assert "reduce_dtype: {'replica': 'int8'} for a" in str(case.plan)


def test_mesh_axes_without_a_path() -> None:
    """For all leaves; what could be the name of a leaf, too, is refused."""

    def asked(dtype: Any, shapes: Any = SHAPES) -> Any:
        step = mlp(lambda w: w)
        if shapes is not SHAPES:
            step = lambda state, x: (state, (x @ state["replica"]).mean())  # noqa: E731
        options = HYBRID | {"reduce_dtype": dtype}
        return shard_fn(step, cpu_mesh(2, 4), shapes, (8, 16), **options)

    short, long = asked({"replica": "int8"}), asked({"*": {"replica": "int8"}})
    assert short.plan == long.plan
    assert asked({"a": "int8", "*": None}).plan != long.plan, "a leaf"
    with pytest.raises(shardfn.ShardingError) as caught:
        _ = asked({"replica": "int8"}, {"replica": (16, 8)}).plan
    message = str(caught.value)
    assert message.startswith(
        "reduce_dtype names 'replica', which is a mesh axis and a leaf, or subtree, of "
        "the state.\n  <lambda>.plan was called"
    )
    assert "Write {'*': {'replica': 'int8'}} for the mesh axis, or {'" in message
    _ = asked({"replica": "bfloat16"}, {"replica": (16, 8)}).plan, "no mesh axis's"


def test_gradients_outside_do_not_see_the_quantizer() -> None:
    """A function that is differentiated from outside has the derivative of its exact
    moves."""
    names = {"w": "int8"}

    def forward(params, x):
        return (jnp.tanh(x @ params["w"]) ** 2).mean()

    sharded = shardfn.fully_shard(
        forward,
        cpu_mesh(4),
        min_size=8,
        stationary=False,
        gather_dtype=names,
        quantize_block=BLOCK,
    )
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)}
    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
    given = jax.grad(lambda p: forward({"w": straight_through(p["w"], 1, "int8")}, x))(
        params
    )
    found = jax.grad(lambda p: sharded(p, x))(params)
    np.testing.assert_allclose(found["w"], given["w"], atol=1e-6)


def test_gradients_outside_see_no_quantizer_of_joined_moves() -> None:
    @jax.checkpoint
    def forward(params, x):
        return (jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2).mean()

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
    shapes = {"a": (16, 8), "b": (8, 16)}
    params = {k: jnp.asarray(rng.standard_normal(s), "f4") for k, s in shapes.items()}
    grads = []
    for bucket in (0, 2**20):
        options = dict(min_size=8, stationary=False, gather_dtype=named("int8"))
        sharded = shardfn.fully_shard(
            forward, cpu_mesh(4), bucket_bytes=bucket, quantize_block=BLOCK, **options
        )
        gathers = [c for c in sharded.plan(params, x).collectives if c.block]
        assert len(gathers) == (1 if bucket else 2)
        grads.append(jax.grad(lambda p, step=sharded: step(p, x))(params))
    jax.tree.map(np.testing.assert_array_equal, *grads)
    assert np.abs(grads[0]["a"]).max() > 0


def test_gradients_are_rounded_by_chance_and_the_same_each_time() -> None:
    options = dict(
        reduce_dtype=named("int8"), reduce_rounding="stochastic", quantize_block=BLOCK
    )
    case = shard_fn(mlp(lambda w: w), cpu_mesh(4), SHAPES, (8, 16), **options)
    near = shard_fn(
        mlp(lambda w: w),
        cpu_mesh(4),
        SHAPES,
        (8, 16),
        reduce_dtype=named("int8"),
        quantize_block=BLOCK,
    )
    one, two, other = run(case), run(case), run(near)
    for a, b in zip(one, two, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert not np.array_equal(one[0][0]["a"], other[0][0]["a"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gather_dtype": "int4"}, "gather_dtype cannot be 'int4'"),
        ({"gather_dtype": "uint8"}, "gather_dtype cannot be 'uint8'"),
        ({"reduce_dtype": "float8_e4m3fnuz"}, "reduce_dtype cannot be"),
        ({"reduce_dtype": {"*": {"data": "bfloat16"}}}, "reduce_dtype cannot be"),
        ({"quantize_block": 0}, "quantize_block cannot be 0"),
        ({"reduce_rounding": "up"}, "reduce_rounding cannot be 'up'"),
        (
            {"reduce_dtype": {"*": {"dcn": "int8"}}},
            "reduce_dtype={'dcn': 'int8'} names mesh axis 'dcn', but fully_shard was "
            "given axis=('data',)",
        ),
    ],
)
def test_what_cannot_be_asked(options, message) -> None:
    with pytest.raises(shardfn.ShardingError) as caught:
        _ = shard_fn(mlp(lambda w: w), cpu_mesh(4), SHAPES, (8, 16), **options).plan
    assert message in str(caught.value)


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", [aot("h100:8"), aot("tpu:v5p:2x2x2")])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_compilers_of_devices_that_are_not_there(target: str, dtype: str) -> None:
    mesh = targets.mesh(target)
    shapes = {"a": (1024, 2048), "b": (2048, 1024)}
    case = shard_fn(
        mlp(lambda w: w), mesh, shapes, (512, 1024),
        gather_dtype=dtype, reduce_dtype=dtype,
    )  # fmt: skip
    report = case.step.on(target, case.state, case.batch)
    checked = report.verification
    assert checked.ok, checked.problems()
    assert checked.wire_bytes <= case.plan.wire_bytes
    # At least terms are read to be written, and written; no matmul is among it.
    least = 2 * 1024 * 2048 * (4 + 1)
    assert least <= report.timeline.quantizer_bytes <= report.timeline.memory_bytes
    assert "\n  quantizer  " in str(report) and "of the memory's, to write" in str(
        report
    )
