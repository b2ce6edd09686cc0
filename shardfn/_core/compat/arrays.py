"""Arrays and their types.

In: arrays with values, or tracers. Out: which they are, their weak types, and the
manual axes that they vary over.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import core as core_types, numpy as jnp
from jax._src import config as _config, core as _core, dtypes as _dtypes
from jax._src.interpreters import mlir as _mlir, pxla as _pxla

from shardfn._core.compat.platforms import bound_platform, dtypes_without_sum

CONCRETE_ARRAYS = tuple(
    t
    for name in ("ArrayImpl", "PRNGKeyArray")
    for t in jax.Array.__subclasses__()
    if t.__name__ == name
)
"""The types of arrays that have values, not tracers: of numbers, and of PRNG keys."""


JIT_REFUSES_DELETED = jax.__version_info__ >= (0, 12)
"""Whether `jax.jit` raises a RuntimeError on a donated or deleted array before anything
runs: with JAX 0.10 one that other jitted functions were given ends the process, if it
is on several devices."""


_is_deleted = operator.methodcaller("is_deleted")


def any_deleted(arrays: Iterable[jax.Array]) -> bool:
    """Whether one of some arrays that have values was donated or deleted."""
    return any(map(_is_deleted, arrays))


def abstract(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """What to trace on for an argument like `aval`, perhaps typed by a sharding."""
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=weak, sharding=sharding
    )


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which the type of `x` says that it varies."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)  # pyright: ignore


def aval_like(avals: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result of this shape and dtype: it varies over the manual mesh axes
    that the operands vary over, and none has a sharding in its type."""
    varying = next((a for a in avals if a.manual_axis_type.varying), None)
    if varying is None:
        return _core.ShapedArray(shape, dtype)
    whole = varying.sharding.update(
        spec=jax.sharding.PartitionSpec(*[None] * len(shape))
    )
    return varying.update(shape=shape, dtype=dtype, weak_type=False, sharding=whole)


def type_text(x: Any) -> str:
    """The dtype and shape of an array: `float32[8,4]`."""
    return _core.ShapedArray(x.shape, x.dtype).str_short()


def checks_types() -> bool:
    """Whether the `shard_map` around checks over which mesh axes values vary."""
    return bool(_config._check_vma.value)


def varying_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """`operands` cast to vary along the same mesh axes, as primitives demand."""
    axes = [varying_axes(x) for x in operands]
    every = frozenset[str]().union(*axes)
    if all(own == every for own in axes):
        return [*operands]
    return [
        cast_varying(x, tuple(sorted(every - own)))
        for x, own in zip(operands, axes, strict=True)
    ]


def cast_varying(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """`x` cast to vary along the mesh axes `names` too.

    Its derivative sums cotangents over these, in float32 where the compiler cannot sum
    those of its own dtype.
    """
    if not names:
        return x
    if str(x.dtype) not in dtypes_without_sum(*bound_platform()):
        return jax.lax.pcast(x, names, to="varying")
    wide = jax.lax.convert_element_type(x, jnp.float32)
    wide = jax.lax.pcast(wide, names, to="varying")
    return with_weak_type(jax.lax.convert_element_type(wide, x.dtype), x.weak_type)  # pyright: ignore


def with_weak_type(x: jax.Array, weak: bool) -> jax.Array:
    """`x` with its weak type set to `weak`."""
    from jax._src.lax import lax as lax_internal

    if getattr(x, "weak_type", False) == weak:  # keys have none
        return x
    out: Any = lax_internal._convert_element_type(x, x.dtype, weak_type=weak)
    return out


def put(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """`x` on the devices of a sharding, as `jax.device_put` does it.

    If other processes have some of the devices, each process gives all of `x`, and it
    goes there from the host. Of arrays on a process's own devices JAX 0.10 to 0.12
    refuses those that are committed to them, and keys, and makes arrays whose shards
    cannot be read of others, if each process has one device.
    """
    if sharding.is_fully_addressable or not isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    if is_key(x.dtype):
        words, impl = jax.random.key_data(x), jax.random.key_impl(x)
        return jax.random.wrap_key_data(put(words, sharding), impl=impl)
    if not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    placed = jax.device_put(jax.device_get(x), sharding)
    return with_weak_type(placed, x.weak_type)  # pyright: ignore


def is_key(dtype: Any) -> bool:
    """Whether this is the dtype of PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_traced(x: Any) -> bool:
    """Whether `x` is a tracer, which has no values yet."""
    return isinstance(x, core_types.Tracer)


def register_array(cls: type, whole: Callable[[Any], jax.Array]) -> None:
    """Makes JAX take objects of a class for arrays, as it does its own PRNG keys.

    Args:
      cls: a subclass of `jax.Array` with an attribute `aval`.
      whole: what makes one an array of JAX's own.
    """

    def shard(xs: Any, shardings: Any, layouts: Any, copies: Any) -> Any:
        return _pxla.shard_args(shardings, layouts, copies, list(map(whole, xs)))

    def constant(val: Any, aval: Any) -> Any:
        return _mlir.get_constant_handler(CONCRETE_ARRAYS[0])(whole(val), aval)

    _core.pytype_aval_mappings[cls] = lambda x: x.aval
    _pxla.shard_arg_handlers[cls] = shard
    _mlir.register_constant_handler(cls, constant)
    if hasattr(_dtypes, "register_canonicalize_value_handler"):
        _dtypes.register_canonicalize_value_handler(cls, None)
    else:
        _dtypes.canonicalize_value_handlers[cls] = lambda x: x


def aval_of(x: jax.ShapeDtypeStruct) -> Any:
    """The type that JAX gives an array of this shape, dtype and sharding."""
    aval = _core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
    return _core.update_aval_with_sharding(aval, x.sharding)
