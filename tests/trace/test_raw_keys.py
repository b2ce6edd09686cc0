"""In: steps with uint32 arrays in their batch that have the shape of a raw PRNG key.
Out: keys are the same everywhere and rows are split, as the step uses them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry_2x32
from jax.sharding import Mesh, PartitionSpec as P

import shardfn
from shardfn._trace.jaxpr_to_program import make_program
from shardfn._trace.raw_keys import raw_keys

pytestmark = pytest.mark.standard_promotion

KEY = jax.random.PRNGKey(3)
WORDS = np.arange(8, dtype=np.uint32)
W = jnp.ones((8, 4))


def mesh_of(count: int) -> Mesh:
    return Mesh(jax.devices()[:count], ("data",))


def normal(key):
    return jax.random.normal(key, (3,))


def in_scan(x, k):
    def body(key, _):
        key, now = jax.random.split(key)
        return key, normal(now)

    return lax.scan(body, k, None, length=2)[1] * x[0]


@pytest.mark.parametrize(
    "fn, expected",
    [
        (lambda x, k: normal(k) + x[0], {1}),
        (lambda x, k: normal(jax.random.split(k)[1]) + x[0], {1}),
        (lambda x, k: normal(jax.random.fold_in(k, x[0])), {1}),
        (lambda x, k: normal(jnp.where(x.sum() > 3, k, k + x)), {0, 1}),
        (lambda x, k: lax.cond(x[0] > 2, normal, lambda _: jnp.ones(3), k), {1}),
        (lambda x, k: jax.jit(jax.remat(normal))(k), {1}),
        (lambda x, k: jax.vmap(normal)(jnp.broadcast_to(k, (4, 2))), {1}),
        (lambda x, k: jax.vmap(lambda r: normal(k) * r)(x), {1}),
        (lambda x, k: threefry_2x32(k, x), {1}),
        (in_scan, {1}),
        # Seeds, counts and data are rows.
        (lambda x, k: normal(jax.random.PRNGKey(x[0])), set()),
        (lambda x, k: jax.vmap(lambda s: normal(jax.random.PRNGKey(s)))(x), set()),
        (lambda x, k: (x.astype(jnp.float32) * 2, k ^ x), set()),
    ],
)
def test_arguments_that_are_keys(fn, expected) -> None:
    made = jax.make_jaxpr(fn)(WORDS[:2], KEY)
    assert raw_keys(make_program(made)) == expected


@pytest.mark.parametrize("argnums", ["auto", 0])
def test_a_key_that_nothing_reads(argnums) -> None:
    """As where dropout is off: two words are not two rows of a batch of 16."""
    mesh = mesh_of(8)

    def step(w, x, key, rate=0.0):
        y = x @ w
        if rate:
            y = y * jax.random.bernoulli(key, rate, y.shape)
        return w - y.mean(), {"y": y}

    run = shardfn.fully_shard(
        step, mesh, min_size=0, donate=False, state_argnums=argnums
    )
    x = jnp.arange(128.0).reshape(16, 8) / 128
    new, out = run(W, x, KEY)
    expected, expected_out = jax.jit(step)(W, x, KEY)
    np.testing.assert_allclose(new, expected, rtol=1e-6)
    np.testing.assert_allclose(out["y"], expected_out["y"], rtol=1e-6)


def rows_step(w, x):
    return w, {"sum": x.astype(jnp.float32).sum(), "x": x}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("devices", [4, 2], ids=["two rows each", "four rows each"])
def test_rows_on_one_device(devices: int, check_vma: bool) -> None:
    """Read as keys, they were the rows of the first device on every one."""
    mesh = mesh_of(devices)
    local = shardfn.fully_shard(rows_step, min_size=0)
    specs = {"sum": P(), "x": P("data")}

    def body(w, x):
        return local(local.shard(w), x)[1]

    over = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("data")), out_specs=specs, check_vma=check_vma
    )
    out = jax.jit(over)(W, WORDS)
    assert out["sum"] == 28 and out["x"].tolist() == WORDS.tolist()


@pytest.mark.parametrize("hard_coded", [False, True])
def test_a_raw_key_on_local_shards(hard_coded: bool) -> None:
    """Beside rows that look like it; or in a step that spells out the global batch."""
    mesh = mesh_of(4)

    def step(w, x, key):
        noise = jax.random.normal(key, (8,) if hard_coded else x.shape)
        return w, (noise * x).sum()

    local = shardfn.fully_shard(step, min_size=0)
    over = jax.shard_map(
        lambda w, x, key: local(local.shard(w), x, key)[1],
        mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P(),
    )  # fmt: skip
    x = WORDS.astype(np.float32) if hard_coded else WORDS
    expected = jax.jit(step)(W, x, KEY)[1]
    np.testing.assert_allclose(jax.jit(over)(W, x, KEY), expected, rtol=1e-5)


def per_device(w, x, key):
    i = lax.axis_index("data")
    noise = jax.random.normal(jax.random.fold_in(key, i), (2,))
    return w, {"sum": lax.psum(x.sum(), "data"), "noise": noise, "rows": x * (i + 1)}


def test_rows_and_a_raw_key_of_a_step_per_device() -> None:
    """Of four rows each device gets one, as under pmap."""
    mesh = mesh_of(4)
    run = shardfn.fully_shard(per_device, mesh, min_size=0, donate=False)
    rows = WORDS[:4]
    _, out = run(W, rows, KEY)
    assert out["sum"] == 6 and out["rows"].tolist() == [0, 2, 6, 12]
    each = jax.vmap(per_device, (None, 0, None), (None, 0), axis_name="data")
    expected = each(W, rows[:, None], KEY)[1]["noise"].ravel()
    np.testing.assert_array_equal(out["noise"], expected)


@pytest.mark.parametrize("argnums", ["auto", 0])
def test_raw_keys_of_a_global_step(argnums) -> None:
    """A key of all, one key per example, and four rows, over two steps."""
    mesh = mesh_of(8)
    keys = jax.vmap(jax.random.PRNGKey)(jnp.arange(8))

    def step(w, batch):
        noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(batch["keys"])
        drop = jax.random.bernoulli(batch["key"], 0.5, (8, 4))
        new = w + jnp.where(drop, noise, batch["x"][:, None])
        return new, {"noise": noise, "sum": new.sum(0)}

    run = shardfn.fully_shard(
        step, mesh, min_size=0, donate=False, state_argnums=argnums
    )
    batch = {"keys": keys, "key": KEY, "x": jnp.arange(8.0)}
    plain = jax.jit(step)
    state, w = W, W
    for _ in range(2):
        (state, out), (w, expected) = run(state, batch), plain(w, batch)
        np.testing.assert_allclose(state, w, rtol=1e-6)
        np.testing.assert_allclose(state, w, rtol=1e-6)
        np.testing.assert_allclose(out["sum"], expected["sum"], rtol=1e-6)
        np.testing.assert_allclose(out["noise"], expected["noise"], rtol=1e-6)
        assert out["noise"].sharding.spec == P("data")


def test_words_that_are_no_key_and_cannot_be_split() -> None:
    mesh = mesh_of(8)
    run = shardfn.fully_shard(rows_step, mesh, min_size=0)
    with pytest.raises(shardfn.ShardingError) as error:
        run(W, WORDS[:2])
    assert "has 2 rows, which 8 devices on mesh axis 'data'" in str(error.value)
    assert "pass batch_spec=jax.P() to replicate it" in str(error.value)


def test_a_failing_step_with_a_raw_key_says_what_fails() -> None:
    run = shardfn.fully_shard(lambda w, key: (w @ w, normal(key)), mesh_of(8))
    with pytest.raises(TypeError, match="dot_general requires"):
        run(W, KEY)


def test_local_batch_takes_a_raw_key() -> None:
    mesh = mesh_of(8)
    run = shardfn.fully_shard(lambda w, x, k: (w, x * normal(k)[0]), mesh)
    batch = run.local_batch(np.ones(8, np.float32), KEY)
    np.testing.assert_allclose(run(W, *batch)[1], np.full(8, normal(KEY)[0]))
