"""jax-ml/jax#21562 (May 2024; as openxla/xla#15207 still open): "Involuntary full
rematerialization for advanced data movements".

A sum of two arrays, each split over axes `y` and `x` along its first and last
dimensions, is added to one that is split over both along its second. XLA finds no way
from one split to the other, warns, and gathers the whole array on every device to keep
an eighth of it. shardfn moves each axis by an all-to-all.
"""

import jax
from beside_jit import Programs, shape
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfn

TARGET, AXES = "h100:8", {"x": 4, "y": 2}
ARRIVES, NEEDED = P("y", None, "x"), P(None, ("x", "y"), None)
SIZE, SMALL = 256, 16


def add(count, a, b, c):
    return count + 1, c + (a + b)


def programs(mesh: Mesh, size: int = SIZE) -> Programs:
    arrives, needed = NamedSharding(mesh, ARRIVES), NamedSharding(mesh, NEEDED)
    args = shape(), *[shape(size, size, size)] * 3

    def as_reported(count, a, b, c):
        d = jax.lax.with_sharding_constraint(a + b, needed)
        return count + 1, c + d

    whole = NamedSharding(mesh, P())
    stored = whole, arrives, arrives, needed
    run = jax.jit(as_reported, in_shardings=stored, out_shardings=(whole, needed))
    specs = ARRIVES, ARRIVES, NEEDED
    step = shardfn.fully_shard(add, mesh, axis=("x", "y"), batch_spec=specs)
    return {"jit": lambda: run.lower(*args), "shardfn": lambda: step.lower(*args)}
