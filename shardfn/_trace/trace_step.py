"""From a user's step to a checked jaxpr.

In: the step and avals of its arguments. Out: its jaxpr, and the structure of what it
returns; or an error that says what the step does that cannot be sharded.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.tree_util import tree_flatten_with_path

from shardfn._core import compat
from shardfn._core.call_arguments import (
    NamedStates,
    Rest,
    StateArguments,
    by_place,
    new_leaves,
    part,
    rejoined,
)
from shardfn._core.errors import (
    UNKNOWN,
    ShardingError,
    called,
    listed,
    nested,
    step_name,
    where,
    where_in,
)
from shardfn._core.leaves import Leaf, leaf_name, path_name
from shardfn._core.program import Program
from shardfn._core.sharding import Axes, Sharding
from shardfn._trace.containers import Closed, close, on_closed, opened
from shardfn._trace.inner_shard_map import on_whole_arrays
from shardfn._trace.jaxpr_to_program import make_program
from shardfn._trace.per_device import GlobalStep, as_global, reaches_axis
from shardfn._trace.state_texts import change
from shardfn._trace.typed_trace import typed_jaxpr, typed_once


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced step.

    Attributes:
      jaxpr: closed jaxpr on logical global shapes, of the step's arguments in their own
        order. A plan's order is: the state's leaves and the batch's in, the new
        state's and the others out.
      out_tree: structure of what the step returns.
      given: for each of those, which argument of the jaxpr it is.
      order: for each output, which leaf of that it is; None for a leaf of the state
        that is read only, and stays as it is.
      meaning: what the step's arguments are.
      kept: `(output, input)` for every leaf of a cache, which stays split as it is.
      program: the jaxpr as a program, if that was made to find the state.
    """

    jaxpr: Any
    out_tree: Any
    given: tuple[int, ...]
    order: tuple[int | None, ...]
    meaning: StateArguments
    kept: tuple[tuple[int, int], ...] = ()
    program: Program | None = None

    def returned(self, out: Sequence[Any]) -> Any:
        """What the step returns, of its outputs."""
        leaves: list[Any] = [None] * self.out_tree.num_leaves
        for i, x in zip(self.order, out, strict=True):
            if i is not None:
                leaves[i] = x
        return jax.tree.unflatten(self.out_tree, leaves)


@dataclass(slots=True)
class Trace:
    """A trace of the step's arguments in their own order.

    Attributes:
      jaxpr: the closed jaxpr.
      out: what the step returns, a pytree of `ShapeDtypeStruct`.
      made: the jaxpr as a program, if it was made.
      is_final: whether it is what will be planned: of a step on global arrays, whose
        types name no shardings.
    """

    jaxpr: Any
    out: Any
    is_final: bool = True
    made: Program | None = None

    def program(self) -> Program:
        """The jaxpr as a program."""
        if self.made is None:
            # Primitives are traced anew to expand them.
            with compat.at_top_level(), compat.broadcasts_ranks():
                self.made = make_program(self.jaxpr)
        return self.made


def trace_once(
    step: Callable[..., Any],
    args: Any,
    axes: Axes,
    mesh: jax.sharding.AbstractMesh | None = None,
) -> Trace | None:
    """The trace of `step` on `args`, or None if it fails; `mesh` is the caller's. Of a
    step per device only what it returns is as it will be: it is traced on the global
    batch. One that names shardings is traced as if some arguments were a batch."""
    is_set = jax.sharding.get_abstract_mesh()
    typed: jax.sharding.AbstractMesh | None = None
    for is_global in (True, False):
        bound = [] if is_global else zip(axes.names, axes.sizes, strict=True)
        with contextlib.suppress(Exception), compat.at_top_level():
            try:
                made, out = jax.make_jaxpr(step, axis_env=[*bound], return_shape=True)(
                    *args
                )
            except ValueError as error:
                typed = typed or compat.mesh_lacking(error, is_set, mesh)
                raise
            whole = on_whole_arrays(compat.without_refs(made), axes)
            return Trace(whole, out, is_global)
    if typed is not None:
        with compat.at_top_level():
            for made, out in typed_once(step, args, axes, typed):
                with contextlib.suppress(Exception):
                    whole = on_whole_arrays(compat.without_refs(made), axes)
                    return Trace(whole, out, is_final=False)
    return None


