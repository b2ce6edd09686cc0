"""openxla/xla#49143 (September 2026, closed by openxla/xla#49182): "while-loop-all-
reduce-code-motion miscompiles scatter gradient accumulation in scan".

The gradient of a lookup is added up over microbatches, the sum whole on every device.
XLA's partitioner makes each addition an all-reduce, for which all devices but the first
set their sum to zero. libtpu 0.0.42 moves the all-reduce behind the loop and leaves the
zeroes in it: what those devices had added before is lost. 0.0.50 leaves it inside, once
for each microbatch. shardfn adds up each device's own term, and sums once behind the
loop, by a program in which no device is told from another.
"""

import re

import jax
import jax.numpy as jnp
from beside_jit import Programs, both, shape
from jax.sharding import Mesh, PartitionSpec as P

TARGET, AXES = "tpu:v5e:2x2", {"data": 4}
SIZE, SMALL = 256, 128
WHOLE = 2**24
"""`min_size`: the table stays whole, as in the report."""


def train_step(table, batch):
    def microbatch(total, x):
        tokens, weights = x
        grad = jax.grad(lambda t: jnp.sum(t[tokens] * weights))(table)
        return total + grad, None

    total, _ = jax.lax.scan(microbatch, jnp.zeros_like(table), batch)
    return table - 0.1 * total, jnp.max(batch[0])


def arguments(width: int, vocabulary: int = 96, rows: int = 8):
    weights = shape(2, rows, 8, 35, width)
    return shape(vocabulary, 35, width), (shape(2, rows, 8, dtype=jnp.int32), weights)


def programs(mesh: Mesh, size: int = SIZE) -> Programs:
    spec = P(None, "data")
    return both(train_step, mesh, *arguments(size), batch_spec=spec, min_size=WHOLE)


def remark(text: str) -> str:
    """What the loop does with its sum: of a compiled program's text, which has a
    computation for each loop's body, with no line between its lines."""
    bodies = [x for x in text.split("\n\n") if " while(" not in x]
    by_device = [x for x in bodies if " partition-id(" in x]
    if not by_device:
        return "sums behind the loop"
    inside = any(re.search(r" all-reduce(-start)?\(", x) for x in by_device)
    return "sums in the loop" if inside else "zeroes in the loop, sums behind it"
