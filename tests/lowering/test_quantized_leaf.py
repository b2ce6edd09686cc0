"""In: states with frozen leaves in eight bits, as of a LoRA. Out: the numbers of the
step on one device, gathers of the bytes that are stored, and errors.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import GATHERS, cpu_mesh

import shardfn
from shardfn._core.quantize import dequantize, quantize
from shardfn._core.quantized import DTYPES, Quantized
from shardfn.testing import assert_parity

LAYERS, WIDTH, RANK = 3, 16, 2
OPTIONS = GATHERS | {"min_size": 8}


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values / 4, jnp.float32)


def adapted(state: Any, x: jax.Array) -> Any:
    """Layers of a frozen weight and two trained ones, and a frozen head."""

    def loss_fn(lora):
        def layer(h, w):
            base, lora = w
            frozen = base.dequantize(h.dtype)
            return jnp.tanh(h @ frozen + h @ lora["a"] @ lora["b"]), None

        h, _ = lax.scan(layer, x, (state["base"], lora))
        return jnp.mean((h @ state["head"].dequantize()) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["lora"])
    lora = jax.tree.map(lambda w, g: w - 0.1 * g, state["lora"], grads)
    return state | {"lora": lora}, loss


def given(dtype: str, block: int = 4) -> Any:
    state = {
        "base": drawn(LAYERS, WIDTH, WIDTH),
        "head": drawn(WIDTH, 8, seed=1),
        "lora": {"a": drawn(LAYERS, WIDTH, RANK), "b": drawn(LAYERS, RANK, WIDTH)},
    }
    return shardfn.quantize_leaves(state, {"base": dtype, "head": dtype}, block=block)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_what_the_quantizer_writes(dtype: str) -> None:
    x, how = drawn(6, 32), Quantized(dtype, 8, 1)
    leaf = shardfn.quantize_leaves({"w": x}, {"w": dtype}, block=8)["w"]
    assert leaf.elements.dtype == dtype and leaf.scales.dtype == jnp.bfloat16
    expected = dequantize(*quantize(x, how), how, x.dtype)
    np.testing.assert_array_equal(leaf.dequantize(), expected)
    many = jax.tree.map(lambda a: jnp.stack([a, a], axis=1), leaf)
    each = jax.vmap(lambda leaf: leaf.dequantize(), in_axes=1)(many)
    np.testing.assert_array_equal(each, jnp.stack([expected, expected]))
    # Layout: anybody can read it.
    wide = jnp.repeat(leaf.scales.astype("float32"), 8, axis=1)
    np.testing.assert_array_equal(leaf.elements.astype("float32") * wide, expected)


def test_qwix_reads_the_layout_and_has_it() -> None:
    qwix = pytest.importorskip("qwix")
    x = drawn(6, 32).astype(jnp.bfloat16)
    leaf = shardfn.quantize_leaves({"w": x}, {"w": "int8"}, block=8)["w"]
    array = qwix.QArray(leaf.elements, leaf.scales)
    np.testing.assert_array_equal(qwix.dequantize(array), leaf.dequantize())
    made = qwix.quantize(x, "int8", channelwise_axes=[0], tiled_axes={1: 8})
    scales = made.scale.astype(jnp.bfloat16)
    back = shardfn.QuantizedLeaf(made.qvalue, scales, 8, "bfloat16")
    np.testing.assert_array_equal(back.dequantize(), qwix.dequantize(made))


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_leaves_move_as_they_are_stored(dtype: str) -> None:
    """In scans and outside, and the frozen bytes come back as they were."""
    state, x = given(dtype), drawn(8, WIDTH, seed=2)
    step = shardfn.fully_shard(adapted, cpu_mesh(4), donate=False, **OPTIONS)
    plan = step.plan(state, x)
    found = {
        (c.shape, c.dtype, c.block) for c in plan.collectives if c.path and c.block
    }
    assert found == {((WIDTH, WIDTH), dtype, 4), ((WIDTH, 8), dtype, 4)}
    assert "the eight bits that its leaf is stored in" in plan.explain("base/elements")
    checked = plan.verify(step.lower(state, x).compile())
    assert checked.ok, checked.problems()
    assert_parity(adapted, cpu_mesh(4), state, x, **OPTIONS)
    new, _ = step(step.shard(state), x)
    jax.tree.map(np.testing.assert_array_equal, new["base"], state["base"])


def test_shards_that_cut_blocks_move_what_is_read() -> None:
    """Devices that hold a part of a block gather the floats."""

    def forward(state, x):
        return state, x @ state["w"].dequantize()

    state = shardfn.quantize_leaves({"w": drawn(3, 32)}, {"w": "int8"}, block=16)
    step = shardfn.fully_shard(forward, cpu_mesh(4), donate=False, **OPTIONS)
    x = drawn(8, 3)
    assert not any(c.block for c in step.plan(state, x).collectives)
    assert_parity(forward, cpu_mesh(4), state, x, **OPTIONS)


@pytest.mark.parametrize(
    "dtypes, block, message",
    [
        ({"w": "int4"}, 8, "quantize_leaves cannot store 'w' as 'int4'.\nPass 'int8'"),
        ({"v": "int8"}, 8, "quantize_leaves names 'v', which matches no leaf.\nThe"),
        ({"w": "int8"}, 7, "quantize_leaves cannot quantize 'w', float32 of shape (6,"),
        ({"n": "int8"}, 8, "quantize_leaves cannot quantize 'n', int32 of shape (8,)"),
    ],
)
def test_what_cannot_be_stored_so(dtypes: Any, block: int, message: str) -> None:
    tree = {"w": drawn(6, 32), "n": jnp.zeros(8, jnp.int32)}
    with pytest.raises(shardfn.ShardingError) as caught:
        shardfn.quantize_leaves(tree, dtypes, block=block)
    assert str(caught.value).startswith(message)
