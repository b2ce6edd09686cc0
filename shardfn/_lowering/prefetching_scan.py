"""`lax.scan` with a part that runs some iterations ahead.

In: the body of a scan, and parts that make values for it from what is scanned over.
Out: a scan that carries these values: each iteration runs the parts for a later one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.barrier import barrier
from shardfn._core.plan import Site

Arrays = Sequence[Any]


@dataclass(frozen=True, slots=True)
class AheadPart:
    """What runs ahead.

    Attributes:
      lead: how many iterations ahead it runs.
      reads: which slices of what is scanned over it reads; others are None.
      moved: from slices to what its gathers move, by where they are, and whether all
        that it makes is gathered.
      make: from slices, and what is to be moved in place of that, to what the body
        gets.
      tied: gathers; what they move the body is given, too, and hands on.
      handed: whether the body is given what is made, and hands it on.
    """

    lead: int
    reads: frozenset[int]
    moved: Callable[[Arrays], tuple[dict[Site, Any], bool]]
    make: Callable[[Arrays, Mapping[Site, Any]], Arrays]
    tied: tuple[Site, ...] = ()
    handed: bool = False


def scan_ahead(
    body: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]],
    *,
    parts: Sequence[AheadPart],
    init: Arrays,
    xs: Arrays,
    length: int,
    reverse: bool,
    unroll: Any,
) -> tuple[Arrays, Arrays]:
    """Scans `body(carry, x, made)`, where `made` is what all parts make of `x`, and
    behind it what of a later iteration the body hands on.

    The first `lead` iterations' values are made in front of the loop, gathered once its
    carries are there: a loop that goes back over the same layers must not share them.
    The last `lead` iterations make those of the last one again, which nothing uses: a
    loop cannot leave out a collective now and then and still overlap it.

    Args:
      body: one iteration: the carries, what is stacked, and what is handed on.
      parts: what runs ahead.
      init: the carries.
      xs: what is scanned over.
      length: number of iterations.
      reverse: whether to begin at the end.
      unroll: as in `lax.scan`.

    Returns:
      The last carries and the stacked results.
    """

    def sliced(part: AheadPart, iteration: Any) -> list[Any]:
        at = jnp.minimum(iteration, length - 1)
        at = length - 1 - at if reverse else at
        return [
            jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False),
                x if i in part.reads else None,
            )
            for i, x in enumerate(xs)
        ]

    def first(part: AheadPart, iteration: Any) -> Arrays:
        slices = sliced(part, iteration)
        moved, is_all = part.moved(slices)
        if not is_all:
            return part.make(behind_init(slices), {})
        waits = behind_init([*moved.values()])
        return part.make(slices, dict(zip(moved, waits, strict=True)))

    def behind_init(values: Any) -> Any:
        leaves, treedef = jax.tree.flatten(values)
        return jax.tree.unflatten(treedef, barrier(*leaves, *init)[: len(leaves)])

    def iteration(carry: Any, x: Any) -> tuple[Any, Any]:
        carry, queues, number = carry
        coming = [_Coming(part, sliced(part, number + part.lead)) for part in parts]
        ready = [value for queue in queues for value in queue[0]]
        carry, ys, handed = body(
            carry, x, [*ready, *(y for c in coming for y in c.given)]
        )
        rest = iter(handed)
        queues = tuple(
            (*queue[1:], tuple(c.made([next(rest) for _ in c.given])))
            for c, queue in zip(coming, queues, strict=True)
        )
        return (tuple(carry), queues, number + 1), tuple(ys)

    queues = tuple(
        tuple(tuple(first(part, jnp.int32(k))) for k in range(part.lead))
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


class _Coming:
    """What an iteration makes for a later one.

    Attributes:
      given: what the body gets of it.
    """

    def __init__(self, part: AheadPart, slices: list[Any]) -> None:
        self.part, self.slices, self.given = part, slices, list[Any]()
        if part.handed:
            self.given = list(part.make(slices, {}))
        elif part.tied:
            moved, _ = part.moved(slices)
            self.given = [moved[site] for site in part.tied]

    def made(self, handed: Arrays) -> Arrays:
        """It, given what the body has handed on."""
        if self.part.handed:
            return handed
        given = dict(zip(self.part.tied, handed, strict=True))
        return self.part.make(self.slices, given)
