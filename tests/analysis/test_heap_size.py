"""The size of a compiled program's heap, by the compiler's buffer assignment."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfn.analysis import targets
from shardfn.analysis._heap_size import compiled_with_heap, heap_size

V5E = "tpu:v5e:2x2"
LAYERS, ROWS, WIDTH = 16, 8192, 1024

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce_sum.89 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4096, parameter 33, shape |f32[4,256]| at ShapeIndex {}:
allocation 2: size 8704, preallocated-temp:
 value: <7 fusion.4 @0> (size=8192,offset=512): f32[8,256]{1,0:T(8,128)}
allocation 3: size 84, color 2, preallocated-temp:
allocation 4: size 256, preallocated-temp:
"""
LATER = """BufferAssignment:
allocation 0: size 512, page 0, constant:
allocation 13: size 8704, page 0, preallocated-temp:
allocation 14: size 4096, color 1, page 0, preallocated-temp:
"""
"""The same as written since JAX 0.12."""


def test_a_heap_is_what_is_allocated_for_temporary_arrays_in_main_memory() -> None:
    assert heap_size(ASSIGNMENT) == 8704 + 256
    assert heap_size(LATER) == 8704


def trained() -> jax.stages.Lowered:
    """The gradient of a loop over layers, whose activations a loop carries from its
    forward pass to its backward pass."""
    whole = NamedSharding(targets.mesh(V5E), P())

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        body: Any = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    shapes = [(LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)]
    given = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=whole) for s in shapes)
    return jax.jit(jax.grad(loss), out_shardings=whole).lower(*given)


@pytest.mark.aot(V5E)
def test_the_summary_for_tpus_counts_holes_twice() -> None:
    """And takes what a loop carries for a hole: all activations lie in the heap."""
    activations = LAYERS * ROWS * WIDTH * 4
    compiled, heap = compiled_with_heap(trained(), "tpu")
    summary: Any = compiled.memory_analysis()
    kept = summary.argument_size_in_bytes + summary.output_size_in_bytes
    most_alive = summary.peak_memory_in_bytes - kept
    assert activations <= most_alive <= heap < summary.temp_size_in_bytes


@pytest.mark.aot(V5E)
def test_other_compilers_are_asked_for_no_dump() -> None:
    compiled, heap = compiled_with_heap(trained(), "gpu")
    summary: Any = compiled.memory_analysis()
    assert heap == summary.temp_size_in_bytes
