"""In: losses that look up a label's logit behind what is computed of all logits. Out:
it is looked up before that, numbers are the same, and TPUs hold no logits in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from plan_helpers import cpu_mesh, walk

import shardfn
from shardfn._core import compat
from shardfn.analysis import targets
from shardfn.analysis._heap_size import compiled_with_heap

pytestmark = pytest.mark.standard_promotion

VOCABULARY, WIDTH, ROWS, TOKENS = 56, 32, 16, 8
BF16 = jnp.bfloat16
Loss = Callable[[jax.Array, jax.Array], jax.Array]


def of_labels(x: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, labels[..., None], axis=-1)[..., 0]


def integer_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()


def log_softmax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -of_labels(jax.nn.log_softmax(logits.astype(jnp.float32)), labels).mean()


def capped(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return log_softmax(30 * jnp.tanh(logits.astype(jnp.float32) / 30), labels)


def flattened(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32).reshape(-1, VOCABULARY)
    rows = jnp.arange(len(wide))
    return -jax.nn.log_softmax(wide)[rows, labels.reshape(-1)].mean()


def several(logits: jax.Array, labels: jax.Array) -> jax.Array:
    both = jnp.stack([labels, (labels + 1) % VOCABULARY], axis=-1)
    each = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(each, both, axis=-1).mean()


def out_of_bounds(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """A third of the labels have no logit: their numbers are NaN, and left out."""
    labels = jnp.where(labels % 3 == 0, VOCABULARY + 5, labels)
    each = of_labels(jax.nn.log_softmax(logits.astype(jnp.float32)), labels)
    return -jnp.where(jnp.isnan(each), 0.0, each).mean()


def repeated(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.checkpoint(log_softmax)(logits, labels)


def in_chunks(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chunks = logits.reshape(-1, 4, TOKENS // 4, VOCABULARY).swapaxes(0, 1)
    parts = labels.reshape(-1, 4, TOKENS // 4).swapaxes(0, 1)

    def add(total: jax.Array, chunk: Any) -> tuple[jax.Array, None]:
        return total + jax.checkpoint(integer_labels)(*chunk), None

    return lax.scan(add, jnp.zeros(()), (chunks, parts))[0] / 4


def of_each_row(logits: jax.Array, labels: jax.Array) -> jax.Array:
    def of_one(logits: jax.Array, label: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(logits.astype(jnp.float32))[label]

    return jax.vmap(jax.vmap(of_one))(logits, labels).mean()


def of_one_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take(wide, labels[0, 0], axis=-1).mean()


def of_each_token(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mapped over tokens, whose logits a loop is given."""
    turned = logits.swapaxes(0, 1), labels.swapaxes(0, 1)
    return lax.map(lambda x: log_softmax(*x), turned).mean()