def trace(
    step: GlobalStep,
    states: tuple[Any, ...],
    batch: Rest,
    leaves: Sequence[Leaf],
    split: Sequence[Sharding],
    axes: Axes,
    mesh: jax.sharding.AbstractMesh | None,
    names_axes: Callable[[], bool],
    own: Sequence[bool] = (),
    known: Trace | None = None,
) -> Traced:
    """Traces `step` and checks that it returns a state like the one it takes.

    Args:
      step: called as `step(states, batch)`.
      states: the state arguments, pytrees of `ShapeDtypeStruct`, closed or not.
      batch: the other arguments.
      leaves: the leaves of `states`.
      split: shardings of the batch's leaves.
      axes: the mesh axes. A step that uses their names is a step for one device.
      mesh: the mesh as the caller made it, whose shardings the step may name.
      names_axes: whether their names occur in the step's code.
      own: per leaf of `states`, whether each device keeps its own row of it.
      known: a trace on these arguments in the step's own order.

    Returns:
      The traced step.

    Raises:
      ShardingError: the step is impure, returns no state, or changes its structure.
    """
    flags = compat.hiding_flags()
    if flags:
        raise ShardingError(
            f"the JAX flag {flags[0]} is on: it hides the bodies of control flow from "
            "fully_shard, which has to see every operation.\n"
            f"{called()}"
            f'Turn it off: jax.config.update("{flags[0]}", False).'
        )
    meaning = batch.meaning
    if any(own) or (known is not None and not known.is_final):
        known = None
    is_set = jax.sharding.get_abstract_mesh()
    if known is None:
        structures: list[Any] = []
        run = on_closed(lambda old, rest: step(old, Rest(rest, meaning)), structures)
        closed = tuple(map(close, states)), Rest([*map(close, batch)], meaning)
        try:
            with compat.at_top_level():
                try:
                    made, out = _jaxpr(run, *closed, split, axes, names_axes, own)
                except ValueError as error:
                    typed = compat.mesh_lacking(error, is_set, mesh)
                    if typed is None:
                        raise
                    made, out = typed_jaxpr(run, *closed, split, axes, typed)
                known = Trace(on_whole_arrays(compat.without_refs(made), axes), out)
                out_tree = structures[-1]
        except jax.errors.UnexpectedTracerError as error:
            raise leaked_tracer() from error
        given = range(len(jax.tree.leaves((states, batch))))
        if meaning.results is None:
            states = closed[0]
        else:  # found in these containers, so they take abstract values
            states = tuple(map(opened, states))
            known.out = jax.tree.unflatten(out_tree, jax.tree.leaves(out))
    else:
        out_tree = jax.tree.structure(known.out)
        given = _order_given(states, batch)
    _check_effects(known.jaxpr)
    _check_not_mapped(known.jaxpr)
    _check_state(known.out, states, meaning, leaves)
    new = new_leaves(out_tree, meaning)
    rest = sorted({*range(out_tree.num_leaves)} - {*new})
    order = (*new, *[None] * (len(leaves) - len(new)), *rest)
    kept = _kept_leaves(states, batch, out_tree, order)
    return Traced(
        known.jaxpr, out_tree, tuple(given), order, batch.meaning, kept, known.made
    )


def _kept_leaves(
    states: Sequence[Any], batch: Rest, out_tree: Any, order: Sequence[int | None]
) -> tuple[tuple[int, int], ...]:
    """`Traced.kept`."""
    if not batch.meaning.caches:
        return ()
    leaves, treedef = jax.tree.flatten((states, batch))
    given = by_place(rejoined(*jax.tree.unflatten(treedef, range(len(leaves)))))
    outputs = {leaf: j for j, leaf in enumerate(order)}
    made = jax.tree.unflatten(out_tree, map(outputs.get, range(out_tree.num_leaves)))
    return tuple(
        (j, i)
        for place, path in batch.meaning.caches
        for i, j in zip(
            jax.tree.leaves(given[place]),
            jax.tree.leaves(part(made, path)),
            strict=True,
        )
    )


def _order_given(states: Sequence[Any], batch: Rest) -> list[int]:
    """For each leaf of the state and then the batch, which it is of all arguments."""
    leaves, treedef = jax.tree.flatten((states, batch))
    numbers = jax.tree.unflatten(treedef, range(len(leaves)))
    return [int(i) for i in np.argsort(jax.tree.leaves(rejoined(*numbers)))]


