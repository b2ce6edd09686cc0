"""The laws of fully sharded training, one section each, read off plans, off the program
that each device runs, and off compiled ones. Law 1 is parity; law 5 has its own file.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from plan_helpers import (
    QUICK,
    Sharded,
    cpu_mesh,
    emitted,
    emitted_moves,
    local_avals,
    planned_moves,
    shard,
    shard_fn,
    shard_gpt,
    walk,
)
from programs import gpt

import shardfn

pytestmark = pytest.mark.standard_promotion


def operations(sharded: Sharded, op: str) -> list[shardfn.Collective]:
    return [c for c in sharded.plan.collectives if c.op == op]


# Law 2: gather at use.


def test_gathers_follow_elementwise_work_and_transposes() -> None:
    def step(w, x):
        def loss(w):
            y = x.astype(jnp.bfloat16) @ jnp.tanh(w).T.astype(jnp.bfloat16)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return w - 0.1 * jax.grad(loss)(w), {}

    sharded = shard_fn(step, cpu_mesh(8), (64, 32), (24, 32))
    (gather,) = operations(sharded, "all_gather")
    assert (gather.dtype, gather.shape) == ("bfloat16", (32, 64))
    work = ("tanh", "transpose", "convert_element_type")
    shapes = [
        e.outvars[0].aval.shape
        for e, *_ in walk(sharded.local)
        if e.primitive.name in work and {*e.outvars[0].aval.shape} & {64, 8}
    ]
    assert {tuple(sorted(s)) for s in shapes[:3]} == {(8, 32)}
    assert emitted_moves(sharded) == planned_moves(sharded.plan)


# Law 3: scatter at birth.

VOCAB, WIDTH, HIDDEN, LENGTH, ROWS = 256, 64, 256, 5, 88


def deep(layers: int) -> Sharded:
    config = gpt.Config(
        **dict(vocab=VOCAB, length=LENGTH, width=WIDTH, hidden=HIDDEN),
        **dict(scan=True, remat=True, broadcast_mask=True, layers=layers),
    )
    return shard_gpt(config, cpu_mesh(8), min_size=8192, rows=ROWS)


def test_no_whole_gradient_outlives_its_layer() -> None:
    few, many = deep(12), deep(20)
    whole = {20 * WIDTH * WIDTH, 20 * WIDTH * HIDDEN}
    assert whole < {x.size for x in jax.tree.leaves(many.state)}
    assert not [a for a, _ in local_avals(many.local) if getattr(a, "size", 0) in whole]

    scattered = [c for c in emitted(many) if c.op == "psum_scatter" and c.times > 1]
    assert len(scattered) == 6
    assert all("scan" in c.inside for c in scattered)

    # A layer more costs two shards (its gradient, and what Adam makes of it), its norm
    # scales and biases, and what remat keeps: its input. Once: a layer, the embedding
    # and the head, whole, and their gradients.
    compiled = [s.compile(**QUICK) for s in (few, many)]
    temp = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    layer = 4 * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN)
    one_more = 2 * layer / 8 + 4 * (4 * WIDTH + HIDDEN) + 4 * ROWS // 8 * LENGTH * WIDTH
    assert (temp[1] - temp[0]) / 8 < one_more < layer / 2
    assert temp[1] < 20 * one_more + 2 * (layer + 2 * 4 * VOCAB * WIDTH)

    # Law 4: the compiled program holds no array of the global batch.
    text = compiled[0].as_text()
    assert f"[{ROWS // 8}," in text
    assert not re.search(rf"\[(\d+,)*{ROWS}(,\d+)*\]\{{", text)


def test_tied_embedding_is_scattered_once() -> None:
    """Its two gradients, of the lookup and of the logits, are summed unreduced. The one
    layer between them is smaller: the lookup and the logits share a gather."""
    config = gpt.Config(vocab=512, length=8, width=32, hidden=64, tied=True, layers=1)
    sharded = shard_gpt(config, cpu_mesh(8), min_size=512)
    of_table = [c for c in sharded.plan.collectives if c.path.endswith("embedding")]
    assert [(c.phase, c.op) for c in of_table] == [
        ("forward", "all_gather"),
        ("backward", "psum_scatter"),
    ]


# Law 4: nothing of global-batch size on a device.


@pytest.mark.parametrize(
    "name",
    [
        "gpt_scan_broadcast_mask",
        "gpt_unrolled_remat",
        "dropout_typed_key_in_batch",
        "dropout_raw_key_in_state",
    ],
)
def test_nothing_of_global_batch_size(name: str) -> None:
    """Masks, one-hots, iotas, dropout: the plain step has them whole, a device not."""
    sharded = shard(programs.get(name), cpu_mesh(8), rows=ROWS, min_size=8)
    plain = jax.make_jaxpr(sharded.plain)(sharded.state, sharded.batch).jaxpr

    def whole(jaxpr):
        shapes = ((getattr(a, "shape", ()), e) for a, e in local_avals(jaxpr))
        return [e for shape, e in shapes if ROWS in shape or ROWS * 7 in shape]

    assert whole(plain)
    assert not whole(sharded.local)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_dropout_mask_bits(devices: int) -> None:
    def step(key, x):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return key, {"kept": kept, "x": jnp.where(kept, x, 0.0)}

    key, x = jax.random.key(1), jnp.ones((16, 36))
    _, plain = step(key, x)
    _, sharded = shardfn.fully_shard(step, cpu_mesh(devices), donate=False)(key, x)
    jax.tree.map(np.testing.assert_array_equal, plain, sharded)


# Law 6: correct first, cost in sight.


def backwards() -> Primitive:
    """A primitive that no registry knows: reverses each row."""
    primitive = Primitive("backwards")
    primitive.def_impl(lambda x: x[:, ::-1])
    primitive.def_abstract_eval(lambda x: x)
    lowering = mlir.lower_fun(lambda x: jnp.flip(x, 1), multiple_results=False)
    # A traced function would be written out.
    mlir.register_lowering(primitive, lambda context, x: lowering(context, x))
    return primitive


def uses(primitive: Primitive):
    def step(w, x):
        w = 2.0 * primitive.bind(w)
        return w, x.sum()

    line = step.__code__.co_firstlineno + 1
    return step, f"test_laws.py:{line} (uses.<locals>.step)"


MESSAGE = (
    "primitive 'backwards' has no op sharding rule, so its operands are gathered: "
    "7168 bytes per device and step.\n  at {place}\n"
    "Register one with shardfn.register_rule, or accept the cost."
)


def test_a_primitive_without_a_rule_runs_gathered() -> None:
    step, place = uses(backwards())
    w, x = jnp.arange(2048.0).reshape(64, 32), jnp.ones((8, 2))
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=8)
    with pytest.warns(shardfn.UnsupportedPrimitiveWarning) as warned:
        plan = sharded.plan(w, x)
        new, total = sharded(sharded.shard(w), x)
        new, total = sharded(new, x)
    assert [str(w.message) for w in warned] == [MESSAGE.format(place=place)]
    np.testing.assert_array_equal(sharded.unshard(new), 4.0 * w)
    assert total == 16.0

    (line,) = plan.fallbacks
    assert (line.op, line.fallback, line.place) == ("all_gather", "backwards", place)
    assert (line.shape, line.wire_bytes) == ((64, 32), 64 * 32 * 4 * 7 // 8)
    assert "(no rule for backwards)" in str(plan)
    assert "7.0 KiB only for want of a rule" in str(plan)


def test_strict_refuses_a_primitive_without_a_rule() -> None:
    step, place = uses(backwards())
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=8, strict=True)
    message = f"{MESSAGE.format(place=place)} strict=True refuses it."
    with pytest.raises(shardfn.ShardingError, match=f"^{re.escape(message)}$"):
        sharded.plan(jnp.ones((64, 32)), jnp.ones((8, 2)))


def test_a_registered_rule_makes_it_local() -> None:
    primitive = backwards()
    shardfn.register_rule(primitive)(
        lambda eqn: shardfn.make_rule(eqn, ["rc"], ["rc"], whole={"c"})
    )
    step, _ = uses(primitive)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=8, strict=True)
    plan = sharded.plan(jnp.ones((64, 32)), jnp.ones((8, 2)))
    assert [c.op for c in plan.collectives] == ["all_reduce"]


@pytest.mark.parametrize(
    "operands, results, what",
    [
        (["rc"], ["rc", "rc"], r"2 results, where it has 1\."),
        (["r"], ["r"], r"\(r\) for operand 0 of shape \(\d+, \d+\)\."),
        (["rc"], ["cr"], r"\(c, r\) for result 0 of shape .*, with factors of size {"),
        ([["r", ("x", "y")]], ["rc"], r"\(r, x\*y\) for operand 0 of shape"),
    ],
)
def test_a_rule_that_does_not_fit(operands, results, what: str) -> None:
    primitive = backwards()
    shardfn.register_rule(primitive)(
        lambda eqn: shardfn.make_rule(eqn, operands, results)
    )
    step, place = uses(primitive)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=8)
    begin = rf"^the rule of primitive '{primitive}' names {what}"
    with pytest.raises(ValueError, match=begin) as error:
        sharded.plan(jnp.ones((64, 32)), jnp.ones((8, 2)))
    assert f"\n  at {place}\n" in str(error.value)


# Law 7: one program.


def test_no_decision_looks_at_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_of()
    monkeypatch.setattr(jax, "process_index", lambda *_: 3)
    monkeypatch.setattr(jax, "process_count", lambda *_: 5)
    assert plan_of() == before
    package = pathlib.Path(shardfn.__file__).parent
    # It knows which process this is, for those that place and write its own part.
    for file in set(package.rglob("*.py")) - {package / "_core" / "processes.py"}:
        for word in ("process_index", "local_devices", "process_count"):
            assert word not in file.read_text(), file


CONSTANT = np.arange(16, dtype=np.float32)


def step_with(fn):
    """A step whose program depends on `fn` alone."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(fn(x @ w) ** 2))(w), {}

    return step


