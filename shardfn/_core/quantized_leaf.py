"""Leaves of a state that are stored in eight bits an element, with a scale per block.

In: a pytree of floats, and patterns of paths. Out: the pytree with `QuantizedLeaf`
nodes, which a step reads with `dequantize`; a sharded step gathers their elements and
scales as they are stored.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from shardfn._core.argument_values import (
    ARRAY,
    DTYPE,
    MAPPING,
    POSITIVE,
    TEXT,
    check_arguments,
)
from shardfn._core.errors import ShardingError, listed
from shardfn._core.leaves import leaf_name
from shardfn._core.path_patterns import matches
from shardfn._core.quantize import dequantize, quantize
from shardfn._core.quantized import DTYPES, SCALE_BITS, SCALE_DTYPE, Quantized

dequantize_p = Primitive("dequantize")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["elements", "scales"],
    meta_fields=["block", "dtype"],
)
@dataclass(frozen=True)
class QuantizedLeaf:
    """A frozen array in eight bits an element: a pytree node of two leaves.

    Element `[..., i]` stands for `elements[..., i] * scales[..., i // block]`. Leading
    dimensions may be cut or stacked, so that `lax.scan` goes through layers.

    Attributes:
      elements: int8, or a float8, of the array's shape.
      scales: bfloat16, the last dimension `block` times smaller.
      block: how many neighbours along the last dimension share a scale.
      dtype: of the array that it was made of.
    """

    elements: jax.Array
    scales: jax.Array
    block: int
    dtype: str

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """The array, in its own dtype if none is given. It has no derivative.

        Inside of a sharded step it is gathered in eight bits, if it is used as it is
        here; what is done to it first, such as a transpose, is done on the shard.
        """
        check_arguments("dequantize", dtype=(dtype, DTYPE.or_none()))
        to = jnp.dtype(self.dtype if dtype is None else dtype).name
        elements, scales = map(lax.stop_gradient, (self.elements, self.scales))
        return dequantize_p.bind(elements, scales, block=self.block, dtype=to)


def quantize_leaves(tree: Any, dtypes: Mapping[str, Any], block: int = 128) -> Any:
    """Stores leaves of a pytree in eight bits an element, such as the base of a LoRA.

    Each leaf that is named becomes a `QuantizedLeaf`, half as large as in bfloat16 and
    1.6% for the scales. It is frozen: optimizers must not see it.

    Args:
      tree: a pytree of arrays, or of `ShapeDtypeStruct`s inside of `jax.eval_shape`.
      dtypes: "int8", "float8_e4m3fn" or "float8_e5m2" by path pattern, as in the
        options of `fully_shard`; the first that matches counts. None leaves a leaf.
      block: how many neighbours along the last dimension share a scale.

    Returns:
      The tree, its other leaves untouched.

    Raises:
      ShardingError: a pattern names no leaf, or a leaf that is no float, or whose last
        dimension blocks do not divide; a dtype is none of these.

    Example:
      >>> import jax.numpy as jnp, shardfn
      >>> tree = {"base": jnp.ones((4, 256)), "lora": jnp.ones((4, 2))}
      >>> tree = shardfn.quantize_leaves(tree, {"base": "int8"})
      >>> tree["base"].elements.dtype.name, tree["base"].scales.shape
      ('int8', (4, 2))
      >>> round(float(tree["base"].dequantize().max()), 3)
      1.0

    References:
      Dettmers et al., QLoRA (arXiv:2305.14314).
    """
    check_arguments(
        "quantize_leaves", dtypes=(dtypes, MAPPING), block=(block, POSITIVE)
    )
    flat, treedef = jax.tree.flatten_with_path(tree)
    names = [leaf_name(path) for path, _ in flat]
    for pattern, dtype in dtypes.items():
        check_arguments("quantize_leaves", pattern=(pattern, TEXT))
        if dtype is not None and str(dtype) not in DTYPES:
            raise ShardingError(
                f"quantize_leaves cannot store '{pattern}' as {dtype!r}.\n"
                f"Pass {', '.join(map(repr, DTYPES))} or None."
            )
        if not any(matches(name, pattern) for name in names):
            raise ShardingError(
                f"quantize_leaves names '{pattern}', which matches no leaf.\n"
                f"The leaves are {listed(names)}."
            )
    made = []
    for name, (_, x) in zip(names, flat, strict=True):
        chosen = next((d for p, d in dtypes.items() if matches(name, p)), None)
        made.append(x if chosen is None else _quantized(name, x, str(chosen), block))
    return jax.tree.unflatten(treedef, made)


def _quantized(name: str, x: Any, dtype: str, block: int) -> QuantizedLeaf:
    check_arguments("quantize_leaves", **{f"leaf '{name}'": (x, ARRAY)})
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.ndim or x.shape[-1] % block:
        raise ShardingError(
            f"quantize_leaves cannot quantize '{name}', {x.dtype} of shape "
            f"{tuple(x.shape)}: it takes floats whose last dimension blocks of {block} "
            "divide.\nPass another block, or a pattern without this leaf."
        )
    payload, scales = quantize(jnp.asarray(x), Quantized(dtype, block, x.ndim - 1))
    if dtype != "int8":
        payload = lax.bitcast_convert_type(payload, dtype)
    bits = lax.bitcast_convert_type(scales, SCALE_DTYPE)
    return QuantizedLeaf(payload, bits, block, str(x.dtype))


def written_as(eqn: Any) -> Quantized:
    """How the operands of an equation of `dequantize_p` are quantized."""
    aval = eqn.invars[0].aval
    return Quantized(str(aval.dtype), eqn.params["block"], aval.ndim - 1)


def bits_of(elements: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What such operands are on the wire."""
    if elements.dtype != jnp.int8:
        elements = lax.bitcast_convert_type(elements, jnp.int8)
    return elements, lax.bitcast_convert_type(scales, SCALE_BITS)


def _run(elements: jax.Array, scales: jax.Array, *, block: int, dtype: str):
    how = Quantized(str(elements.dtype), block, elements.ndim - 1)
    return dequantize(*bits_of(elements, scales), how, jnp.dtype(dtype))


def _abstract(elements: Any, scales: Any, *, block: int, dtype: str) -> Any:
    return elements.update(dtype=jnp.dtype(dtype), weak_type=False)


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    front = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    return dequantize_p.bind(*front, **params), 0


dequantize_p.def_impl(jax.jit(_run, static_argnames=("block", "dtype")))
dequantize_p.def_abstract_eval(_abstract)
mlir.register_lowering(dequantize_p, mlir.lower_fun(_run, multiple_results=False))
batching.primitive_batchers[dequantize_p] = _batched
