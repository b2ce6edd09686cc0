"""Which arguments of a step come back, and where in what it returns.

In: what becomes of the arguments, and which results are like them. Out: one result for
each argument that is updated there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardfn._core.call_arguments import (
    FIRST,
    Path,
    Position,
)
from shardfn._trace.argument_flow import (
    ArgumentFlow,
    dimmed,
    is_array,
    is_like_rows,
    same,
)
from shardfn._trace.matching import matched


def is_first(arguments: Mapping[Position, Any], out: Any) -> bool:
    """Whether the first result has the structure of the first argument: it is the new
    state, or one with a mistake that the trace reports. An array has to match."""
    if 0 not in arguments or not isinstance(out, (tuple, list)) or not out:
        return False
    given = arguments[0]
    if jax.tree.structure(given) != jax.tree.structure(out[0]):
        return False
    return not is_array(given) or same(given, out[0])


def returned_pairs(
    flow: ArgumentFlow, alike: Mapping[Position, Sequence[Path]]
) -> dict[Position, Path]:
    """The arguments that come back, and where: those that are updated there, in
    order, in place rather than with their elements elsewhere; and the first as the
    first result."""
    kept = {
        p: [path for path in paths if flow.is_kept(p, path, in_place=True)]
        or [path for path in paths if flow.is_kept(p, path)]
        for p, paths in alike.items()
    }
    outermost = [path for paths in kept.values() for path in paths]
    options = {
        p: [path for path in paths if not _lies_in(path, outermost)]
        for p, paths in kept.items()
    }
    chosen = matched(options)
    may_be_first = is_first(flow.arguments, flow.out)
    is_free = 0 not in chosen and FIRST not in chosen.values()
    if may_be_first and is_free and not flow.is_gradient(0, FIRST):
        # What may be rows and is computed anew is rather a result that looks so.
        if not (chosen and _is_anew(0, flow, alike)):
            chosen[0] = FIRST
    return {p: chosen[p] for p in flow.arguments if p in chosen}


def _is_anew(
    position: Position, flow: ArgumentFlow, alike: Mapping[Position, Sequence[Path]]
) -> bool:
    """Whether an argument that may be rows is not what the first result was."""
    may_be = is_like_rows(flow.arguments[position]) and bool(
        dimmed(flow.arguments[position])
    )
    is_alike = FIRST in alike.get(position, ())
    return may_be and is_alike and flow.is_new(position, FIRST)


def _lies_in(path: Path, others: Sequence[Path]) -> bool:
    """Whether a path leads to something inside what another leads to."""
    return any(len(o) < len(path) and path[: len(o)] == o for o in others)