def leaked_tracer() -> ShardingError:
    """The error for a step that uses a tracer of an earlier trace."""
    return ShardingError(
        f"{step_name()} is not pure: it uses a tracer that an earlier trace left "
        "behind, for example in a global, a list or an object.\n"
        f"{called()}"
        "Return the value from the step, or pass it in as an argument."
    )


def _jaxpr(
    step: GlobalStep,
    states: tuple[Any, ...],
    batch: Rest,
    split: Sequence[Sharding],
    axes: Axes,
    names_axes: Callable[[], bool],
    own: Sequence[bool],
) -> tuple[Any, Any]:
    """The jaxpr of a global step, or else of a per-device one.

    A step that names a mesh axis is per device. One that fails on the global batch may
    be too, if it spells out local shapes before it names an axis: it is if it comes to
    name one on the batch of one device, and works so. Any other failure is the user's.
    """
    local = as_global(step, axes, split, batch.meaning.places, own)
    try:
        if any(own):
            return jax.make_jaxpr(local, return_shape=True)(states, batch)
        return jax.make_jaxpr(step, return_shape=True)(states, batch)
    except NameError as error:
        _check_axis(error, axes)
    except jax.errors.UnexpectedTracerError:
        raise
    except (TypeError, ValueError):
        if names_axes() and reaches_axis(step, axes, split, states, batch):
            with contextlib.suppress(Exception):
                return jax.make_jaxpr(local, return_shape=True)(states, batch)
        raise
    try:
        return jax.make_jaxpr(local, return_shape=True)(states, batch)
    except NameError as error:
        _check_axis(error, axes)
        raise
    except (AssertionError, NotImplementedError) as error:
        raise ShardingError(
            f"{step_name()} is written per device, and JAX cannot batch one of its "
            f"collectives over all devices: {str(error) or type(error).__name__}.\n"
            f"{called()}"
            "Where it gathers or permutes over several mesh axes at once, name them "
            "one by one: lax.all_gather(lax.all_gather(x, 'data'), 'replica')."
        ) from error


def _check_axis(error: NameError, axes: Axes) -> None:
    """Raises unless the trace failed because the step names one of our mesh axes."""
    name = compat.unbound_axis(error)
    if name is None:
        raise error
    if name not in axes.names:
        raise ShardingError(
            f"{step_name()} uses mesh axis '{name}', but fully_shard shards over "
            f"{axes.names}.\n"
            f"{called()}"
            f"Pass axis='{name}' to fully_shard, with a mesh that has this axis."
        ) from error


def _check_effects(jaxpr: Any) -> None:
    effects = sorted(
        {type(e).__name__ for e in jaxpr.effects if not compat.is_debug_effect(e)}
    )
    if not effects:
        return
    place = _place_of_effect(jaxpr)
    raise ShardingError(
        f"{step_name()} is not pure: it has a side effect ({', '.join(effects)}), "
        "which every device would repeat.\n"
        f"  at {place}\n"
        f"{called()}"
        "Return the value as a metric instead, and print or store it outside the step."
    )


def _check_not_mapped(jaxpr: Any) -> None:
    """Raises if a part of the step is divided over devices already."""
    for eqns in nested(jaxpr):
        if eqns[-1].primitive.name == "shard_map":
            raise ShardingError(
                f"{step_name()} uses jax.shard_map, whose parts fully_shard cannot "
                f"divide again.\n  at {where_in(eqns)}\n{called()}"
                "If it calls a step that fully_shard made, call the plain step there. "
                "A shard_map of your own may split arrays over the mesh axes that "
                "fully_shard is given, not over others: write such a part on whole "
                "arrays, or as an operation with a rule of its own "
                "(shardfn.register_rule)."
            )


def _place_of_effect(jaxpr: Any) -> str:
    """The user's line of the innermost equation with a side effect."""
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        if any(not compat.is_debug_effect(e) for e in eqn.effects):
            bodies = list(jaxprs_in_params(eqn.params))
            return _place_of_effect(bodies[0]) if bodies else where(eqn)
    return UNKNOWN


def _check_state(
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
            "their own, and state_argnums has to be left out (see From flax.nnx)."
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
