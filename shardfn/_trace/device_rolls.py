"""What `lax.ppermute` does, where devices are a dimension that `jax.vmap` names.

In: an array of one device, and who sends to whom. Out: what the device receives, as a
roll along the dimension of devices; zeros where nobody sends.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

Pairs = tuple[tuple[int, int], ...]


def handed_on(x: jax.Array, name: str, pairs: Pairs) -> jax.Array:
    """What a device of mesh axis `name` receives.

    Args:
      x: what it sends.
      name: the only axis that a `jax.vmap` around this names.
      pairs: the sender and the receiver of each message; none receives twice.

    Returns:
      The sender's array, or zeros.
    """

    @custom_vmap
    def received(x: jax.Array, device: jax.Array) -> jax.Array:
        return x

    @received.def_vmap
    def _(size: int, is_batched: list[bool], x: jax.Array, device: Any) -> Any:
        if not is_batched[0]:
            x = jnp.broadcast_to(x, (size, *x.shape))
        return _moved(x, pairs), True

    return received(x, lax.axis_index(name))  # the axis batches a device's own number


def _moved(x: jax.Array, pairs: Pairs) -> jax.Array:
    """`x[sender]` at each receiver, along dimension 0."""
    size = x.shape[0]
    shifts = {(receiver - sender) % size for sender, receiver in pairs}
    senders = dict((receiver, sender) for sender, receiver in pairs)
    if len(shifts) == 1:
        moved = jnp.roll(x, *shifts, axis=0)
    else:
        moved = jnp.stack([x[senders.get(i, i)] for i in range(size)])
    if len(senders) == size:
        return moved
    receives = jnp.array([i in senders for i in range(size)])
    dims = tuple(range(1, x.ndim))
    return jnp.where(jnp.expand_dims(receives, dims), moved, jnp.zeros_like(moved))
