"""Exact counts, bytes and dtypes of every collective of a transformer, written down by
hand: from the plan, from the program that JAX is given, from the compiled one.
"""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import programs
import pytest
from plan_helpers import (
    CPU_MERGES_GATHERS,
    QUICK,
    Sharded,
    any_dtype,
    compiled_moves,
    cpu_mesh,
    emitted,
    emitted_moves,
    planned_moves,
    shard,
    shard_fn,
    shard_gpt,
    walk,
)
from programs import gpt
from tiers import exhaustively, tiered

from shardfn.analysis._hlo import read_collectives, wire_bytes

pytestmark = pytest.mark.standard_promotion

VOCAB, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS = 512, 16, 64, 4, 256, 2
# Every matrix has at least as many elements, every norm scale and bias fewer.
MIN_SIZE = 1024

ATTENTION = "MultiHeadDotProductAttention_0"
MATRICES = {
    **{f"{ATTENTION}/{k}/kernel": WIDTH**2 for k in ("query", "key", "value", "out")},
    "Dense_0/kernel": WIDTH * HIDDEN,
    "Dense_1/kernel": WIDTH * HIDDEN,
}
BIASES = {"Dense_0/bias": HIDDEN, "Dense_1/bias": WIDTH}
NORMS = {f"LayerNorm_{k}": WIDTH for k in ("0/scale", "1/scale", "1/bias")}
HEAD = {"head/kernel": WIDTH * VOCAB}
TABLES = {"embed/embedding": VOCAB * WIDTH, "position": LENGTH * WIDTH}

MODELS = {
    "scan_remat": dict(scan=True, remat=True),
    "unrolled": dict(),
    "unrolled_remat": dict(remat=True),
}


def config(model: str, dtype, vocab: int) -> gpt.Config:
    sizes = dict(vocab=vocab, length=LENGTH, width=WIDTH, heads=HEADS, hidden=HIDDEN)
    return gpt.Config(**sizes, layers=LAYERS, dtype=dtype, **MODELS[model])


@functools.cache
def make(model: str, *mesh: int, dtype=jnp.float32, vocab: int = VOCAB) -> Sharded:
    made = config(model, dtype, vocab)
    return shard_gpt(made, cpu_mesh(*mesh), min_size=MIN_SIZE)


def by_hand(model: str, dtype: str) -> Counter:
    """Times per step by `(phase, op, leaf, dtype, elements)`, on one mesh axis.

    Each matrix of a layer is gathered in the forward pass and again in the backward
    pass, and its gradient is scattered once, all in the compute dtype. The head's two
    uses follow each other and share one gather. A lookup's gradient adds rows into
    zeros and needs no table; nor does that of adding the positions: both are gathered
    once. Leaves under `MIN_SIZE` are whole everywhere: only their gradients move.
    """
    scan = model == "scan_remat"
    lines: Counter = Counter()
    prefixes = ["layers/"] if scan else [f"layer_{i}/" for i in range(LAYERS)]
    each = LAYERS if scan else 1
    for prefix in prefixes:
        for name, size in MATRICES.items():
            for phase, op in [
                ("forward", "all_gather"),
                ("backward", "all_gather"),
                ("backward", "psum_scatter"),
            ]:
                lines[phase, op, prefix + name, dtype, size] = each
        # A scan stacks its layers' terms: they are summed once, after their cast to
        # float32. LayerNorm casts its own, and an unrolled bias is summed in bfloat16.
        for name, size in (NORMS | BIASES).items():
            summed = "float32" if scan or name in NORMS else dtype
            lines["backward", "all_reduce", prefix + name, summed, each * size] = 1
    for name, size in (HEAD | TABLES).items():
        lines["forward", "all_gather", name, dtype, size] = 1
        lines["backward", "psum_scatter", name, dtype, size] = 1
    for name in ("norm/scale", "norm/bias"):
        lines["backward", "all_reduce", name, "float32", WIDTH] = 1
    lines["forward", "all_reduce", "", "float32", 1] = 1  # the mean loss
    lines["update", "all_reduce", "", "float32", 1] = 1  # the gradient's norm
    return lines


