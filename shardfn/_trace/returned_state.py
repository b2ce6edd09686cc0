"""What a step returns as its new state, compared with the state that it takes.

In: what the step returns, and the state's leaves. Out: nothing; or an error that says
which leaves are missing, new or of another type, or that no state comes back.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.tree_util import tree_flatten_with_path

from shardfn._core.call_arguments import (
    StateArguments,
    children,
    part,
)
from shardfn._core.errors import (
    ShardingError,
    called,
    listed,
    step_name,
)
from shardfn._core.leaves import Leaf, leaf_name, path_name
from shardfn._core.named_states import NamedStates
from shardfn._core.shown_limits import SHOWN_STATIC
from shardfn._core.static_leaves import Static
from shardfn._trace.containers import Closed, opened
from shardfn._trace.state_texts import change


def check_state(
    out: Any, states: Sequence[Any], meaning: StateArguments, leaves: Sequence[Leaf]
) -> None:
    """Raises if the new state is not like the old one."""
    is_first = meaning.results is None
    if is_first and (not isinstance(out, (tuple, list)) or len(out) < len(states)):
        _no_state(out, states, leaves, meaning.by_hand)
    new: Any = tuple(part(out, path) for path in meaning.places)
    new = (*new, *states[len(new) :])
    new, old = (new[0], states[0]) if len(states) == 1 else (new, states)
    if isinstance(states, NamedStates):
        new = NamedStates(states.names, new)
    new_flat, new_tree = tree_flatten_with_path(new)
    _, old_tree = tree_flatten_with_path(old)
    if new_tree != old_tree:
        old_names = {leaf.name for leaf in leaves}
        new_names = {path_name(path) for path, _ in new_flat}
        missing, extra = sorted(old_names - new_names), sorted(new_names - old_names)
        if len(leaves) and not old_names & new_names:
            _no_state(out, states, leaves, meaning.by_hand)
        if not missing and not extra:
            try:
                both = opened(old), opened(new)
            except Exception:  # of a class that takes arrays alone
                both = None, None
            _check_static(*both)
        raise ShardingError(
            f"{step_name()} changes the structure of its state: "
            f"missing leaves {listed(missing)}, new leaves {listed(extra)}"
            + ("" if missing or extra else ", the same leaves in other containers")
            + f".\n{called()}"
            "Return the new state with the structure of the old one; put other values "
            "in the metrics."
        )
    for leaf, (path, new_leaf) in zip(leaves, new_flat, strict=True):
        old_type = f"{leaf.aval.dtype}{list(leaf.aval.shape)}"
        new_type = f"{new_leaf.dtype}{list(new_leaf.shape)}"
        if old_type != new_type:
            raise ShardingError(
                f"{step_name()} changes state leaf '{leaf_name(path)}' from {old_type} "
                f"to {new_type}.\n"
                f"{called()}"
                f"{_weakly(leaf.aval, new_leaf)}"
                "A sharded state keeps its shapes and dtypes: cast or reshape the new "
                "value back, or start with the type that the step returns."
            )


def _check_static(old: Any, new: Any, path: tuple[Any, ...] = ()) -> None:
    """Raises if a container of one type has other static data in two states."""
    before, after = (jax.tree.structure(x).node_data() for x in (old, new))
    if before is None or after is None or before[0] is not after[0]:
        return
    if before[1] != after[1]:
        name, was, becomes = _changed(old, new) or _differing(before[1], after[1])
        part = f"{name or 'a part'} of {type(old).__name__}"
        if isinstance(old, Static):
            part, was, becomes = f"leaf '{path_name(path)}'", old, new
        raise ShardingError(
            f"{step_name()} changes static data of its state: {part} "
            f"from {_short(was)} to {_short(becomes)}.\n{called()}"
            "It is no array, and what is compiled has the old one. Keep what changes "
            "in an array, of a module in nnx.Variable(jnp.array(0)), or leave it."
        )
    for key, child in (children(old) or {}).items():
        _check_static(child, (children(new) or {}).get(key), (*path, key))


def _changed(old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """The attribute of an object that another one has not, or has with another value,
    which is no array."""
    both = _attributes(old), _attributes(new)
    for name in both[1]:
        x, y = (attributes.get(name) for attributes in both)
        is_static = not jax.tree.leaves((x, y)) or isinstance(y, str | bool | int)
        if is_static and not name.startswith("_") and x != y:
            return _differing(x, y, name)
    return None


def _differing(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any]:
    """Where two pieces of static data differ: in which of `(name, value)`."""
    if isinstance(old, tuple | list) and isinstance(new, tuple | list):
        if new and isinstance(new[0], str):
            name = new[0]
        pairs = [(x, y) for x, y in zip(old, new, strict=False) if x != y]
        if len(old) != len(new):
            pairs = [((), x) for x in new if x not in old]
    else:
        mine, others = map(_attributes, (old, new))
        pairs = [(mine[k], others.get(k)) for k in mine if mine[k] != others.get(k)]
    if pairs:
        return _differing(*pairs[-1], name)
    return name, None if old == () else old, new


def _attributes(x: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(x):
        return {f.name: getattr(x, f.name, None) for f in dataclasses.fields(x)}
    return getattr(x, "__dict__", {})


def _short(x: Any) -> str:
    text = repr(x)
    return f"{text[:SHOWN_STATIC]}{'...' * (len(text) > SHOWN_STATIC)}"


def _weakly(old: Any, new: Any) -> str:
    """What becomes of a weakly typed leaf elsewhere."""
    if not old.weak_type or old.shape != new.shape:
        return ""
    return (
        "The leaf is weakly typed, as Python numbers are: jax.jit would compile again "
        f"with {new.dtype} in its second call, and lax.scan would cast it before its "
        f"first iteration. Start with jnp.{new.dtype}(...). "
    )


def _no_state(
    out: Any, states: Sequence[Any], leaves: Sequence[Leaf], by_hand: bool
) -> NoReturn:
    number = len(states)
    what = "a new state" if number == 1 else f"{number} new states"
    advice = (
        "Return (new_state, metrics), the new state like the old one; a step that only "
        "evaluates returns the state unchanged."
    )
    if isinstance(out, jax.ShapeDtypeStruct):
        advice = (
            "fully_shard takes the whole training step, not a model or its loss: take "
            "the gradient and update the state in it (see From PyTorch FSDP2). "
        ) + advice
    results = out if isinstance(out, (tuple, list)) else ()
    form = jax.tree.structure(states[0])
    if number == 1 and form in map(jax.tree.structure, results):
        at = list(map(jax.tree.structure, results)).index(form)
        advice = f"Result {at} has the state's form"
        if changed := change(opened(states[0]), opened(results[at])):
            advice += (
                f", but {changed}: cast or reshape it back, and it is found there."
            )
        elif by_hand:
            advice += ": return it first, or leave state_argnums out."
        else:
            advice += ": return it first."
    elif len(results) < number:
        advice += (
            " Modules of flax.nnx that it changes in place have to be arguments of "
            "their own, and state_argnums has to be left out (see From flax.nnx). "
            "Within shard_map or pmap they are copies: return the module, too."
        )
    raise ShardingError(
        f"{step_name()} returns no state: it returned {_described(out, leaves)}, where "
        f"{what} with the leaves {listed([leaf.name for leaf in leaves])} must come "
        f"first.\n{called()}{advice}"
    )


def _described(out: Any, leaves: Sequence[Leaf]) -> str:
    """What a step returned, in a few words."""
    flat, _ = tree_flatten_with_path(out)
    if out is None:
        return "None"
    if isinstance(out, jax.ShapeDtypeStruct):
        return f"{out.dtype}{list(out.shape)}"
    if leaves and {path_name(p) for p, _ in flat} == {leaf.name for leaf in leaves}:
        return "the new state alone"
    name = out.kind if isinstance(out, Closed) else type(out).__name__
    of = f" of {len(out)}" if isinstance(out, (tuple, list)) else ""
    return f"a {name}{of}"
