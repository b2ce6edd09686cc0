"""What becomes of the arguments that the user says are state.

In: `state_argnums`, the avals of the arguments and of what the step returns. Out: which
of them come back, and where; the others are read only.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.tree_util import SequenceKey

from shardfn._core.call_arguments import Path, Position, StateArguments
from shardfn._trace.argument_flow import same
from shardfn._trace.forward_only import returns_no_state
from shardfn._trace.state_texts import found_note


def asked_states(
    arguments: Mapping[Position, Any],
    names: Mapping[Position, str],
    out: Any,
    asked: tuple[int, ...],
    is_read: bool,
) -> StateArguments:
    """The meaning of arguments of which the user says which are state.

    Those that are like no result, but for those that others are, are read only, perhaps
    all. The others come back as the first results, in the order of their names here.

    Args:
      arguments: pytrees of `ShapeDtypeStruct`, in order.
      names: what to call them in messages.
      out: what the step returns, a pytree of `ShapeDtypeStruct`.
      asked: the positions that the user names.
      is_read: whether all of them are read only.

    Returns:
      The state, and where it comes back.
    """
    if is_read:
        note = found_note(names, {}, (), asked)
        return StateArguments(asked, (), notes=(note,), by_hand=True)
    state = _coming_back({p: arguments[p] for p in asked if p in arguments}, out)
    fixed = [p for p in asked if p in arguments and p not in state]
    state = [p for p in asked if p not in fixed]
    is_alone = len(state) == 1 and same(out, arguments.get(state[0]))
    if not fixed:
        return StateArguments(asked, ((),) if is_alone else None, by_hand=True)
    pairs: dict[Position, Path] = {p: (SequenceKey(i),) for i, p in enumerate(state)}
    if is_alone:
        pairs[state[0]] = ()
    note = found_note(names, pairs, state, fixed)
    order, results = (*state, *fixed), tuple(pairs.values())
    return StateArguments(order, results, notes=(note,), by_hand=True)


def _coming_back(asked: Mapping[Position, Any], out: Any) -> set[Position]:
    """The arguments that are like a result that is like no argument before them; those
    that have all of its types count first."""
    results = [*out] if type(out) in (tuple, list) else [out]
    found: set[Position] = set()
    for is_like in (same, _may_be):
        for position, argument in asked.items():
            like = [x for x in results if x is not None and is_like(x, argument)]
            if position not in found and like:
                found.add(position)
                results[next(i for i, x in enumerate(results) if x is like[0])] = None
    return found


def _may_be(result: Any, argument: Any) -> bool:
    """Whether a result may be an argument that comes back changed by mistake."""
    return bool(jax.tree.leaves(result)) and not returns_no_state([argument], result)