def in_plan(sharded: Sharded) -> Counter:
    lines: Counter = Counter()
    for c in sharded.plan.collectives:
        assert c.axis == "data"
        leaf, size = c.path.removeprefix("params/"), math.prod(c.shape)
        lines[c.phase, c.op, leaf, c.dtype, size] += c.times
    return lines


def merged(moves: Counter, model: str) -> Counter:
    """What is left if equal gathers of straight-line code are merged."""
    if model == "scan_remat" or not CPU_MERGES_GATHERS:
        return moves
    left = Counter(moves)
    for size, count in Counter(MATRICES.values()).items():
        (key,) = (k for k in moves if k[0] == "all_gather" and k[2] == size)
        left[key] -= LAYERS * count
    return left


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "devices, dtype",
    [(2, "float32"), (4, "float32"), (8, "float32"), (8, "bfloat16")],
)
def test_the_plan(model: str, devices: int, dtype: str) -> None:
    """Counts, dtypes, and wire bytes: 3M(n - 1)/n, less what is gathered once only."""
    sharded = make(model, devices, dtype=jnp.dtype(dtype).type)
    expected = by_hand(model, dtype)
    assert in_plan(sharded) == expected

    item = jnp.dtype(dtype).itemsize
    block, head = sum(MATRICES.values()), sum(HEAD.values())
    rest = head + sum(TABLES.values())
    sums = sum(
        2 * size * jnp.dtype(kind).itemsize * times
        for (_, op, _, kind, size), times in expected.items()
        if op == "all_reduce"
    )
    matrices = item * (3 * LAYERS * block + 2 * rest)
    assert sharded.plan.parameter_bytes == item * (LAYERS * block + rest)
    assert sharded.plan.wire_bytes * devices == (matrices + sums) * (devices - 1)


@pytest.mark.parametrize(
    "model, devices, dtype",
    [
        ("scan_remat", 8, "float32"),
        ("unrolled_remat", 8, "bfloat16"),
        exhaustively("scan_remat", 8, "bfloat16"),
        *(exhaustively("scan_remat", n, "float32") for n in (2, 4)),
        *(exhaustively("unrolled", n, "float32") for n in (2, 4, 8)),
    ],
)
def test_the_programs(model: str, devices: int, dtype: str) -> None:
    """What JAX is given is the plan, to the dtype; what XLA compiles is, to the size.

    That holds for every gather that the backward pass repeats: none is merged with the
    forward pass's.
    """
    sharded = make(model, devices, dtype=jnp.dtype(dtype).type)
    assert emitted_moves(sharded) == planned_moves(sharded.plan)
    found = any_dtype(compiled_moves(sharded.compile(**QUICK)))
    assert found == any_dtype(merged(planned_moves(sharded.plan), model))


@pytest.mark.parametrize("model", tiered(["scan_remat", "unrolled"], ["scan_remat"]))
def test_one_device_has_no_collective(model: str) -> None:
    sharded = make(model, 1)
    assert sharded.plan.collectives == ()
    assert sharded.plan.wire_bytes == 0
    assert read_collectives(sharded.compile(**QUICK).as_text()) == ()


def test_hybrid() -> None:
    """Over 2 replicas of 4: what one axis of 4 does, and then each shard of a gradient
    and each small sum is all-reduced between the replicas."""
    sharded = make("scan_remat", 2, 4)
    plan = sharded.plan
    over = {axis: Counter() for axis in ("data", "replica")}
    for c in plan.collectives:
        leaf, size = c.path.removeprefix("params/"), math.prod(c.shape)
        over[c.axis][c.phase, c.op, leaf, c.dtype, size] += c.times
    expected = by_hand("scan_remat", "float32")
    assert over["data"] == expected
    assert over["replica"] == {
        (phase, "all_reduce", *rest): times
        for (phase, op, *rest), times in expected.items()
        if op != "all_gather" and phase != "update"
    }

    # 2M(W - 1)/(GW), for W = 2 replicas of G = 4 shards.
    matrices = {*MATRICES, *HEAD, *TABLES}
    between = [c for c in plan.collectives if c.axis == "replica"]
    shards = [
        c for c in between if c.path.removeprefix("params/layers/") in matrices
    ] + [c for c in between if c.path.removeprefix("params/") in matrices]
    m = plan.parameter_bytes
    assert m == 4 * (LAYERS * sum(MATRICES.values()) + sum((HEAD | TABLES).values()))
    assert sum(c.total_bytes for c in shards) == 2 * m * (2 - 1) // (4 * 2)

    # A gradient is scattered first, and its shard summed next.
    for first, then in zip(plan.collectives, plan.collectives[1:], strict=False):
        if first.op == "psum_scatter":
            assert (then.op, then.axis, then.path) == (
                "all_reduce",
                "replica",
                first.path,
            )

    assert emitted_moves(sharded) == planned_moves(plan)
    compiled = sharded.compile(**QUICK)
    assert compiled_moves(compiled) == planned_moves(plan)
    assert wire_bytes(read_collectives(compiled.as_text())) == plan.wire_bytes


