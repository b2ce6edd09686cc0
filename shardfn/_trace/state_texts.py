"""What people read of a step's arguments: notes, and errors.

In: what was found of them, and how they are called. Out: lines for `repr(step)`, the
plan and messages; or an error that shows what might be meant.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import jax
from jax.tree_util import SequenceKey, tree_flatten_with_path

from shardfn._core.argnums_text import (
    argnums_text,
    positions_advice,
    read_only_advice,
)
from shardfn._core.call_arguments import FIRST, Path, Position, parts
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._trace.argument_flow import is_like_rows

Names = Mapping[Position, str]


def found_note(
    names: Names,
    pairs: Mapping[Position, Path],
    state: Sequence[Position],
    read_only: Sequence[Position],
) -> str:
    """The line that says what is state."""
    each = "; ".join(f"argument {names[p]}, {where(pairs[p])}" for p in state)
    fixed = "; ".join(f"argument {names[p]}" for p in read_only)
    return f"state: {each or 'none comes back'}" + f"; read only: {fixed}" * bool(fixed)


def other_note(
    name: str, path: Path, is_cache: bool, with_it: Sequence[Position]
) -> str:
    """The line on an argument that comes back and is none; `with_it` if it were."""
    how = "is written in place: it is split like a batch, and donated"
    if not is_cache:
        how = (
            "may be a batch that the step changes: it is taken for one. If it is "
            f"state, pass {argnums_text(with_it)}"
        )
        if advice := positions_advice(with_it):
            how += f".{advice}".removesuffix(".")
    return f"argument {name} comes back as {where(path)} and {how}"


def read_only_note(name: str, like_state: bool) -> str:
    """The line on an argument that is stored like state, and does not come back."""
    why = "is like the state" if like_state else "has no rows of the batch"
    return (
        f"argument {name} {why} and does not come back: it is stored as state is, and "
        "not donated"
    )


def batch_notes(
    arguments: Mapping[Position, Any], names: Names, others: Collection[Position]
) -> list[str]:
    """Lines on trees whose leaves differ in rows, and that are taken for batches: all
    but some others."""
    return [
        f"argument {names[p]} does not come back: it is taken for a batch, though its "
        f"leaves differ in rows. {read_only_advice(p)}"
        for p, argument in arguments.items()
        if p not in others and not is_like_rows(argument)
    ]


def refuse_readings(
    names: Names,
    pairs: Mapping[Position, Path],
    certain: Sequence[Position],
    has_cache: bool,
) -> NoReturn:
    """Raises for arguments that may be state or not, but for those that are."""
    lines = "".join(
        f"  argument {names[p]}, which comes back as {where(path)}, "
        + ("is state\n" if p in certain else _MAY_BE)
        for p, path in pairs.items()
    )
    all_of, first = argnums_text([*pairs]), next(iter(pairs))
    if certain:
        advice = (
            f"Return what is state first, in the order of the arguments, and pass "
            f"{all_of} to fully_shard if all of that is, {argnums_text(certain)} if "
            "the other is a batch."
        )
    else:
        return_it = "" if pairs[first] == () else ", and return it first"
        advice = (
            f"Pass {argnums_text([first])} to fully_shard if that is the state"
            f"{return_it}. If it is a batch, pass the position of the state, which is "
            "then read only, or return the state, too."
        )
    advice += positions_advice([*pairs] if certain else [first])
    if has_cache:
        advice += (
            " If it is a cache of the batch, return the parameters too, unchanged: "
            "they are the state."
        )
    raise ShardingError(
        f"it cannot be told which arguments of {step_name()} are its state.\n"
        f"{lines}{called()}{advice}"
    )


_MAY_BE = "may be the state, or a batch that the step changes\n"


def refuse_gradients(name: str, position: Position, path: Path) -> NoReturn:
    """Raises for a step that returns gradients and no new state."""
    first = "" if path in ((), FIRST) else "return it first, and "
    raise ShardingError(
        f"{step_name()} returns no state: {where(path)}, which has the form of "
        f"argument {name}, is a gradient, and no argument comes back updated.\n"
        f"{called()}"
        "Update the parameters in the step, and return them: "
        "optax.apply_updates(params, updates). A step that only takes gradients "
        "returns the parameters, too, unchanged: (params, grads). If it is the new "
        f"state all the same, {first}pass {argnums_text([position])} to fully_shard."
    )


def where(path: Path) -> str:
    """How a place in what a step returns is called."""
    if not path:
        return "the result"
    keys = [
        str(key.idx) if isinstance(key, SequenceKey) else jax.tree_util.keystr((key,))
        for key in path
    ]
    return f"result {'/'.join(keys)}"


def changes(
    arguments: Mapping[Position, Any],
    names: Names,
    out: Any,
    state: Mapping[Position, Path],
) -> list[str]:
    """Lines on arguments that would be state but for a leaf that changes its type."""
    found = []
    for position, argument in arguments.items():
        structure = jax.tree.structure(argument)
        if position in state or structure.num_leaves < 2:
            continue
        for path, tree in parts(out, 1):
            if path in state.values() or jax.tree.structure(tree) != structure:
                continue
            if changed := change(argument, tree):
                found.append(
                    f"argument {names[position]} comes back as {where(path)} with "
                    f"{changed}: it is taken for a batch"
                )
    return found


def change(old: Any, new: Any) -> str:
    """The first leaf that differs in type between two pytrees of one structure; "" if
    none does."""
    for (path, a), b in zip(
        tree_flatten_with_path(old)[0], jax.tree.leaves(new), strict=True
    ):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            before, after = (f"{x.dtype}{list(x.shape)}" for x in (a, b))
            return f"leaf '{name}' changed from {before} to {after}"
    return ""
