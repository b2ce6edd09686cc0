"""From a user's step to a checked jaxpr.

In: the step and avals of its arguments. Out: its jaxpr, and the structure of what it
returns; or an error that says what the step does that cannot be sharded.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardfn._core import compat
from shardfn._core.call_arguments import (
    Rest,
    StateArguments,
    by_place,
    numbered,
    numbers_in,
    part,
    rejoined,
)
from shardfn._core.errors import (
    ShardingError,
    called,
)
from shardfn._core.garbage import uncollected
from shardfn._core.leaves import Leaf
from shardfn._core.named_states import NamedStates
from shardfn._core.new_leaves import new_leaves
from shardfn._core.program import Program
from shardfn._core.sharding import Axes, Sharding
from shardfn._trace.containers import Closed, close, closed_inside, on_closed, opened
from shardfn._trace.global_or_per_device import jaxpr_of
from shardfn._trace.inner_shard_map import on_whole_arrays
from shardfn._trace.jaxpr_to_program import unmarked_program
from shardfn._trace.per_device import GlobalStep
from shardfn._trace.purity import check_effects, check_not_mapped, leaked_tracer
from shardfn._trace.returned_state import check_state
from shardfn._trace.typed_trace import typed_jaxpr, typed_once


@dataclass(frozen=True, slots=True)
class TracedStep:
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
      caches: `(output, input)` for every leaf of a cache, which stays split as it is.
      program: the jaxpr as a program, if that was made to find the state.
    """

    jaxpr: Any
    out_tree: Any
    given: tuple[int, ...]
    order: tuple[int | None, ...]
    meaning: StateArguments
    caches: tuple[tuple[int, int], ...] = ()
    program: Program | None = None

    def returned(self, out: Sequence[Any]) -> Any:
        """What the step returns, of its outputs."""
        leaves: list[Any] = [None] * self.out_tree.num_leaves
        for i, x in zip(self.order, out, strict=True):
            if i is not None:
                leaves[i] = x
        return jax.tree.unflatten(self.out_tree, leaves)


@dataclass(slots=True)
class CallTrace:
    """A trace of the step's arguments in their own order.

    Attributes:
      jaxpr: the closed jaxpr.
      out: what the step returns, a pytree of `ShapeDtypeStruct`.
      made: the jaxpr as a program, if it was made.
      platform: that of the mesh.
      is_final: whether it is what will be planned: of a step on global arrays, whose
        types name no shardings.
    """

    jaxpr: Any
    out: Any
    is_final: bool = True
    made: Program | None = None
    platform: str = ""

    def program(self) -> Program:
        """The jaxpr as an `unmarked_program`."""
        if self.made is None:
            # Primitives are traced anew to expand them.
            with compat.at_top_level(), compat.broadcasts_ranks(), uncollected():
                self.made = unmarked_program(self.jaxpr, self.platform)
        return self.made


def trace_once(
    step: Callable[..., Any],
    args: Any,
    axes: Axes,
    mesh: jax.sharding.AbstractMesh | None = None,
) -> CallTrace | None:
    """The trace of `step` on `args`, or None if it fails; `mesh` is the caller's. Of a
    step per device only what it returns is as it will be: it is traced on the global
    batch. One that names shardings is traced as if some arguments were a batch."""
    is_set = jax.sharding.get_abstract_mesh()
    typed: jax.sharding.AbstractMesh | None = None
    for is_global in (True, False):
        bound = [] if is_global else zip(axes.names, axes.sizes, strict=True)
        with (
            contextlib.suppress(Exception),
            compat.at_top_level(),
            compat.with_cudnn(mesh),
        ):
            try:
                made, out = jax.make_jaxpr(step, axis_env=[*bound], return_shape=True)(
                    *args
                )
            except ValueError as error:
                typed = typed or compat.mesh_lacking(error, is_set, mesh)
                raise
            whole = on_whole_arrays(compat.without_refs(made), axes)
            return CallTrace(whole, out, is_global, platform=axes.platform)
    if typed is not None:
        with compat.at_top_level(), compat.with_cudnn(mesh):
            for made, out in typed_once(step, args, axes, typed):
                with contextlib.suppress(Exception):
                    whole = on_whole_arrays(compat.without_refs(made), axes)
                    return CallTrace(whole, out, False, platform=axes.platform)
    return None