def test_gradients_are_scattered_layer_by_layer() -> None:
    """In the order of the backward pass, each layer's before the next layer starts."""
    lines = make("unrolled", 8).plan.collectives
    backward = [c for c in lines if c.phase == "backward" and "layer_" in c.path]
    layers = [int(c.path.split("layer_")[1][0]) for c in backward]
    assert layers == sorted(layers, reverse=True)
    scattered = [c.path for c in backward if c.op == "psum_scatter"]
    assert len(scattered) == len(set(scattered)) == LAYERS * len(MATRICES)


# Schedule: which gathers are shared, repeated, moved out of loops.


def of(sharded: Sharded, path: str, op: str) -> list[tuple[str, int]]:
    lines = (c for c in sharded.plan.collectives if path in c.path and c.op == op)
    return [(c.phase, c.times) for c in lines]


def test_near_uses_share_a_gather_and_far_ones_repeat_it() -> None:
    """Far: more than its own bytes were gathered in between."""
    small, large = (make("unrolled", 8, vocab=vocab) for vocab in (256, 512))
    for sharded in (small, large):
        assert of(sharded, "head/", "all_gather") == [("forward", 1)]
        twice = [("forward", 1), ("backward", 1)]
        assert of(sharded, "layer_0/Dense_1/kernel", "all_gather") == twice
    # Between the last matrix's uses only the head is gathered.
    last = f"layer_{LAYERS - 1}/Dense_1/kernel"
    assert of(small, last, "all_gather") == [("forward", 1)]
    assert of(large, last, "all_gather") == twice


def test_recurrent_weights_are_gathered_before_the_loop() -> None:
    sharded = shard(programs.get("lstm"), cpu_mesh(8), min_size=8)
    assert any(e.primitive.name == "scan" for e, *_ in walk(sharded.local))
    assert not [c for c in emitted(sharded) if "scan" in c.inside]
    kernels = [c for c in sharded.plan.collectives if c.path.endswith("kernel")]
    ops = Counter(c.op for c in kernels)
    assert ops == {"all_gather": 9, "psum_scatter": 9}
    assert emitted_moves(sharded) == planned_moves(sharded.plan)


def test_accumulation_scatters_once_per_step() -> None:
    def step(w, x):
        def add(total, x):
            grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            return total + grad, None

        total, _ = jax.lax.scan(add, jnp.zeros_like(w), x.reshape(4, -1, 16))
        return w - total / 4, {}

    sharded = shard_fn(step, cpu_mesh(8), (16, 32), (64, 16))
    lines = [c for c in sharded.plan.collectives if c.shape == (16, 32)]
    assert [(c.op, c.times) for c in lines] == [("all_gather", 1), ("psum_scatter", 1)]
    assert not [c for c in emitted(sharded) if "scan" in c.inside]


def test_the_norm_of_all_gradients_is_one_scalar() -> None:
    def step(w, x):
        def loss(w):
            return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

        clip = optax.clip_by_global_norm(1.0)
        grads, _ = clip.update(jax.grad(loss)(w), optax.EmptyState())
        return jax.tree.map(lambda p, g: p - g, w, grads), {}

    sharded = shard_fn(step, cpu_mesh(8), {"a": (32, 64), "b": (64, 16)}, (24, 32))
    (norm,) = [c for c in sharded.plan.collectives if c.phase == "update"]
    assert (norm.op, norm.shape, norm.wire_bytes) == ("all_reduce", (), 2 * 4 * 7 // 8)
