"""In: loops whose iterations share weights that are not small: a recurrent network over
time, a network in parts of the tokens, a roll-out, microbatches. Out: plans that gather
these once, and sum once, where a device then has little more at once; and the numbers
of the plain step.
"""

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._lowering import choose_loops
from shardfn._propagation import loop_carries
from shardfn._schedule import loop_invariants
from shardfn.testing import assert_parity

OPTIONS = {"min_size": 0, "stationary": False}
ROWS, TIME, WIDE = 16, 12, 24


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loop_invariants, loop_carries, choose_loops):
        monkeypatch.setattr(module, "LOOP_BYTES", 0)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5


def descend(loss):
    def step(state, *batch):
        value, grads = jax.value_and_grad(loss)(state, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    return step


def recurrent(remat: bool):
    """Two LSTM cells over time."""

    def loss(state, x):
        def step(carry, x):
            new = []
            for (h, c), p in zip(carry, state, strict=True):
                gates = jnp.concatenate([x, h], -1) @ p["w"] + p["b"]
                i, f, g, o = jnp.split(gates, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                x = jax.nn.sigmoid(o) * jnp.tanh(c)
                new.append((x, c))
            return new, x

        zeros = jnp.zeros((x.shape[0], WIDE))
        start = [(zeros, zeros)] * len(state)
        step = jax.checkpoint(step) if remat else step
        return jnp.square(jax.lax.scan(step, start, x.swapaxes(0, 1))[1]).mean()

    cells = [
        {"w": normal(k, 2 * WIDE, 4 * WIDE), "b": jnp.zeros(4 * WIDE)} for k in (1, 2)
    ]
    return descend(loss), cells, normal(3, ROWS, TIME, WIDE)


def parts_of_tokens():
    """A layer whose network goes over parts of the tokens, each rematerialized."""

    def loss(state, x):
        def part(x):
            return x + jax.nn.gelu(x @ state["up"]) @ state["down"]

        parts = x.reshape(x.shape[0], 4, -1, WIDE).swapaxes(0, 1)
        return jnp.square(jax.lax.map(jax.checkpoint(part), parts)).mean()

    state = {"up": normal(1, WIDE, 64), "down": normal(2, 64, WIDE)}
    return descend(loss), state, normal(3, ROWS, 8, WIDE)


def rolled_out():
    """A network that is applied to what it made, rematerialized as a whole: a time
    step's backward pass gathers each weight twice."""

    def loss(state, x):
        @jax.checkpoint
        def step(x):
            for w in state:
                x = x + jnp.tanh(x @ w["in"]) @ w["out"]
            return x

        return jnp.square(
            jax.lax.scan(lambda x, _: (step(x), x), x, length=5)[1]
        ).mean()

    layers = [
        {"in": normal(k, WIDE, 48), "out": normal(k + 9, 48, WIDE)} for k in range(3)
    ]
    return descend(loss), layers, normal(3, ROWS, WIDE)


def microbatches():
    def loss(state, x):
        for w in state:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    def step(state, x):
        def one(total, x):
            grads = jax.grad(loss)(state, x)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, state)
        grads, _ = jax.lax.scan(one, zeros, x.reshape(2, -1, WIDE))
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), 0.0

    return step, [normal(k, WIDE, WIDE) for k in range(4)], normal(9, ROWS, WIDE)


CASES = {
    "recurrent": recurrent(False),
    "recurrent in a remat": recurrent(True),
    "parts of tokens": parts_of_tokens(),
    "rolled out": rolled_out(),
    "microbatches": microbatches(),
}


def plan_of(name: str) -> shardfn.Plan:
    step, state, batch = CASES[name]
    return shardfn.fully_shard(step, cpu_mesh(8), **OPTIONS).plan(state, batch)


def lines(plan: shardfn.Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith("loops hold")]


@pytest.mark.parametrize("name", CASES)
def test_weights_are_gathered_once_and_summed_once(name: str) -> None:
    plan = plan_of(name)
    (line,) = lines(plan)
    assert "sent per step instead of" in line
    assert {c.times for c in plan.collectives if c.path} == {1}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_plain_step(name: str) -> None:
    step, state, batch = CASES[name]
    assert_parity(step, cpu_mesh(8), state, batch, **OPTIONS)