def plan_of(fn=jnp.sin, devices: int = 8, rows: int = 8, **options) -> shardfn.Plan:
    shapes = (16, 16), (rows, 16)
    return shard_fn(step_with(fn), cpu_mesh(devices), *shapes, **options).plan


def scanned(constant):
    return lambda y: jax.lax.scan(lambda h, _: (h * constant, None), y, None, 3)[0]


def drawn(key):
    return lambda y: y * jax.random.normal(key, (16,))


DIFFERENT = {
    "function": (dict(fn=jnp.sin), dict(fn=jnp.cos)),
    "literal": (dict(fn=lambda y: y * 0.1), dict(fn=lambda y: y * 0.10000001)),
    "constant": (
        dict(fn=lambda y: y * CONSTANT),
        dict(fn=lambda y: y * (CONSTANT + 1)),
    ),
    "constant in jit": (
        dict(fn=jax.jit(lambda y: y * CONSTANT)),
        dict(fn=jax.jit(lambda y: y * (CONSTANT + 1))),
    ),
    "constant in scan": (
        dict(fn=scanned(CONSTANT)),
        dict(fn=scanned(CONSTANT + 1)),
    ),
    "captured key": (
        dict(fn=drawn(jax.random.key(1))),
        dict(fn=drawn(jax.random.key(2))),
    ),
    "devices": (dict(), dict(devices=4)),
    "min_size": (dict(), dict(min_size=1024)),
    "batch": (dict(), dict(rows=16)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_plans_are_equal_iff_their_programs_are(what: str) -> None:
    one, other = DIFFERENT[what]
    first, again, different = plan_of(**one), plan_of(**one), plan_of(**other)
    assert first == again and hash(first) == hash(again)
    assert first != different
