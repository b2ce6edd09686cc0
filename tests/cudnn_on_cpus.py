"""cuDNN's attention without cuDNN: JAX's primitives of it, lowered to plain JAX.

In: a test that asks for the fixture `cudnn`. Out: a process in which
`jax.nn.dot_product_attention(implementation="cudnn")` is traced as on a GPU, into the
same primitives, and runs on CPU devices.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import mlir as internal_mlir
from jax.interpreters import mlir

VERSION = 91100
"""What cuDNN 9.11 says that it is."""

NEVER = -1e30
"""The score of what a position does not attend to."""


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX takes any dtype then, so that blocks compare with the whole in float32."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: VERSION)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "check_layout", lambda *_: None)
    added: list[Any] = []
    for primitive, run in (
        (fused._dot_product_attention_fwd_p, forward),
        (fused._dot_product_attention_bwd_p, backward),
    ):
        lower = mlir.lower_fun(run, multiple_results=True)
        mlir.register_lowering(primitive, lower, platform="cpu")
        added.append(primitive)
    yield
    for primitive in added:
        del internal_mlir._platform_specific_lowerings["cpu"][primitive]


def forward(
    query: Any, key: Any, value: Any, bias: Any, *rest: Any, layout: int, **params: Any
) -> list[Any]:
    """The result, and what the derivative needs if that is asked for."""
    query, key, value = (_heads_first(x, layout) for x in (query, key, value))
    scores = _scores(query, key, bias, *rest[:4], **params)
    value = jnp.repeat(value, query.shape[1] // value.shape[1], axis=1)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bnts,bnsh->bnth", weights, value.astype(jnp.float32))
    statistic, offsets = jax.nn.logsumexp(scores, axis=-1), rest[2]
    if offsets.ndim == 2:
        statistic = jnp.repeat(statistic, offsets.shape[1] - 1, axis=0)
    out = _heads_first(out.astype(query.dtype), layout)
    return [out, statistic] if params.get("is_training", True) else [out]


def backward(
    query: Any, key: Any, value: Any, bias: Any, *rest: Any, layout: int, **params: Any
) -> list[Any]:
    """The gradients of query, key, value and of a bias: of the statistic and the result
    of the forward pass, as the kernel makes them."""
    given = (query, key, value, *rest[7:9])
    query, key, value, out, cotangent = (
        _heads_first(x, layout).astype(jnp.float32) for x in given
    )
    statistic, offsets = rest[6], rest[2]
    if offsets.ndim == 2:
        statistic = statistic[:: offsets.shape[1] - 1]
    times = query.shape[1] // key.shape[1]
    scores = _scores(query, key, bias, *rest[:4], **params)
    weights = jnp.exp(scores - statistic[..., None])
    every_key, every_value = (jnp.repeat(x, times, axis=1) for x in (key, value))
    of_weights = jnp.einsum("bnth,bnsh->bnts", cotangent, every_value)
    of_sums = jnp.sum(cotangent * out, axis=-1, keepdims=True)
    of_scores = weights * (of_weights - of_sums)
    scale = params["scale"]
    found = [
        scale * jnp.einsum("bnts,bnsh->bnth", of_scores, every_key),
        _of_groups(scale * jnp.einsum("bnts,bnth->bnsh", of_scores, query), times),
        _of_groups(jnp.einsum("bnts,bnth->bnsh", weights, cotangent), times),
    ]
    found = [
        _heads_first(x, layout).astype(y.dtype)
        for x, y in zip(found, given[:3], strict=True)
    ]
    _, has_gradient = params["variadic_args"]
    if has_gradient:
        shared = [d for d in (0, 1) if bias.shape[d] == 1]
        found.append(of_scores.sum(shared, keepdims=True).astype(bias.dtype))
    return found


def _of_groups(x: Any, times: int) -> Any:
    """Sums over the heads of queries that share a head of keys."""
    return x.reshape(x.shape[0], -1, times, *x.shape[2:]).sum(2)


def _scores(
    query: Any,
    key: Any,
    bias: Any,
    q_lengths: Any,
    lengths: Any,
    q_offsets: Any,
    offsets: Any,
    *,
    scale: float,
    variadic_args: tuple[bool, bool],
    mask_type: Any,
    sliding_window_length: int | None,
    **_: Any,
) -> Any:
    (rows, heads, size, width), (_, groups, keys, _) = query.shape, key.shape
    key = jnp.repeat(key, heads // groups, axis=1)
    scores = scale * jnp.einsum(
        "bnth,bnsh->bnts", query, key, preferred_element_type=jnp.float32
    )
    if variadic_args[0]:
        scores += bias.astype(jnp.float32)
    t, s = jnp.arange(size)[:, None], jnp.arange(keys)
    seen = jnp.ones((rows, size, keys), bool)
    if mask_type in (fused.MaskType.CAUSAL, fused.MaskType.PADDING_CAUSAL):
        seen &= t >= s
    if sliding_window_length is not None:
        seen &= t - s < sliding_window_length
    if q_offsets.ndim == 2:
        own = _segments(q_lengths, q_offsets // (heads * width), rows, size)
        others = _segments(lengths, offsets // (groups * width), rows, keys)
        seen &= own[:, :, None] == others[:, None]
    elif fused.has_padding(mask_type):
        seen &= (t < q_lengths[:, None, None]) & (s < lengths[:, None, None])
    return jnp.where(seen[:, None], scores, NEVER)


def _segments(lengths: Any, offsets: Any, rows: int, size: int) -> Any:
    """For each position, of which segment it is, counted over all rows."""
    place = jnp.arange(rows * size)[:, None]
    length = lengths.reshape(-1)
    start = offsets.reshape(-1)[: length.size]
    inside = (place >= start) & (place < start + length)
    found = jnp.where(inside.any(1), inside.argmax(1), -1)
    return found.reshape(rows, size)


def _heads_first(x: Any, layout: int) -> Any:
    is_first = layout == fused.AttentionLayout.BNTH.value
    return x if is_first else x.transpose(0, 2, 1, 3)