@pytest.mark.parametrize("name", CASES)
def test_they_stay_in_the_loop_if_there_is_no_space(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = plan_of(name).wire_bytes
    monkeypatch.setattr(choose_loops, "LOOP_LIVE", 0)
    monkeypatch.setattr(choose_loops, "LOOP_WORTH", 2**20)
    plan = plan_of(name)
    assert lines(plan) == [] and plan.wire_bytes > 1.5 * once


def test_more_is_held_if_that_saves_many_times_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose_loops, "LOOP_LIVE", 0)
    monkeypatch.setattr(choose_loops, "LOOP_WORTH", 4)
    assert lines(plan_of("recurrent in a remat"))
    monkeypatch.setattr(choose_loops, "LOOP_MOST", 0)
    assert not lines(plan_of("recurrent in a remat"))


def test_what_a_loop_holds_is_explained() -> None:
    text = plan_of("recurrent").explain("0/w")
    assert "left the loop: of what its iterations share, " in text
    assert "which a device has space for (limits.LOOP_LIVE)" in text
    assert "limits.LOOP_LIVE), so they are reduced once, behind it" in text


def generation():
    """A network of scanned layers that goes over its own outputs, and is trained on
    them: the layers' weights are stacks that a loop inside of a loop goes through."""

    def layer(x, w):
        return x + jnp.tanh(x @ w["in"]) @ w["out"], None

    def loss(state, x):
        def token(x, _):
            x = jax.lax.scan(layer, x, state)[0]
            return x / 2, x

        made = jax.lax.stop_gradient(jax.lax.scan(token, x, length=6)[1])
        made = made.swapaxes(0, 1)
        last = jax.lax.scan(jax.checkpoint(layer), made, state)[0]
        return 0.01 * jnp.square(last).mean()

    state = {"in": normal(1, 3, WIDE, 48), "out": normal(2, 3, 48, WIDE)}
    return descend(loss), state, normal(3, ROWS, WIDE)


@pytest.mark.parametrize("asked", [{}, {"reshard_after_forward": False}])
def test_stacks_leave_both_loops(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state, batch = generation()
    options = {**OPTIONS, **asked}
    if asked:
        monkeypatch.setattr(choose_loops, "LOOP_MOST", 0)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), **options)
    plan = sharded.plan(state, batch)
    stacks = [c for c in plan.collectives if c.path and len(c.shape) == 3]
    assert {c.path for c in stacks} == {"in", "out"}
    assert all(c.times == 1 for c in stacks)
    assert max(c.times for c in plan.collectives) == 3
    assert len(lines(plan)) == (not asked)
    args = sharded.shard(state), batch
    assert plan.verify(sharded.lower(*args).compile()).ok
    assert_parity(step, cpu_mesh(8), state, batch, **options)


def test_stacks_stay_if_there_is_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_loops, "LOOP_MOST", 0)
    step, state, batch = generation()
    plan = shardfn.fully_shard(step, cpu_mesh(8), **OPTIONS).plan(state, batch)
    assert max(c.times for c in plan.collectives) == 18
    assert "stays in the loop in the loop: iterations of the outer" in plan.explain(
        "in"
    )


def test_while_loops_are_taken_to_make_several_iterations() -> None:
    """Layers that are applied as often as the batch says."""

    def step(state, x, count):
        def layers(x):
            for w in state:
                x = x + jnp.tanh(x @ w["in"]) @ w["out"]
            return x / 2

        x = jax.lax.fori_loop(0, count, lambda _, x: layers(x), x)
        return jax.tree.map(lambda w: w + x.mean(), state), jnp.square(x).mean()

    _, state, x = rolled_out()
    args = state, x, jnp.int32(3)
    plan = shardfn.fully_shard(step, cpu_mesh(8), **OPTIONS).plan(*args)
    (line,) = lines(plan)
    assert line.endswith(
        "for 16 iterations of each while loop, which nobody knows (limits.LOOP_UNKNOWN)"
    )
    assert {c.times for c in plan.collectives if c.path} == {1}
    assert_parity(step, cpu_mesh(8), *args, **OPTIONS)
