"""Optimization barriers whose results have the types of their operands.

In: arrays, inside `shard_map`. Out: the same arrays, of which none exists before all
do; one that TPUs make in a kernel of its own; or one that GPUs do not delay. JAX 0.10's
own barrier says of each that it varies over every mesh axis over which one of them
does, so that a replicated value would be replicated no more. Derivatives pass by:
tangents and cotangents are not tied.
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
undelayed_p = Primitive("undelayed_on_gpus")


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


def undelayed_on_gpus(x: jax.Array) -> jax.Array:
    """`x`, which XLA for GPUs makes in the iteration of the loop that it is in.

    It delays reduce-scatters that a loop stacks by an iteration, unless something is
    between them and the stack.
    """
    return undelayed_p.bind(x)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return barrier_p.bind(*primals), list(tangents)


def _batched(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    return barrier_p.bind(*args), list(dims)


def _barrier(*values: Any) -> list[Any]:
    return list(lax.optimization_barrier(values))


barrier_p.def_impl(_barrier)
barrier_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(barrier_p, mlir.lower_fun(_barrier, multiple_results=True))
ad.primitive_jvps[barrier_p] = _jvp
batching.primitive_batchers[barrier_p] = _batched


def _behaves_as_barrier(primitive: Primitive, *platforms: str) -> None:
    """Gives a primitive of one operand its rules: a barrier where `platforms` compile
    it, and nothing elsewhere."""
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, lambda context, x: [x])
    as_barrier = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
    for platform in platforms:
        mlir.register_lowering(primitive, as_barrier, platform=platform)
    ad.primitive_jvps[primitive] = lambda primals, tangents: (
        primitive.bind(*primals),
        tangents[0],
    )
    batching.defvectorized(primitive)


_behaves_as_barrier(unfused_p, "tpu")
_behaves_as_barrier(undelayed_p, "cuda", "rocm")