def failure(
    step: Callable[..., Any], leaves: Sequence[Leaf], treedef: Any
) -> tuple[str, ...]:
    """What a step raises that `trace_once` could not trace, in a line for errors of its
    arguments, whose meaning is not known then; none if that is of where it runs."""
    try:
        jax.eval_shape(step, *jax.tree.unflatten(treedef, [x.aval for x in leaves]))
    except (NameError, ShardingError):  # of a mesh axis that is not bound here
        return ()
    except Exception as error:  # of the user's
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        return (f"the step fails where it is traced to find its state: {said}",)
    return ()


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
    known: CallTrace | None = None,
) -> TracedStep:
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
        run = on_closed(
            lambda old, rest: step(old, Rest(rest, meaning)),
            structures,
            inside=meaning.results is not None,
        )
        closed = tuple(map(close, states)), Rest([*map(close, batch)], meaning)
        try:
            with compat.at_top_level(), compat.with_cudnn(mesh):
                try:
                    made, out = jaxpr_of(run, *closed, split, axes, names_axes, own)
                except ValueError as error:
                    typed = compat.mesh_lacking(error, is_set, mesh)
                    if typed is None:
                        raise
                    made, out = typed_jaxpr(run, *closed, split, axes, typed)
                whole = on_whole_arrays(compat.without_refs(made), axes)
                known = CallTrace(whole, out, platform=axes.platform)
                out_tree = structures[-1]
        except jax.errors.UnexpectedTracerError as error:
            raise leaked_tracer() from error
        given = range(len(jax.tree.leaves((states, batch))))
        states = closed[0]
        if meaning.results is not None:  # inside of what comes back
            try:
                known.out = jax.tree.unflatten(out_tree, jax.tree.leaves(out))
                states = tuple(map(opened, states))
            except Exception:  # of a class of the user's
                states = _states_inside(states, leaves)
    else:
        out_tree = jax.tree.structure(known.out)
        given = _order_given(states, batch)
    check_effects(known.jaxpr)
    check_not_mapped(known.jaxpr)
    check_state(known.out, states, meaning, leaves)
    new = new_leaves(out_tree, meaning)
    rest = sorted({*range(out_tree.num_leaves)} - {*new})
    order = (*new, *[None] * (len(leaves) - len(new)), *rest)
    caches = _cache_leaves(states, batch, out_tree, order)
    return TracedStep(
        known.jaxpr, out_tree, tuple(given), order, batch.meaning, caches, known.made
    )


def _states_inside(states: tuple[Any, ...], leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """States that are closed, in plain containers; classes in them stay closed."""
    start, rest, made = int(len(states) > 1), iter(leaves), []
    for state in states:
        own = [next(rest) for _ in jax.tree.leaves(state)]
        tree = state.treedef if isinstance(state, Closed) else jax.tree.structure(state)
        made.append(closed_inside(tree, own, start))
    if isinstance(states, NamedStates):
        return NamedStates(states.names, made)
    return tuple(made)


def _cache_leaves(
    states: Sequence[Any], batch: Rest, out_tree: Any, order: Sequence[int | None]
) -> tuple[tuple[int, int], ...]:
    """`TracedStep.caches`."""
    if not batch.meaning.caches:
        return ()
    leaves, treedef = jax.tree.flatten((states, batch))
    given = by_place(rejoined(*numbered(treedef, range(len(leaves)))))
    outputs = {leaf: j for j, leaf in enumerate(order)}
    made = numbered(out_tree, [outputs[i] for i in range(out_tree.num_leaves)])
    return tuple(
        (j, i)
        for place, path in batch.meaning.caches
        for i, j in zip(
            numbers_in(given[place]),
            numbers_in(part(made, path)),
            strict=True,
        )
    )


def _order_given(states: Sequence[Any], batch: Rest) -> list[int]:
    """For each leaf of the state and then the batch, which it is of all arguments."""
    leaves, treedef = jax.tree.flatten((states, batch))
    numbers = numbered(treedef, range(len(leaves)))
    return [int(i) for i in np.argsort(numbers_in(rejoined(*numbers)))]
