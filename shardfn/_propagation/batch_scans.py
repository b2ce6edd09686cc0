"""Loops over the rows of the batch: each device may run those of its own rows.

In: a scan and the shardings that its operands have. Out: how to run it on local rows,
if its iterations do not depend on each other but for sums that they add to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfn._core.compat import ADDITIONS
from shardfn._core.limits import LOOP_BYTES
from shardfn._core.program import Atom, Node, Program
from shardfn._core.sharding import Axes, Sharding, Split, Unreduced
from shardfn._core.sizes import nbytes


@dataclass(frozen=True, slots=True)
class RowLoop:
    """Shardings of a loop over local rows, in which nothing is split.

    Attributes:
      operands: constants and carries that stay as they are whole, other carries terms
        of a sum, scanned operands split.
      results: the same for the carries, stacked results split.
    """

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]


def row_loop(
    node: Node, avals: Sequence[Any], states: Sequence[Sharding], axes: Axes
) -> RowLoop | None:
    """How a scan runs on each device's own rows, or None if it should not.

    It should not if an iteration needs another's result, if the rows are microbatches
    whose own rows can be split, or if what all iterations share is large.

    Args:
      node: the scan.
      avals: avals of its operands.
      states: their shardings now, none of them unreduced.
      axes: the mesh axes.

    Returns:
      The loop's shardings.
    """
    (body,) = node.bodies
    (region,) = node.regions
    start = region.slices.start
    rows: Sharding = tuple(Split(0) if n > 1 else None for n in axes.sizes)
    terms: Sharding = tuple(Unreduced() if n > 1 else None for n in axes.sizes)
    scanned = zip(node.sliced(avals), node.sliced(states), strict=True)
    split = [aval.shape for aval, state in scanned if _as_came(state) == rows]
    if rows == axes.replicated or not split:
        return None
    if node.microbatches and _can_split_inside(split, axes):
        return None
    carried = [(body.inputs[i], body.outputs[j]) for j, i in region.loops]
    kept = [value == output for value, output in carried]
    if not all(k or _adds_up(body, *c) for k, c in zip(kept, carried, strict=True)):
        return None
    if sum(map(nbytes, avals[:start])) > LOOP_BYTES or not _can_differ(body):
        return None
    whole = (axes.replicated,) * len(region.constants)
    sums = tuple(axes.replicated if k else terms for k in kept)
    return RowLoop(
        operands=(*whole, *sums, *(rows,) * len(region.slices)),
        results=(*sums, *(rows,) * len(region.stacks)),
    )


def _as_came(state: Sharding) -> Sharding:
    """A sharding without the note that rows of the batch have been moved."""
    return tuple(replace(s, moved=False) if isinstance(s, Split) else s for s in state)


def _can_split_inside(shapes: Sequence[tuple[int, ...]], axes: Axes) -> bool:
    """Whether the devices divide the rows of a microbatch."""
    return all(shape[1] % axes.devices == 0 for shape in shapes if len(shape) > 1)


def _adds_up(body: Program, value: int, output: Atom) -> bool:
    """Whether a carry is only ever added to: `output` is `value` plus other terms."""
    while value != output:
        users = [node for node in body.nodes for atom in node.inputs if atom == value]
        if len(users) != 1 or value in body.outputs:
            return False
        if users[0].eqn.primitive not in ADDITIONS:
            return False
        (value,) = users[0].outputs
    unused = all(value not in node.inputs for node in body.nodes)
    return unused and body.outputs.count(value) == 1


def _can_differ(body: Program) -> bool:
    """Whether devices may run `body` on different rows: it has no effects that one
    device alone should have, no derivative rules of the user's, and no constraint that
    splits one row over all devices."""
    together = ("custom", "constrain")
    if any(node.eqn.effects or node.kind in together for node in body.nodes):
        return False
    return all(_can_differ(inner) for node in body.nodes for inner in node.bodies)
