"""`lax.scan` with a part that runs some iterations ahead.

In: the body of a scan, and parts that make values for it from what is scanned over.
Out: a scan that carries these values: each iteration runs the parts for a later one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.barrier import barrier

Arrays = Sequence[Any]


@dataclass(frozen=True, slots=True)
class AheadPart:
    """What runs ahead: `make(slices)`, given those of `slices` that it reads.

    Attributes:
      lead: how many iterations ahead it runs.
      make: from slices of what is scanned over to what the body gets.
      reads: which slices it reads; others are None.
    """

    lead: int
    make: Callable[[Arrays], Arrays]
    reads: frozenset[int]


def scan_ahead(
    body: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]],
    *,
    parts: Sequence[AheadPart],
    init: Arrays,
    xs: Arrays,
    length: int,
    reverse: bool,
    unroll: Any,
) -> tuple[Arrays, Arrays]:
    """Scans `body(carry, x, made)`, where `made` is what all parts make of `x`.

    The first `lead` iterations' values are made in front of the loop, once its carries
    are there: a loop that goes back over the same layers must not share them. The last
    `lead` iterations make those of the last one again, which nothing uses: a loop
    cannot leave out a collective now and then and still overlap it.

    Args:
      body: one iteration.
      parts: what runs ahead.
      init: the carries.
      xs: what is scanned over.
      length: number of iterations.
      reverse: whether to begin at the end.
      unroll: as in `lax.scan`.

    Returns:
      The last carries and the stacked results.
    """

    def made(part: AheadPart, iteration: Any, after: Arrays = ()) -> tuple[Any, ...]:
        at = jnp.minimum(iteration, length - 1)
        at = length - 1 - at if reverse else at
        slices = [
            jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False),
                x if i in part.reads else None,
            )
            for i, x in enumerate(xs)
        ]
        if after:
            read, treedef = jax.tree.flatten(slices)
            read = barrier(*read, *after)[: len(read)]
            slices = jax.tree.unflatten(treedef, read)
        return tuple(part.make(slices))

    def iteration(carry: Any, x: Any) -> tuple[Any, Any]:
        carry, queues, number = carry
        coming = [made(part, number + part.lead) for part in parts]
        carry, ys = body(carry, x, [value for queue in queues for value in queue[0]])
        queues = tuple(
            (*queue[1:], values) for queue, values in zip(queues, coming, strict=True)
        )
        return (tuple(carry), queues, number + 1), tuple(ys)

    queues = tuple(
        tuple(made(part, jnp.int32(k), after=init) for k in range(part.lead))
        for part in parts
    )
    (carry, *_), ys = lax.scan(
        iteration,
        (tuple(init), queues, jnp.int32(0)),
        tuple(xs),
        length=length,
        reverse=reverse,
        unroll=unroll,
    )
    return carry, ys
