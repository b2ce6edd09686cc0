"""Optimization barriers whose results have the types of their operands.

In: arrays, inside `shard_map`. Out: the same arrays, of which none exists before all
do; or one that TPUs make in a kernel of its own. The barrier of JAX 0.10 says of each
that it varies over every mesh axis over which one of them does, so that a replicated
value would be replicated no more. Derivatives pass by: tangents and cotangents are not
tied.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

barrier_p = Primitive("barrier")
barrier_p.multiple_results = True
unfused_p = Primitive("unfused_on_tpus")


def barrier(*values: jax.Array) -> Sequence[jax.Array]:
    """`values`, which the compiler makes before what uses any of them."""
    return barrier_p.bind(*values)


def unfused_on_tpus(x: jax.Array) -> jax.Array:
    """`x`, which XLA for TPUs does not fuse with what uses it.

    It fuses the maximum over rows with the subtraction from them, as in a softmax, and
    writes rows and differences in float32, where two passes over what the rows are made
    of need neither.
    """
    return unfused_p.bind(x)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return barrier_p.bind(*primals), list(tangents)


def _batched(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    return barrier_p.bind(*args), list(dims)


def _barrier(*values: Any) -> list[Any]:
    return list(lax.optimization_barrier(values))


def _unfused_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return unfused_p.bind(*primals), tangents[0]


barrier_p.def_impl(_barrier)
barrier_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(barrier_p, mlir.lower_fun(_barrier, multiple_results=True))
ad.primitive_jvps[barrier_p] = _jvp
batching.primitive_batchers[barrier_p] = _batched
unfused_p.def_impl(lambda x: x)
unfused_p.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(unfused_p, lambda context, x: [x])
mlir.register_lowering(
    unfused_p,
    mlir.lower_fun(lax.optimization_barrier, multiple_results=False),
    platform="tpu",
)
ad.primitive_jvps[unfused_p] = _unfused_jvp
batching.defvectorized(unfused_p)