def scaled(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """By the place of a token."""
    scales = jnp.arange(1, TOKENS + 1, dtype=jnp.float32)[None, :, None]
    return -of_labels(
        jax.nn.log_softmax(logits.astype(jnp.float32) / scales), labels
    ).mean()


LOSSES = {
    loss.__name__: loss
    for loss in (
        *(integer_labels, log_softmax, capped, flattened, several, out_of_bounds),
        *(repeated, in_chunks, of_each_row, of_one_label, of_each_token, scaled),
    )
}


def descent(loss: Loss, dtype: Any) -> Callable[..., Any]:
    def mean_loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        hidden = jnp.tanh(x.astype(dtype) @ params["in"].astype(dtype))
        return loss(hidden @ params["head"].astype(dtype), labels)

    def train(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(mean_loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    return train


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def params_and_batch(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    params = {
        "in": rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5,
        "head": rng.normal(size=(WIDTH, VOCABULARY)),
    }
    x = rng.normal(size=(ROWS, TOKENS, WIDTH))
    labels = rng.integers(0, VOCABULARY, (ROWS, TOKENS))
    single = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (params, x))
    return single[0], (single[1], jnp.asarray(labels, jnp.int32))


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "indexes_memory", lambda platform: True)


def looked_up_in(loss: Loss) -> set[str]:
    """In arrays of which dtypes a step in bfloat16 looks logits up."""
    step = shardfn.fully_shard(descent(loss, BF16), cpu_mesh(8), min_size=16)
    jaxpr = jax.make_jaxpr(step)(*params_and_batch())
    arrays = (
        eqn.invars[0].aval
        for eqn, *_ in walk(jaxpr.jaxpr)
        if eqn.primitive is lax.gather_p
    )
    return {str(x.dtype) for x in arrays if x.shape[-1] == VOCABULARY}


@pytest.mark.parametrize("name", LOSSES)
def test_a_label_is_looked_up_before_what_is_computed_of_all_logits(
    name, monkeypatch
) -> None:
    assert looked_up_in(LOSSES[name]) == {"float32"}
    monkeypatch.setattr(compat, "indexes_memory", lambda platform: True)
    assert looked_up_in(LOSSES[name]) == {"bfloat16"}


def filled(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(wide, labels[..., None], -1, fill_value=-1.0)
    return -picked.mean()


def biased(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Not the same for all elements of a row."""
    wide = logits.astype(jnp.float32)
    return log_softmax(wide + jnp.arange(VOCABULARY, dtype=jnp.float32), labels)


def alone(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Nothing else reads what it looks up in."""
    return -of_labels(jnp.tanh(logits.astype(jnp.float32)), labels).mean()


def more_than_all(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """It would be computed of more elements."""
    wide = jax.nn.log_softmax(logits.astype(jnp.float32))
    each = jnp.arange(2 * VOCABULARY) // 2
    return -jnp.take(wide, each, axis=-1).mean()


def narrowed(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Behind the cast there are fewer bytes to look up in."""
    wide = jnp.cumsum(logits.astype(jnp.float32), axis=-1)
    return jax.nn.logsumexp(wide, -1).sum() - of_labels(wide.astype(BF16), labels).sum()


@pytest.mark.parametrize(
    "loss, dtype",
    [
        *((filled, "float32"), (biased, "float32"), (alone, "float32")),
        *((more_than_all, "float32"), (narrowed, "bfloat16")),
    ],
)
def test_other_lookups_stay_where_they_are(loss, dtype, early) -> None:
    assert looked_up_in(loss) == {dtype}


EXACT = {"xla_allow_excess_precision": False}


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
@pytest.mark.parametrize("name", LOSSES)
def test_numbers_are_those_of_the_plain_step(name, dtype, early) -> None:
    plain = jax.jit(descent(LOSSES[name], dtype), compiler_options=EXACT)
    options = dict(min_size=16, compiler_options=EXACT)
    step = shardfn.fully_shard(descent(LOSSES[name], dtype), cpu_mesh(8), **options)
    expected, batch = params_and_batch()
    state = step.init(lambda: params_and_batch()[0])
    for seed in range(1, 4):
        _, batch = params_and_batch(seed)
        if dtype == BF16:  # sums of gradients are rounded in another order
            expected = jax.device_get(step.unshard(state))
        expected, loss = plain(expected, batch)
        state, found = step(state, batch)
        exact = dtype == jnp.float32
        np.testing.assert_allclose(found, loss, rtol=2e-6 if exact else 1e-3)
        near = dict(rtol=1e-5, atol=1e-6) if exact else dict(atol=2e-2)
        for leaf, like in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
            np.testing.assert_allclose(leaf, like, **near)


def test_each_element_is_the_same_also_out_of_bounds(early) -> None:
    """NaN in its place, and from a dtype that has none."""

    def look(scale: jax.Array, batch: Any, dtype: Any) -> Any:
        x, labels = batch
        wide = (x * scale).astype(dtype).astype(jnp.float32)
        each = wide - jax.nn.logsumexp(wide, axis=-1, keepdims=True)
        return jnp.take_along_axis(each, labels, axis=-1)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, VOCABULARY)), jnp.float32)
    labels = jnp.asarray(rng.integers(-70, 70, (16, 9)), jnp.int32)
    for dtype in (BF16, jnp.float8_e4m3fn, jnp.float4_e2m1fn):
        fn = functools.partial(look, dtype=dtype)
        step, given = shardfn.fully_shard(fn, cpu_mesh(8)), (jnp.ones(()), (x, labels))
        plain = jax.jit(fn)(*given)
        assert np.isnan(plain).any() and not np.isnan(plain).all()
        np.testing.assert_allclose(step(*given), plain, rtol=1e-6)


@pytest.mark.parametrize("name", ["log_softmax", "of_one_label", "flattened"])
def test_a_gradient_from_outside_is_that_of_the_lookup_as_it_was(name, early) -> None:
    """Of labels that are almost certain: in bfloat16, all but one and minus one leave
    nothing."""

    def mean_loss(params: Any, batch: Any) -> Any:
        x, labels = batch
        return params, LOSSES[name](x.astype(BF16) @ params.astype(BF16), labels)

    rng = np.random.default_rng(0)
    labels = rng.integers(0, WIDTH, (ROWS, TOKENS))
    x = jnp.asarray(np.eye(WIDTH)[labels], jnp.float32)
    weights = jnp.asarray(12 * np.eye(WIDTH, VOCABULARY), jnp.float32)
    batch = x, jnp.asarray(labels, jnp.int32)
    step = shardfn.fully_shard(mean_loss, cpu_mesh(8), min_size=16, donate=False)

    def gradient(fn: Any, params: Any) -> jax.Array:
        return jax.jit(jax.grad(lambda w: fn(w, batch)[1]), compiler_options=EXACT)(
            params
        )

    found = gradient(step, step.shard(weights))
    expected = gradient(mean_loss, weights)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.aot("tpu:v5p:2x2x2")
@pytest.mark.parametrize("loss", [integer_labels, log_softmax])
def test_a_tpu_holds_no_logits_in_float32(loss) -> None:
    """They were made for the label's alone, 64 MiB of them."""
    tokens, vocabulary = 2048, 8192
    params = {"in": floats(WIDTH, WIDTH), "head": floats(WIDTH, vocabulary)}
    labels = jax.ShapeDtypeStruct((8, tokens), jnp.int32)
    step = shardfn.fully_shard(
        descent(loss, BF16), targets.mesh("tpu:v5p:2x2x2"), min_size=16
    )
    lowered = step.lower(params, (floats(8, tokens, WIDTH), labels))
    _, heap = compiled_with_heap(lowered, "tpu")
    wide = tokens * vocabulary * 4
    assert 0.5 * wide <= heap < 0.75 * wide
