"""Compiles a step for machines that are not there, and reads the compiled program.

In: a target and the step's programs on its devices. Out: a `Report`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from shardfn._api.compiled_steps import Programs
from shardfn._api.fit_offload import Built, fitting
from shardfn._api.planner import describe
from shardfn._api.predicted_latencies import are_predicted
from shardfn._api.stored_dimensions import dimensions_of
from shardfn._api.tuning.advise import advise, stored_otherwise
from shardfn._core.automatic_axes import part_shape
from shardfn._core.call_arguments import Rest
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaves import Leaf
from shardfn._core.sharding import Axes, Sharding, Split, local_shape
from shardfn._lowering.xla_options import device_and_platform
from shardfn.analysis._data_sheets import Target
from shardfn.analysis._figures import Memory, StoredLeaf
from shardfn.analysis._flops import count_flops
from shardfn.analysis._heap_size import compiled_with_heap
from shardfn.analysis._hlo.play import play
from shardfn.analysis._rates import rates_of
from shardfn.analysis.report import Report


def report_on(
    target: Target,
    programs: Programs,
    states: tuple[Any, ...],
    batch: Rest,
    progress: Callable[[str], None],
) -> Report:
    """The report of a step.

    Args:
      target: the machine.
      programs: those of the step, on a mesh of the target's devices.
      states: the state arguments, as `ShapeDtypeStruct`s.
      batch: the others.
      progress: called with each stage when it starts.

    Returns:
      The report.
    """

    def compiled_as(programs: Programs) -> Built:
        leaves, _ = programs.storage.leaves(states)
        predicted = are_predicted(programs.latencies, programs.storage.mesh)
        progress("compiling to predict latencies" if predicted else "tracing")
        with compiling_for(target):
            traced = programs.traced(states, batch)
            progress("compiling")
            lowered = programs.lowered(traced, leaves)
            _, platform = device_and_platform([*programs.storage.mesh.devices.flat])
            compiled, heap = compiled_with_heap(lowered, platform)
        return Built(programs, traced, compiled, memory_of(compiled, heap))

    progress("planning")
    built = fitting(programs, states, batch, target.memory, compiled_as)
    programs, traced, compiled = built.programs, built.traced, built.compiled
    storage = programs.storage
    leaves, treedef = storage.leaves(states)
    planned = programs.planned(leaves, treedef, batch)
    plan, by_use = describe(planned), dimensions_of(planned)
    progress("reading the compiled program")
    text = compiled.as_text() or ""
    report = Report(
        step=step_name(),
        target=target,
        plan=plan,
        verification=plan.verify(text),
        state=stored_leaves(leaves, storage.partition(leaves), storage.axes),
        memory=built.memory,
        flops=count_flops(traced.jaxpr.jaxpr),
        timeline=play(text, rates_of(target, storage.mesh)),
        compiler_options=tuple(programs.options(planned).items()),
        latencies=programs.latencies,
    )
    devices = tuple(storage.mesh.devices.flat)
    others = stored_otherwise(report, *by_use)
    return replace(report, advice=advise(report, devices, target.memory, others))


def memory_of(compiled: jax.stages.Compiled, heap: int) -> Memory:
    """The compiler's account of the memory of a program with a heap of so many
    bytes."""
    found: Any = compiled.memory_analysis()
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporary=heap,
        code=found.generated_code_size_in_bytes,
        host_arguments=found.host_argument_size_in_bytes,
        host_temporary=found.host_temp_size_in_bytes
        + found.host_output_size_in_bytes
        - found.host_alias_size_in_bytes,
    )


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Where the compiler itself finds that memory is short, says so."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).splitlines()[0]
        raise ShardingError(
            f"{step_name()} does not fit on {target.name}: its compiler says {first}\n"
            f"{called()}Use more devices, a smaller batch, or rematerialization."
        ) from error


def stored_leaves(
    leaves: Sequence[Leaf], shardings: Sequence[Sharding], axes: Axes
) -> tuple[StoredLeaf, ...]:
    """The leaves of a state as one device holds them."""
    return tuple(
        StoredLeaf(
            name=leaf.name or "state",
            shape=leaf.aval.shape,
            dtype=str(leaf.aval.dtype),
            bytes=math.prod(
                part_shape(local_shape(leaf.aval.shape, sharding, axes), leaf.auto)
            )
            * leaf.aval.dtype.itemsize,
            split=any(isinstance(s, Split) for s in sharding),
            memory=leaf.memory,
        )
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )
