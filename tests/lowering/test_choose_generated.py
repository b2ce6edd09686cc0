"""In: steps whose rows come of keys or counts, not of a batch: random points of a PINN,
a GAN's noise, a grid of coordinates, environments. Out: plans that split these rows
where devices would otherwise repeat the work, and the numbers of the plain step."""

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._core import sent_bytes
from shardfn._lowering import choose_generated, choose_loops
from shardfn._propagation import loop_carries
from shardfn._schedule import loop_invariants
from shardfn.testing import assert_parity

WIDE, ROWS = 256, 512
OPTIONS = {"min_size": 0, "stationary": False}


@pytest.fixture(autouse=True)
def tiny_work_counts(monkeypatch):
    monkeypatch.setattr(choose_generated, "GENERATED_FLOPS", 1)
    monkeypatch.setattr(sent_bytes, "LATENCY_BYTES", 16)


def weights(*sizes: int) -> list[jax.Array]:
    pairs = list(zip(sizes, sizes[1:], strict=False))
    keys = jax.random.split(jax.random.key(1), len(pairs))
    draw = zip(keys, pairs, strict=True)
    return [jax.random.normal(k, (a, b)) / a**0.5 for k, (a, b) in draw]


def mlp(ws, x):
    for w in ws[:-1]:
        x = jnp.tanh(x @ w)
    return x @ ws[-1]


def descend(loss):
    def step(state, *batch):
        value, grads = jax.value_and_grad(loss)(state, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    return step


def laplace(state, key):
    """The residual of -u'' = f at random points, and the values on the border."""
    inside, border = jax.random.split(key)
    points = jax.random.uniform(inside, (ROWS, 2))
    sides = jax.random.uniform(border, (ROWS // 4, 2)).at[:, 0].set(0.0)

    def u(x):
        return mlp(state, x)[0]

    def second(x, direction):
        return jax.jvp(lambda x: jax.jvp(u, (x,), (direction,))[1], (x,), (direction,))[
            1
        ]

    def residual(x):
        return second(x, jnp.eye(2)[0]) + second(x, jnp.eye(2)[1]) + jnp.sin(x).sum()

    values = jax.vmap(u)(sides)
    return jnp.square(jax.vmap(residual)(points)).mean() + jnp.square(values).mean()


def gan(state, images, key):
    """Both halves; each draws noise of its own."""
    first, second = jax.random.split(key)

    def fake(g, key):
        return mlp(g, jax.random.normal(key, (ROWS, 16)))

    def critic(d):
        scores = mlp(d, jnp.concatenate([images, fake(state["g"], first)]))
        real, other = jnp.split(scores, [len(images)])
        return jax.nn.softplus(-real).mean() + jax.nn.softplus(other).mean()

    def maker(g):
        return jax.nn.softplus(-mlp(state["d"], fake(g, second))).mean()

    values, grads = zip(
        jax.value_and_grad(critic)(state["d"]),
        jax.value_and_grad(maker)(state["g"]),
        strict=True,
    )
    new = jax.tree.map(lambda w, g: w - 0.1 * g, state, {"d": grads[0], "g": grads[1]})
    return new, values


def images(state, key):
    """Convolutions that devices can make by channel: none repeats work then, but they
    send images."""
    x = jax.random.normal(key, (64, 16, 1, 1))
    for k, w in enumerate(state):
        dims = ("NCHW", "OIHW", "NCHW")
        how = ((2, 2), "SAME") if k else ((1, 1), "VALID")
        x = jnp.tanh(jax.lax.conv_transpose(x, w, *how, dimension_numbers=dims))
    return jnp.square(x - 0.5).mean()


def image(state):
    """An implicit image: coordinates of all pixels, by counting."""
    rows, columns = jnp.divmod(jnp.arange(ROWS), 24)
    points = jnp.stack([rows / 24, columns / 24], -1)
    wanted = jnp.sin(points[:, 0] * 9) + points[:, 1]
    return jnp.square(mlp(state, points)[:, 0] - wanted).mean()


def rollouts(state, key):
    """Environments that are reset and stepped by keys of their own, over time."""
    keys = jax.random.split(key, 64)
    start = jax.vmap(lambda k: jax.random.normal(k, (16,)))(keys)

    def act(carry, key):
        seen, reward = carry
        noise = jax.vmap(lambda k: jax.random.normal(k, (16,)))(
            jax.random.split(key, 64)
        )
        seen = 0.9 * seen + 0.1 * mlp(state, seen) + 0.01 * noise
        return (seen, reward - jnp.square(seen).mean(-1)), None

    times = jax.random.split(jax.random.fold_in(key, 1), 5)
    (_, reward), _ = jax.lax.scan(act, (start, jnp.zeros(64)), times)
    return -reward.mean()


def steps_of_noise(state, key):
    """Noise that only the body of a loop makes, in a remat."""

    @jax.checkpoint
    def one(total, key):
        return total + jnp.square(mlp(state, jax.random.normal(key, (ROWS, 16)))).mean()

    keys = jax.random.split(key, 3)
    return jax.lax.scan(lambda c, k: (one(c, k), None), 0.0, keys)[0]


KEY = jax.random.key(0)
IMAGES = jax.random.normal(jax.random.key(3), (40, 32))
CASES = {
    "laplace": (descend(laplace), weights(2, WIDE, WIDE, 1), [KEY]),
    "gan": (
        gan,
        {"g": weights(16, WIDE, WIDE, 32), "d": weights(32, WIDE, 1)},
        [IMAGES, KEY],
    ),
    "images": (
        descend(images),
        [jnp.full((b, a, 4, 4), 0.1) for a, b in ((16, 16), (16, 16), (16, 8))],
        [KEY],
    ),
    "image": (descend(image), weights(2, WIDE, WIDE, 1), []),
    "rollouts": (descend(rollouts), weights(16, WIDE, 16), [KEY]),
    "steps_of_noise": (descend(steps_of_noise), weights(16, WIDE, 16), [KEY]),
}


def plan_of(name: str, devices: int = 8) -> shardfn.Plan:
    step, state, batch = CASES[name]
    mesh = cpu_mesh(devices)
    return shardfn.fully_shard(step, mesh, **OPTIONS).plan(state, *batch)


@pytest.mark.parametrize("name", CASES)
def test_rows_that_the_step_makes_are_split(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(name)
    (line,) = [n for n in plan.notes if n.startswith("rows that the step makes")]
    assert "test_choose_generated.py:" in line and "FLOPs" in line
    monkeypatch.setattr(choose_generated, "GENERATED_FLOPS", 2**60)
    before = plan_of(name)
    assert not any(n.startswith("rows that") for n in before.notes)
    assert price(plan) < 0.82 * price(before)
    assert plan.work.replicated == 0


def price(plan: shardfn.Plan) -> float:
    return plan.wire_bytes + plan.work.flops / choose_generated.REPEATED_FLOPS


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_plain_step(name: str) -> None:
    step, state, batch = CASES[name]
    assert_parity(step, cpu_mesh(8), state, *batch, tol=2e-5, **OPTIONS)


def test_over_two_mesh_axes() -> None:
    step, state, batch = CASES["laplace"]
    mesh = cpu_mesh(2, 4)
    options = {"axis": ("replica", "data"), **OPTIONS}
    assert_parity(step, mesh, state, *batch, tol=2e-5, **options)
    plan = shardfn.fully_shard(step, mesh, **options).plan(state, *batch)
    assert plan.work.flops < 1.1 * plan_of("laplace").work.flops


def test_loops_over_such_rows_hold_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is chosen is chosen for the rows as they are split."""
    for module in (loop_invariants, loop_carries, choose_loops):
        monkeypatch.setattr(module, "LOOP_BYTES", 0)
    plan = plan_of("rollouts")
    assert {n.split(":")[0] for n in plan.notes if "limits.GENERATED" in n} == {
        "rows that the step makes are split"
    }
    assert any(n.startswith("loops hold what") for n in plan.notes)
    assert {c.times for c in plan.collectives if c.path} == {1}
    step, state, batch = CASES["rollouts"]
    assert_parity(step, cpu_mesh(8), state, *batch, tol=2e-5, **OPTIONS)


def test_rows_that_devices_do_not_divide_are_made_whole() -> None:
    assert not [n for n in plan_of("image", 7).notes if "rows that" in n]


def test_the_best_dimension_is_split() -> None:
    """Of noise `[features, rows]` the second one."""

    def loss(state, key):
        return jnp.square(mlp(state, jax.random.normal(key, (16, ROWS)).T)).mean()

    step = shardfn.fully_shard(descend(loss), cpu_mesh(8), **OPTIONS)
    plan = step.plan(weights(16, WIDE, WIDE, 8), KEY)
    (line,) = [n for n in plan.notes if "rows that" in n]
    assert f"dimension 1 of 16x{ROWS}" in line


def test_a_generator_that_makes_all_bits_at_once_is_not_split() -> None:
    key = jax.random.key(0, impl="unsafe_rbg")
    step, state, _ = CASES["laplace"]
    plan = shardfn.fully_shard(step, cpu_mesh(8), **OPTIONS).plan(state, key)
    assert not [n for n in plan.notes if "rows that" in n]
