"""From a plain step and the avals of its arguments to a planned step, and its listing.

In: the step, leaves of its state and batch with their shardings. Out: `Planned`, which
emit can run, and from it the `Plan` that people read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from shardfn._api.captured_notes import captured_notes
from shardfn._api.dump_plans import dumping
from shardfn._api.residual_notes import residual_notes
from shardfn._core import compat
from shardfn._core.automatic_axes import auto_names
from shardfn._core.control import Control
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.memories import HOST
from shardfn._core.program import Program
from shardfn._core.sharding import Axes, Sharding
from shardfn._lowering.interpreter import emit
from shardfn._lowering.plan_jaxpr import plan_jaxpr
from shardfn._lowering.planned_jaxpr import StepFacts
from shardfn._lowering.planned_program import Planned
from shardfn._trace.early_lookups import look_up_early
from shardfn._trace.factored_sums import sum_before_factors
from shardfn._trace.leaf_names import name_leaves
from shardfn._trace.passes import argument
from shardfn._trace.tied_transposes import fold_transposes
from shardfn._trace.trace_step import TracedStep
from shardfn._trace.weight_casts import take_out_casts
from shardfn.analysis._listing import make_plan
from shardfn.analysis._offload_table import why_chosen
from shardfn.analysis._program_hash import fingerprint_of, operations_hash
from shardfn.analysis.plan import Plan
from shardfn.storage._layout import layouts


def plan_traced(
    traced: TracedStep,
    state: tuple[Leaf, ...],
    stored: tuple[Sharding, ...],
    batch: Sequence[Sharding],
    axes: Axes,
    min_size: int,
    control: Control,
) -> Planned:
    """Plans a traced step.

    Args:
      traced: the step, its arguments the state's leaves and then the batch's.
      state: leaves of the state.
      stored: their shardings, of the old state and of the new.
      batch: shardings of the batch's leaves.
      axes: the mesh axes.
      min_size: elements below which a value counts as small.
      control: what is asked of the moves of state leaves.

    Returns:
      The planned step.
    """
    names = [leaf_name(leaf.path) for leaf in state]
    control.check(names)
    asked, control = control, control.on(axes)
    shapes = [aval.shape for aval in traced.jaxpr.in_avals]
    arguments: list[Any] = [None] * len(shapes)
    inputs = (*stored, *batch)
    for k, (i, sharding) in enumerate(zip(traced.given, inputs, strict=True)):
        arguments[i] = argument(shapes[i], sharding, is_state=k < len(stored))

    def arrange(program: Program) -> Program:
        given = tuple(program.inputs[i] for i in traced.given)
        order, made = enumerate(traced.order), program.outputs
        out = tuple(given[k] if j is None else made[j] for k, j in order)
        program = replace(program, inputs=given, outputs=out)
        inside, outside = len(program.inputs), len(program.outputs)
        each = ([*names, *[""] * (count - len(names))] for count in (inside, outside))
        program = name_leaves(program, *each)
        program = sum_before_factors(take_out_casts(fold_transposes(program)))
        return look_up_early(program) if axes.indexes_memory else program

    made = plan_jaxpr(
        *(traced.jaxpr, inputs, required_of(traced, stored, inputs), axes),
        small=min_size,
        control=control,
        facts=facts_of(traced, state, arguments, arrange),
        observe=dumping(axes),
    )
    unused = _unused_axes(made.program, state, axes)
    notes = (
        *traced.meaning.notes,
        *_nothing_sharded(state, stored, axes, min_size),
        *made.notes,
        *residual_notes(made.program, made.body, axes),
        *captured_notes(made.program, made.body, axes),
        *(f"mesh axis {n}={size} is left to XLA, unused" for n, size in unused),
    )
    given = state, stored, axes, replace(asked, loop_bytes=made.loops.allowed)
    return Planned(
        traced,
        made.program,
        made.body,
        made.base,
        *given,
        notes,
        unused,
        min_size,
        made.stationary,
        lookups=made.lookups,
    )


def required_of(
    traced: TracedStep, stored: Sequence[Sharding], inputs: Sequence[Sharding]
) -> list[Sharding | None]:
    """The shardings that results must have: those of the state and of caches."""
    others = len(traced.order) - len(stored)
    required: list[Sharding | None] = [*stored, *[None] * others]
    for j, i in traced.caches:
        required[j] = inputs[i]
    return required


def facts_of(
    traced: TracedStep,
    state: Sequence[Leaf],
    arguments: Sequence[Any],
    arrange: Callable[[Program], Program],
) -> StepFacts:
    """What is known of a step with these arguments, and how it is arranged."""
    autos = [leaf.auto or () for leaf in state]
    return StepFacts(
        arguments,
        arrange,
        [*autos, *[()] * (len(traced.given) - len(state))],
        [*autos, *[()] * (len(traced.order) - len(state))],
        traced.program,
        frozenset(i for i, leaf in enumerate(state) if leaf.memory == HOST),
        frozenset((*range(len(state)), *(j for j, _ in traced.caches))),
    )


def _nothing_sharded(
    state: Sequence[Leaf], stored: Sequence[Sharding], axes: Axes, min_size: int
) -> list[str]:
    """The line that says why no leaf of the state is sharded, if none is."""
    if axes.devices == 1 or any(s != axes.replicated for s in stored):
        return []
    largest = max((leaf.aval.size for leaf in state), default=0)
    why = f"the largest has {largest} elements, and min_size={min_size}"
    if largest >= min_size:
        why = "shard= leaves them whole, or no dimension can be split"
    return [f"no leaf of the state is sharded: {why}"]


def _unused_axes(
    program: Program, leaves: Sequence[Leaf], axes: Axes
) -> tuple[tuple[str, int], ...]:
    """Mesh axes of several devices that are left to XLA, and that neither the state nor
    a constraint in the program is split over."""
    if any(leaf.auto is None for leaf in leaves):
        return ()
    used = {*axes.names, *_constrained(program)}
    used = used.union(*(auto_names(leaf.auto or ()) for leaf in leaves))
    return tuple((n, size) for n, size in axes.mesh if size > 1 and n not in used)


def _constrained(program: Program) -> Iterator[str]:
    """The mesh axes that constraints in a program name."""
    for node in program.nodes:
        for entry in getattr(node.eqn.params.get("sharding"), "spec", None) or ():
            yield from entry if isinstance(entry, tuple) else (entry,)
        for body in node.bodies:
            yield from _constrained(body)


def plan_init(
    init_fn: Callable[..., Any],
    args: Sequence[Any],
    stored: Sequence[Sharding],
    axes: Axes,
) -> Callable[..., list[jax.Array]]:
    """Plans a function that makes a whole state, to make one device's shards instead.

    Args:
      init_fn: pure function that returns the whole state.
      args: its arguments, replicated.
      stored: shardings of the state's leaves.
      axes: the mesh axes.

    Returns:
      A function of the leaves of `args`, to be called inside `shard_map`.
    """
    jaxpr = compat.without_refs(jax.make_jaxpr(init_fn)(*args))
    inputs = [axes.replicated] * len(jaxpr.in_avals)
    made = plan_jaxpr(jaxpr, inputs, stored, axes)
    return lambda *leaves: emit(made.program, made.body, leaves, axes)


def describe(planned: Planned, *, fingerprint: bool = True) -> Plan:
    """The plan of a planned step, with every collective listed.

    Args:
      planned: the step.
      fingerprint: whether to hash the traced program, which comparing plans needs.

    Returns:
      The plan.
    """
    return make_plan(
        planned.program,
        planned.body,
        planned.axes,
        planned.control,
        fingerprint_of(planned.program) if fingerprint else "",
        operations_hash(planned.traced.jaxpr),
        planned.state,
        planned.notes,
        _layouts(planned),
        planned.offload,
        planned.returns,
    )


def _layouts(planned: Planned) -> list[tuple[Sharding, str]]:
    """How each leaf of the state is stored, and why."""
    found = layouts(
        [leaf.path for leaf in planned.state],
        [leaf.aval for leaf in planned.state],
        planned.axes,
        planned.min_size,
        [leaf.auto for leaf in planned.state],
        planned.control,
    )
    texts = []
    for leaf, (_, why) in zip(planned.state, found, strict=True):
        each = [text.format(*n) for text, n in why]
        each += filter(None, [planned.stationary.why(leaf_name(leaf.path))])
        each += _memory(leaf, planned)
        texts.append("; ".join(each))
    return list(zip(planned.stored, texts, strict=True))


def _memory(leaf: Leaf, planned: Planned) -> list[str]:
    """Why a leaf lives in the memory that it does, if that was asked for."""
    if planned.control.of(leaf_name(leaf.path)).offload is None:
        return []
    choice = planned.offload
    if choice is not None and (role := choice.role(leaf_name(leaf.path))) is not None:
        return [why_chosen(choice, leaf_name(leaf.path), role)]
    if leaf.memory == HOST:
        return ["offload='host' asks for the host's memory"]
    size, least = leaf.aval.size, planned.min_size
    fewer = f"{size} elements are fewer than min_size={least}"
    why = fewer if size < least else "scalars and PRNG keys do"
    return [f"it stays in the device's memory, for which offload has no use: {why}"]
