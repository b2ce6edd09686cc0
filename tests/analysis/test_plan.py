"""In: small steps on abstract arguments; nothing is compiled. Out: the printed table,
the totals, and what makes two plans equal.
"""

import dataclasses
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn._propagation import decide_node
from shardfn.analysis._text import size_text

STATE = {"w1": (16, 32), "b1": (32,), "w2": (32, 8)}
BATCH = (16, 16), (16, 8)


def abstract(tree):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(i, int) for i in x),
    )


def mlp(params, batch, rate=0.1):
    x, y = batch

    def loss_fn(params):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ low["w1"] + low["b1"])
        out = (hidden @ low["w2"]).astype(jnp.float32)
        return jnp.mean((out - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    new = jax.tree.map(lambda p, g: p - rate * g / norm, params, grads)
    return new, {"loss": loss, "norm": norm}


def sharded(step, devices: int = 8, **kwargs) -> shardfn.ShardedStep:
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return shardfn.fully_shard(step, mesh, **({"min_size": 64} | kwargs))


def plan_of(step, state=STATE, batch=BATCH, **kwargs) -> shardfn.Plan:
    return sharded(step, **kwargs).plan(abstract(state), abstract(batch))


def text_of(plan: shardfn.Plan) -> str:
    """The table, without the numbers of this file's lines."""
    return re.sub(r"test_plan\.py:\d+", "test_plan.py:N", str(plan))


def test_table_of_an_mlp_on_eight_devices() -> None:
    expected = """\
    phase     operation     axis  shape   dtype     times   wire  for
    forward   all_gather    data  16x32   bfloat16      1  896 B  w1
    forward   all_gather    data  32x8    bfloat16      1  448 B  w2
    forward   all_reduce    data  scalar  float32       1    7 B  LOSS
    backward  psum_scatter  data  8x32    bfloat16      1  448 B  w2
    backward  all_reduce    data  32      bfloat16      1  112 B  b1
    backward  psum_scatter  data  32x16   bfloat16      1  896 B  w1
    update    all_reduce    data  scalar  float32       1    7 B  NORM

    mesh data=8
    each device sends 2.7 KiB per step = 1.83 M
    M = 1.5 KiB: the gathered parameters in their compute dtype
      forward  1.3 KiB
      backward 1.4 KiB
      update   7 B"""
    assert text_of(plan_of(mlp)) == golden(expected)


def test_table_of_an_mlp_on_a_hybrid_mesh() -> None:
    expected = """\
    phase     operation     axis     shape   dtype     times   wire  for
    forward   all_gather    data     16x32   bfloat16      1  768 B  w1
    forward   all_gather    data     32x8    bfloat16      1  384 B  w2
    forward   all_reduce    replica  scalar  float32       1    4 B  LOSS
    forward   all_reduce    data     scalar  float32       1    6 B  LOSS
    backward  psum_scatter  data     8x32    bfloat16      1  384 B  w2
    backward  all_reduce    replica  8x32    bfloat16      1  128 B  w2
    backward  all_reduce    replica  32      bfloat16      1   64 B  b1
    backward  all_reduce    data     32      bfloat16      1   96 B  b1
    backward  psum_scatter  data     32x16   bfloat16      1  768 B  w1
    backward  all_reduce    replica  32x16   bfloat16      1  256 B  w1
    update    all_reduce    data     scalar  float32       1    6 B  NORM

    mesh replica=2 x data=4
    each device sends 2.8 KiB per step = 1.86 M
    M = 1.5 KiB: the gathered parameters in their compute dtype
      forward  1.1 KiB
      backward 1.7 KiB
      update   6 B"""
    mesh = jax.make_mesh((2, 4), ("replica", "data"))
    step = shardfn.fully_shard(mlp, mesh, axis=("replica", "data"), min_size=64)
    plan = step.plan(abstract(STATE), abstract(BATCH))
    assert text_of(plan) == golden(expected)


def golden(text: str) -> str:
    loss, norm = "test_plan.py:N (mlp.<locals>.loss_fn)", "test_plan.py:N (mlp)"
    return textwrap.dedent(text).replace("LOSS", loss).replace("NORM", norm)


def test_totals_are_sums_of_the_lines() -> None:
    plan = plan_of(mlp)
    assert plan.wire_bytes == 896 + 448 + 7 + 448 + 112 + 896 + 7
    assert plan.parameter_bytes == 2 * (16 * 32 + 32 * 8), "bfloat16, the bias is whole"
    assert all(c.total_bytes == c.wire_bytes * c.times for c in plan.collectives)


def tied(state, x):
    def loss_fn(state):
        w = state["w"]
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)

    return (jax.tree.map(jnp.subtract, state, jax.grad(loss_fn)(state)),)


def test_a_tied_weight_is_scattered_once_and_counted_once_in_m() -> None:
    plan = plan_of(tied, {"w": (16, 64)}, (16, 16), devices=4)
    m = 4 * 16 * 64
    scattered = [c.total_bytes for c in plan.collectives if c.op == "psum_scatter"]
    assert scattered == [m * 3 // 4]
    assert plan.parameter_bytes == m


@pytest.mark.parametrize("again", ["auto", False, True])
def test_a_tied_weight_is_gathered_once_as_it_is(again: bool | str) -> None:
    """`w.T` is not gathered beside `w`; in the backward pass only if asked."""
    options = {"devices": 4, "reshard_after_forward": again}
    plan = plan_of(tied, {"w": (16, 64)}, (16, 16), **options)
    gathers = [c for c in plan.collectives if c.op == "all_gather"]
    phases = ["forward", "backward"] if again is True else ["forward"]
    assert [c.phase for c in gathers] == phases
    assert {c.shape for c in gathers} == {(16, 64)}


@pytest.mark.parametrize("kept", [True, False])
def test_statistics_of_the_batch_are_not_of_the_scale(kept: bool) -> None:
    """They are of the leaf that keeps them, if one does; else of their own line. The
    gradient of the scale, which is computed from them, is of the scale."""

    def train_step(state, x):
        def loss_fn(scale):
            mean = jnp.mean(x, 0)
            spread = jax.lax.rsqrt(jnp.mean(jnp.square(x - mean), 0) + 1e-5)
            return jnp.mean(((x - mean) * (spread * scale)) ** 4), mean

        (_, mean), grad = jax.value_and_grad(loss_fn, has_aux=True)(state["scale"])
        new = {"scale": state["scale"] - grad, "mean": state["mean"] * 0.9 + 0.1 * mean}
        return (new if kept else new | {"mean": state["mean"]}), ()

    step = shardfn.fully_shard(train_step, jax.make_mesh((8,), ("data",)))
    plan = step.plan({"scale": jnp.ones(64), "mean": jnp.zeros(64)}, jnp.ones((16, 64)))
    moved = [(line.phase, line.path) for line in plan.collectives]
    mean = "mean" if kept else ""
    assert moved == [("forward", mean), ("forward", ""), ("backward", "scale")]


def test_a_state_that_is_one_array_counts_once_in_m() -> None:
    def step(w, x):
        (new,) = tied({"w": w}, x)
        return (new["w"],)

    plan = plan_of(step, (16, 64), (16, 16), devices=4)
    assert plan.parameter_bytes == 4 * 16 * 64


def test_one_device_moves_nothing() -> None:
    plan = plan_of(mlp, devices=1)
    assert plan.collectives == () and plan.wire_bytes == 0
    assert str(plan).splitlines()[0].startswith("phase")
    assert "mesh data=1" in str(plan) and "sends 0 B per step" in str(plan)


# Loops


def scanned(w, x):
    """A gather per layer and pass, of one layer."""

    def loss_fn(w):
        out, _ = lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)
        return jnp.mean(out**2)

    loss, grad = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * grad, loss


def test_times_in_scans() -> None:
    plan = plan_of(scanned, (6, 16, 16), (16, 16), devices=4)
    inside = [c for c in plan.collectives if c.shape == (16, 16)]
    assert {c.op for c in inside} == {"all_gather", "psum_scatter"}
    assert {c.times for c in inside} == {6}
    assert {c.wire_bytes for c in inside} == {4 * 16 * 16 * 3 // 4}
    assert {c.total_bytes for c in inside} == {6 * 4 * 16 * 16 * 3 // 4}
    assert plan.parameter_bytes == 6 * 4 * 16 * 16


def test_times_in_nested_scans_multiply() -> None:
    def step(w, x):
        def outer(h, _):
            inner = lambda h, layer: (jnp.tanh(h @ layer), None)  # noqa: E731
            return lax.scan(inner, h, w)[0], None

        return w, lax.scan(outer, x, None, length=5)[0].mean()

    plan = plan_of(step, (6, 16, 16), (16, 16), devices=4)
    assert {c.times for c in plan.collectives if c.shape == (16, 16)} == {30}


def test_a_while_loop_prints_loop_and_counts_once() -> None:
    def step(w, x):
        body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w[c[0] % 2]))  # noqa: E731
        _, out = lax.while_loop(lambda c: c[0] < c[1].sum(), body, (0, x))
        return w, out.mean()

    plan = plan_of(step, (2, 16, 16), (16, 16), devices=4)
    inside = [c for c in plan.collectives if c.times is None]
    assert inside and all(c.total_bytes == c.wire_bytes for c in inside)
    assert " loop " in str(plan)
    assert str(plan).endswith("while loops are counted as one iteration")


def test_a_scan_in_a_while_loop_counts_its_own_iterations() -> None:
    def step(w, x):
        layer = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        again = lambda h: lax.scan(layer, h, w)[0]  # noqa: E731
        return w, lax.while_loop(lambda h: h.sum() > 1, again, x).mean()

    plan = plan_of(step, (6, 16, 16), (16, 16), devices=4)
    (line,) = [c for c in plan.collectives if c.shape == (16, 16)]
    assert (line.times, line.total_bytes) == (None, 6 * line.wire_bytes)
    assert plan.parameter_bytes == 6 * 4 * 16 * 16
    assert " 6 a loop " in str(plan)
    assert "6 x in each iteration of a while loop: 16x16" in plan.explain("*")


# Values


def test_plans_are_frozen_hashable_and_equal_iff_their_programs_are() -> None:
    plan, same = plan_of(mlp), plan_of(mlp)
    assert plan == same and hash(plan) == hash(same)
    with pytest.raises(dataclasses.FrozenInstanceError, match="collectives"):
        plan.collectives = ()  # pyright: ignore
    others = [
        plan_of(lambda p, b: mlp(p, b, rate=0.2)),
        plan_of(mlp, devices=4),
        plan_of(mlp, min_size=1024),
        plan_of(mlp, batch=((32, 16), (32, 8))),
        plan_of(mlp, batch_spec=P()),
    ]
    assert len({plan, *others}) == 6


def test_constants_that_a_step_captures_are_part_of_the_program() -> None:
    def with_table(value: float):
        table = jnp.full((16, 16), value)
        return plan_of(lambda w, x: (w + table, x.sum()), (16, 16), (16, 16))

    assert with_table(1.0) == with_table(1.0) != with_table(2.0)


def test_where_a_step_stands_does_not_matter() -> None:
    first = lambda w, x: (w * 2.0, (x @ w).sum())  # noqa: E731
    second = lambda w, x: (w * 2.0, (x @ w).sum())  # noqa: E731
    assert plan_of(first, (16, 16), (16, 16)) == plan_of(second, (16, 16), (16, 16))


def test_abstract_and_real_arguments_have_one_plan() -> None:
    step = sharded(mlp)
    state = jax.tree.map(lambda s: jnp.ones(s.shape), abstract(STATE))
    batch = jax.tree.map(lambda s: jnp.ones(s.shape), abstract(BATCH))
    expected = step.plan(abstract(STATE), abstract(BATCH))
    assert step.plan(state, batch) == expected
    assert step.plan(step.shard(state), batch) == expected


def test_bodies_are_part_of_the_program() -> None:
    def looping(by: float):
        return lambda w, x: (lax.scan(lambda w, x: (w * by + x, ()), w, x)[0], ())

    plans = {plan_of(looping(by), (16, 16), (8, 16, 16)) for by in (2.0, 2.0, 3.0)}
    assert len(plans) == 2


def test_equal_layers_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So planning twice as many takes no more decisions, and visits each twice."""
    asked, decided = 0, 0
    decide, op = decide_node.Decider.decide, decide_node.Decider.site

    def counting_decide(*args):
        nonlocal asked
        asked += 1
        return decide(*args)

    def counting_op(*args):
        nonlocal decided
        decided += 1
        return op(*args)

    monkeypatch.setattr(decide_node.Decider, "decide", counting_decide)
    monkeypatch.setattr(decide_node.Decider, "site", counting_op)

    def step(layers, x):
        def loss_fn(layers):
            y = x
            for w in layers:
                y = jnp.tanh(y @ w)
            return y.sum()

        grads = jax.grad(loss_fn)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), ()

    counts = []
    for layers in (4, 8, 16):
        asked = decided = 0
        plan_of(step, [(16, 16)] * layers, (16, 16))
        counts.append((asked, decided))
    (_, few), (middle, same), (many, again) = counts
    assert few == same == again
    assert many < 2.1 * middle


# Primitives without a rule

opaque_p = Primitive("opaque")
opaque_p.def_abstract_eval(lambda x: x)


def opaque(w, x):
    return w * 2.0, opaque_p.bind(x @ w).sum()


def test_fallbacks() -> None:
    warning = shardfn.UnsupportedPrimitiveWarning
    with pytest.warns(warning, match=r"primitive 'opaque' has no op sharding rule"):
        plan = plan_of(opaque, (16, 16), (16, 16))
    (line,) = plan.fallbacks
    assert (line.op, line.fallback, line.shape) == ("all_gather", "opaque", (16, 16))
    assert line.wire_bytes == 4 * 16 * 16 * 7 // 8
    assert re.search(r"test_plan\.py:\d+ \(opaque\)  \(no rule for opaque\)", str(plan))
    assert f"of which {line.wire_bytes} B only for want of a rule" in str(plan)


@jax.custom_vjp
def own_backward(x):
    return 2 * opaque_p.bind(x)


own_backward.defvjp(lambda x: (own_backward(x), None), lambda _, g: (g,))


@jax.custom_jvp
def own_tangent(x):
    return 2 * opaque_p.bind(x)


own_tangent.defjvp(lambda x, t: (own_tangent(*x), t[0]))


@pytest.mark.parametrize(
    "function",
    [
        own_backward,
        own_tangent,
        jax.jit(opaque_p.bind),
        jax.jit(own_backward),
        jax.checkpoint(own_tangent),
        lambda x: jax.lax.scan(lambda h, _: (own_backward(h), None), x, None, 3)[0],
        lambda x: jax.lax.cond(x.sum() > 0, own_backward, jnp.sin, x),
    ],
)
def test_fallbacks_in_functions(function) -> None:
    """The gather may be in front of the function: what its body needs is known."""

    def step(w, x):
        return w * 2.0, function(x @ w)

    with pytest.warns(shardfn.UnsupportedPrimitiveWarning, match="'opaque'"):
        plan = plan_of(step, (16, 16), (16, 16))
    assert {line.fallback for line in plan.fallbacks} == {"opaque"}
    assert all(re.match(r"test_plan\.py:\d+ ", c.place) for c in plan.fallbacks)
    with pytest.raises(shardfn.ShardingError, match="'opaque' has no op sharding rule"):
        plan_of(step, (16, 16), (16, 16), strict=True)


def test_the_warning_says_where_and_how_much() -> None:
    with pytest.warns(shardfn.UnsupportedPrimitiveWarning) as caught:
        plan_of(opaque, (16, 16), (16, 16))
    assert len(caught) == 1, "once per primitive and line"
    message = str(caught[0].message)
    assert "896 bytes per device and step" in message
    assert re.search(r"at test_plan\.py:\d+ \(opaque\)", message)
    assert "shardfn.register_rule" in message


def test_strict_refuses_fallbacks() -> None:
    with pytest.raises(shardfn.ShardingError, match="'opaque' has no op sharding rule"):
        plan_of(opaque, (16, 16), (16, 16), strict=True)


def test_no_fallback_in_an_ordinary_step() -> None:
    assert plan_of(mlp, strict=True).fallbacks == ()


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**42, "4096.0 GiB"),
    ],
)
def test_size_text(size: int, text: str) -> None:
    assert size_text(size) == text
