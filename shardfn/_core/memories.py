"""The memories that a leaf of the state may live in: its device's, or the host's.

In: nothing. Out: their names, as options, plans and reports have them, and JAX's.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding

DEVICE, HOST = "device", "host"

HOST_KIND = "pinned_host"
"""JAX's name of the host's memory that devices copy from and to on their own."""


def kind_of(memory: str) -> str | None:
    """JAX's name of a memory, for a sharding; None for the device's own."""
    return HOST_KIND if memory == HOST else None


def memory_of(sharding: Sharding) -> str:
    """The memory that arrays of a sharding live in."""
    return HOST if (sharding.memory_kind or "").endswith("host") else DEVICE


def space_of(memory: str) -> Any:
    """The memory as JAX's types name it."""
    return jax.memory.Space.Host if memory == HOST else jax.memory.Space.Device


def is_on_host(x: Any) -> bool:
    """Whether an array, traced or not, lives in the host's memory."""
    space = getattr(jax.typeof(x), "memory_space", None)
    return space == jax.memory.Space.Host


def on_device(compute: Callable[[jax.Array], jax.Array], x: Any) -> jax.Array:
    """`compute(x)` in the memory of `x`, computed on the device: what lives on the
    host may only be copied."""
    if not is_on_host(x):
        return compute(x)
    made = compute(jax.device_put(x, space_of(DEVICE)))
    return jax.device_put(made, space_of(HOST))
