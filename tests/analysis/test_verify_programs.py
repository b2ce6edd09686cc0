"""In: small steps, every reduction and dtype among them, compiled for CPU devices. Out:
`Plan.verify` refuses none of them, and refuses each once its program is spoiled.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose
from plan_helpers import CPU_MERGES_GATHERS, QUICK, cpu_mesh

import shardfn
from shardfn._lowering import choose_loops
from shardfn._propagation import loop_carries
from shardfn._schedule import loop_invariants

DTYPES = "bool int8 uint32 float16 float32".split()

REDUCTIONS = {
    "sum": lambda x: jnp.sum(x, dtype=x.dtype),
    "mean": jnp.mean,
    "prod": lambda x: jnp.prod(x, dtype=x.dtype),
    "max": jnp.max,
    "min": jnp.min,
    "any": jnp.any,
    "all": jnp.all,
    "xor": lambda x: lax.reduce_xor(x, (0,)),
    "argmax": jnp.argmax,
    "norm": jnp.linalg.norm,
    "median": jnp.median,
    "top_k": lambda x: lax.top_k(x[:, 0], 3)[0],
    "cumsum": lambda x: jnp.cumsum(x, 0),
}


def reduces(x: jax.Array) -> dict[str, jax.Array]:
    """Every reduction that the dtype of `x` has."""
    out = {}
    for name, reduction in REDUCTIONS.items():
        try:
            out[name] = reduction(x)
        except (TypeError, ValueError):
            assert name not in ("sum", "mean", "prod", "any", "all")
    return out


def checked(step: Any, state: Any, *batch: Any, **options: Any) -> shardfn.Verification:
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **options)
    compiled = sharded.lower(state, *batch).compile(compiler_options=QUICK)
    return sharded.plan(state, *batch).verify(compiled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_planned_as_they_are_emitted(dtype: str) -> None:
    result = checked(
        lambda w, x: (w, reduces(x)), jnp.ones(8), jnp.ones((16, 3), dtype)
    )
    assert result.ok, result.problems()
    assert {c.line.op for c in result.lines} >= {"all_reduce", "all_gather"}


def test_what_is_all_reduced_counts_by_its_bytes() -> None:
    """Compilers for TPUs all-reduce gathers of a few kilobytes."""

    def loss(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"] * p["scale"]) ** 2)

    state = {"w": jnp.ones((256, 512)), "scale": jnp.ones(512)}
    found = checked(trained(loss), state, jnp.ones((16, 256)), stationary=False)
    assert found.ok

    def reduced(path: str) -> shardfn.Verification:
        lines = (
            replace(line, status="all-reduced") if line.line.path == path else line
            for line in found.lines
        )
        return replace(found, lines=tuple(lines), platform="tpu")

    assert reduced("scale").having("all-reduced") and not reduced("scale").ok
    # Beside a model of more layers it is nothing.
    lines = *reduced("scale").lines, *found.lines * 8
    more = replace(found, lines=lines, platform="tpu")
    assert more.having("all-reduced") and more.ok and not more.problems()
    assert not replace(more, platform="gpu").ok
    assert not reduced("w").ok and "all-reduced" in reduced("w").problems()


def test_branches_of_other_platforms_are_not_planned() -> None:
    """The diagonal has one for kernels of TPUs."""

    def step(w, x):
        z = x @ w
        return 0.9 * w, jnp.diagonal(z @ z.T).mean()

    found = checked(step, jnp.ones((16, 16)), jnp.ones((64, 16)))
    assert {line.status for line in found.lines} == {"present"}


@pytest.mark.parametrize("sums", [2, 3])
def test_sums_that_a_compiler_joins_in_a_loop_of_unknown_length(sums: int) -> None:
    def step(w, x):
        def body(carry):
            z, *_ = carry
            new = jnp.tanh(z @ w + x)
            each = (jnp.linalg.norm(new - i * z) for i in range(sums))
            return new, *each

        def goes_on(carry):
            return carry[1] > 1e-2 * carry[2]

        start = jnp.zeros_like(x), *[jnp.float32(1)] * sums
        return 0.9 * w, jax.lax.while_loop(goes_on, body, start)[1:]

    found = checked(step, 0.5 * jnp.eye(32), jnp.ones((16, 32)))
    assert {line.status for line in found.lines} == {"present"}


def test_a_product_over_devices_is_an_all_gather_of_its_terms() -> None:
    result = checked(
        lambda w, x: (w, jnp.prod(x, axis=0)), jnp.ones(8), jnp.ones((16, 3))
    )
    (line,) = result.lines
    assert (line.line.op, line.line.elements, line.line.reduces) == (
        "all_gather",
        24,
        "",
    )
    assert line.wire_bytes == line.line.wire_bytes == 7 * 3 * 4


def trained(loss: Any) -> Any:
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def tied(remat: bool) -> Any:
    """A table that is the head too, around a scan of layers that share a bias."""

    def loss(p, tokens):
        def layer(h, w):
            h = h + jnp.tanh(h @ w["up"] + p["bias"]) @ w["down"]
            return h * p.get("scale", 1.0), None

        layer = jax.checkpoint(layer) if remat else layer
        h, _ = lax.scan(layer, p["table"][tokens], p["layers"])
        return -jnp.mean(jax.nn.log_softmax(h @ p["table"].T)[..., 0])

    return trained(loss)


TIED = {
    "layers": {"up": jnp.ones((3, 8, 16)), "down": jnp.ones((3, 16, 8))},
    "table": jnp.ones((32, 8)),
    "bias": jnp.ones(16),
}
TOKENS = jnp.zeros((16, 4), jnp.int32)
SQUARES = [jnp.ones((8, 8))] * 3
ROWS = jnp.ones((16, 8))


def layered(p, x):
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def halved(p, x):
    hidden = jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]))(p, x)
    return jnp.mean((hidden @ p[2]) ** 2)


def looped(p, x):
    x, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)
    return jnp.mean(x**2)


def branched(p, x):
    ways = lambda w: jnp.mean(x @ w), lambda w: jnp.max(w) * 2, lambda w: jnp.prod(x)
    return lax.switch(jnp.int32(x.sum()) % 3, ways, p)


def multiplied(w, x):
    return w, lax.scan(lambda c, y: (c * jnp.prod(y), None), 1.0, x.T)[0]


def balanced(w, x):
    """A loop whose body computes equal sums of what it is given twice."""
    lse = jax.nn.logsumexp

    def balance(_, logits):
        halfway = logits - lse(logits, 0, keepdims=True)
        again = logits - lse(logits, 0, keepdims=True)
        return halfway - lse(again, 1, keepdims=True)

    def loss(w, x):
        return jnp.mean(jnp.square(x @ jnp.exp(lax.fori_loop(0, 4, balance, w))))

    return trained(loss)(w, x)


def carried(w, x):
    """The carry of a while loop has a weight, which is gathered in each iteration."""

    def body(carry):
        i, y, w = carry
        return i + 1, jnp.tanh(y @ w), w * 0.99

    _, y, _ = lax.while_loop(lambda carry: carry[0] < 4, body, (0, x, w))
    return w - 0.1 * x.T @ y, y.sum()


PROGRAMS = {
    "equal_sums_in_a_loop": (balanced, jnp.ones((8, 8)), ROWS, {"stationary": False}),
    "weight_in_a_carry": (carried, jnp.ones((8, 8)), ROWS, {"stationary": False}),
    "tied_remat_ahead": (tied(True), TIED, TOKENS, {"prefetch": 1}),
    "tied_again": (tied(False), TIED, TOKENS, {"reshard_after_forward": True}),
    "again": (trained(layered), SQUARES, ROWS, {"reshard_after_forward": True}),
    "remat": (trained(halved), SQUARES, ROWS, {}),
    "no_iterations": (trained(looped), jnp.ones((0, 8, 8)), ROWS, {}),
    "products_in_a_loop": (multiplied, jnp.ones(8), ROWS, {}),
    "branches": (trained(branched), jnp.ones((8, 8)), ROWS, {}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_sound_program_is_refused(name: str) -> None:
    *arguments, options = PROGRAMS[name]
    result = checked(*arguments, **options)
    assert result.ok, result.problems()
    assert CPU_MERGES_GATHERS or not result.having("shared")


def unrolled(unroll: int, remat: bool, penalty: bool) -> Any:
    """A step whose loop over 3 layers is written out in part, perhaps with remat, and
    with a penalty on the gradient of the rows."""

    def layer(h, w):
        return jnp.tanh(h @ w), None

    def rows_of(p, x):
        body = jax.checkpoint(layer) if remat else layer
        return jnp.sum(lax.scan(body, x, p, unroll=unroll)[0] ** 2)

    def loss(p, x):
        slope = jax.grad(rows_of, 1)(p, x) if penalty else x
        return rows_of(p, x) / 16 + jnp.mean(slope**2)

    return trained(loss)


@pytest.mark.covering(2)
@pytest.mark.parametrize("unroll", [1, 2, 3])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("penalty", [False, True])
def test_loops_that_are_written_out_are_not_refused(unroll, remat, penalty) -> None:
    """Nothing reads the gradient of the first layer's rows: compilers drop its gather.
    Two passes that compute the same gather once; those of JAX 0.10 share still more."""
    step, x = (
        unrolled(unroll, remat, penalty),
        jnp.cos(jnp.arange(128.0)).reshape(16, 8),
    )
    p = jnp.sin(jnp.arange(192.0)).reshape(3, 8, 8)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, verify="error")
    expected = step(p, x)
    got = sharded(sharded.shard(p), x)
    assert_allclose(sharded.unshard(got[0]), expected[0], rtol=1e-5, atol=1e-6)
    assert_allclose(got[1], expected[1], rtol=1e-5)


@pytest.mark.parametrize(
    "length, unroll, times", [(4, 1, 4), (4, 2, 4), (4, 3, 3), (4, 4, 3), (5, 2, 4)]
)
def test_gathers_of_iterations_that_nothing_reads_are_not_planned(
    length: int, unroll: int, times: int
) -> None:
    step = unrolled(unroll, remat=False, penalty=False)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0)
    lines = sharded.plan(jnp.ones((length, 8, 8)), ROWS).collectives
    gathers = {c.phase: c.times for c in lines if c.op == "all_gather"}
    assert gathers == {"forward": length, "backward": times}


@pytest.fixture
def loops_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loop_invariants, loop_carries):
        monkeypatch.setattr(module, "LOOP_BYTES", -1)
    monkeypatch.setattr(choose_loops, "LOOP_MOST", 0)


def test_what_iterations_share_is_not_gathered_ahead(loops_hold_nothing) -> None:
    sharded = shardfn.fully_shard(tied(True), cpu_mesh(8), min_size=0, prefetch=1)
    state = {**TIED, "scale": jnp.ones(8)}
    times = {(c.path, c.times) for c in sharded.plan(state, TOKENS).collectives}
    shared = {("bias", 3), ("scale", 3)}
    assert {("layers/up", 4), ("layers/down", 4), *shared} <= times
    assert times.isdisjoint({("bias", 4), ("scale", 4)})


def microbatched(
    layers: Any, unroll: int = 1, dtype: str = "float32", mapped: bool = False
) -> Any:
    """Gradients of 3 microbatches, of a table, places, layers and a norm."""

    def loss(p, tokens):
        p = jax.tree.map(lambda w: w.astype(dtype), p)
        h = layers(p["layers"], p["table"][tokens] + p["places"])
        return jnp.mean((h * p["norm"]).astype("float32") ** 2)

    def step(p, batch):
        def add(total, tokens):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, tokens)), None

        zero = jax.tree.map(jnp.zeros_like, p)
        if mapped:
            each = lax.map(lambda tokens: jax.grad(loss)(p, tokens), batch)
            total = jax.tree.map(lambda g: g.sum(0), each)
        else:
            total, _ = lax.scan(add, zero, batch, unroll=unroll)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, total), ()

    return step


def scanned(p, h):
    return lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), h, p)[0]


def stacked(p, h):
    return jnp.tanh(jnp.tanh(h @ p[0]) @ p[1])


MICROBATCHED = {
    "scan": (microbatched(scanned), {}),
    "scan_bfloat16": (microbatched(scanned, dtype="bfloat16"), {}),
    "mapped_ahead": (microbatched(stacked, mapped=True), {"prefetch": 1}),
    "unrolled": (microbatched(stacked, unroll=2), {}),
}
TABLES = {
    "table": jnp.ones((32, 8)),
    "places": jnp.ones((4, 8)),
    "layers": jnp.ones((2, 8, 8)),
    "norm": jnp.ones(8),
}
PARTS = jnp.zeros((3, 16, 4), jnp.int32)


@pytest.mark.parametrize("name", MICROBATCHED)
def test_gathers_that_leave_the_loop_over_microbatches_are_found(
    name, loops_hold_nothing
) -> None:
    """Compilers for CPUs gather once in front of it what is the same for each."""
    sharded, compiled = compile_microbatched(name)
    result = sharded.plan(TABLES, PARTS).verify(compiled)
    assert result.ok, result.problems()
    (places,) = (
        c
        for c in result.lines
        if c.line.path == "places" and c.found[0].op == "all_gather"
    )
    assert (places.runs, places.line.times) == (1, 3)
    assert places.status == ("promoted" if "bfloat16" in name else "invariant")


def compile_microbatched(name: str) -> Any:
    step, options = MICROBATCHED[name]
    options = options | {"stationary": False, "batch_spec": P(None, "data")}
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **options)
    return sharded, sharded.lower(TABLES, PARTS).compile(compiler_options=QUICK)


def test_what_other_compilers_gather_in_front_of_a_loop_is_refused(
    loops_hold_nothing,
) -> None:
    """There it costs memory that they would not spend. Gathers of a loop's slices can
    leave no loop, and wait in the backward pass."""
    sharded, compiled = compile_microbatched("scan")
    plan, text = sharded.plan(TABLES, PARTS), compiled.as_text()
    checked = plan.verify(text)
    assert {c.line.path for c in checked.having("hoisted")} == {
        "places",
        "norm",
        "table",
    }
    assert not checked.ok and "hoisted: gathered once in front of" in checked.problems()
    fewer = plan.verify(text.replace('{"n":"2"}', '{"n":"1"}'))
    assert text.count('{"n":"2"}') and not fewer.ok
    assert [c.runs for c in fewer.having("missing")] == [3, 3, 3]


def test_what_a_loop_writes_out_may_be_gathered_once(loops_hold_nothing) -> None:
    sharded, compiled = compile_microbatched("unrolled")
    checked = sharded.plan(TABLES, PARTS).verify(compiled.as_text())
    found = {c.line.path: (c.runs, c.line.times) for c in checked.having("unrolled")}
    assert found["places"] == found["norm"] == (1, 3)


def test_a_line_is_not_taken_for_another_of_as_many_elements() -> None:
    """CPUs move the sorted rows in float32, too, as many as a layer has elements, which
    some of them gather once where two are planned."""

    def loss(p, x):
        rows = jnp.sort(x.astype(jnp.bfloat16), axis=0).astype(jnp.float32)
        return jnp.mean((jnp.tanh(jnp.tanh(rows @ p[0]) @ p[1])) ** 2)

    asked = {"reshard_after_forward": True, "stationary": False}
    result = checked(trained(loss), SQUARES[:2], jnp.ones((8, 8)), **asked)
    assert result.ok, result.problems()
    assert len(result.having("promoted")) == 1


def normed(own: Any) -> Any:
    """Clips by a global norm, and returns one that it computes by itself."""

    def step(p: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean((x @ p["a"]) @ p["b"]))(p)
        clipped, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
        norm = jnp.sqrt(sum(jnp.sum(own(g)) for g in jax.tree.leaves(grads)))
        return optax.apply_updates(p, clipped), norm

    return step


@pytest.mark.parametrize(
    "own, statuses",
    [
        (lambda g: g * g, ("present", "once")),
        (jnp.square, ("present", "once")),
        (lambda g: g**2, ("present", "once")),
        (lambda g: jnp.sum(g**2, 0), ("present", "once")),
        (lambda g: jnp.max(g**2, 0), ("present", "present")),
        (lambda g: g * jnp.abs(g), ("present", "present")),
    ],
    ids=["product", "square", "power", "nested", "of_maxima", "another"],
)
def test_a_sum_that_a_step_makes_twice_is_found_once(own: Any, statuses: Any) -> None:
    state = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 8))}
    result = checked(normed(own), state, jnp.ones((16, 8)))
    assert result.ok, result.problems()
    sums = [c for c in result.lines if c.line.reduces == "sum" and not c.line.shape]
    assert tuple(c.status for c in sums) == statuses


@pytest.mark.parametrize("same", [True, False])
def test_sums_of_a_body_are_one_if_it_is_given_one_value_twice(same: bool) -> None:
    """The loop reads two values that are computed outside, alike or not."""

    def step(w, x):
        scales = jnp.mean(x), jnp.mean(x) if same else jnp.mean(x) + 1

        def body(total, y):
            sums = [jnp.sum(jnp.tanh(y * scale)) for scale in scales]
            return total + sums[0] * sums[1], None

        return w, lax.scan(body, 0.0, x.T)[0]

    result = checked(step, jnp.ones(8), jnp.ones((16, 3)))
    assert result.ok, result.problems()
    assert sorted(c.status for c in result.lines if c.line.times == 3) == (
        ["once", "present"] if same else ["present", "present"]
    )
