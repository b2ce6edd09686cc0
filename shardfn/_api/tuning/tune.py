"""Finds the options with which a step is fastest on a target, by compiling.

In: a step, a target and a bound on memory. Out: a `Tuning`.

The step is compiled as it is, then with each option that its figures speak for, the
one that may save most first, and then with those that did save, one after another. The
same player times all of them.
"""

import difflib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shardfn._api.fully_shard import fully_shard
from shardfn._api.sharded_step import ShardedStep
from shardfn._api.tuning.advise import advise, of_storage
from shardfn._api.tuning.asked_rows import ALSO, Also, asked_rows
from shardfn._api.tuning.candidates import Candidate, Tuning, choose
from shardfn._api.tuning.changed_options import with_options
from shardfn._api.tuning.tuned_options import TunedOptions, state_of
from shardfn._api.validate import check_step
from shardfn._core.argument_values import (
    FUNCTION,
    SIZE,
    WHOLE,
    check_arguments,
    some_of,
)
from shardfn._core.errors import ShardingError, called, names_call
from shardfn._core.option_values import size_in
from shardfn._core.tuning_limits import (
    LEAST_MEMORY,
    TUNED_COMPILATIONS,
    TUNED_SHARE,
)
from shardfn.analysis import targets
from shardfn.analysis.advice import Advice
from shardfn.analysis.report import Report

Changes = tuple[tuple[str, Any], ...]
"""Options beside the step's own: names and values."""

ASKED = some_of(ALSO)
"""Which of the options that are tried only if asked for."""


@names_call
def tune(
    step: Callable[..., Any],
    target: str,
    *args: Any,
    memory: int | str | None = None,
    compilations: int = TUNED_COMPILATIONS,
    mesh_shape: tuple[int, ...] | None = None,
    also: Sequence[Also] = (),
    progress: Callable[[str], None] = lambda stage: None,
    **named: Any,
) -> Tuning:
    """Finds the options with which a step is fastest on machines that are not there.

    Compiles the step for them a few times, which needs the extra `aot` and no
    accelerator. The same step and target give the same choice. Results stay what they
    are, and so do the memories that the step uses, unless `also` says otherwise.

    Args:
      step: a plain step, which is sharded over one axis of all the target's devices, or
        what `fully_shard(step, mesh)` makes: its own options are where tuning starts.
      target: the machine, by a name as in `shardfn.analysis.targets.target`, such as
        `"h100:64"`.
      *args: the step's arguments, arrays or `ShapeDtypeStruct`s; the batch is the
        global one.
      memory: what a step may take on each device, in bytes or as a text such as
        `"70GiB"`; the target's by default. Give less to leave room for what else is
        there.
      compilations: how many programs are compiled at most, 8 by default; each takes as
        long as compiling the step.
      mesh_shape: sizes of the mesh axes there, as in `ShardedStep.on`. Needed if the
        step's mesh has several axes and the target has another number of devices.
      also: which of "offload", "gather_dtype" and "reduce_dtype" may be tried, too. The
        first stores state in the host's memory if the step does not fit (and compiles
        a few times for that); the others round what moves, to bfloat16 and to int8.
        None by default.
      progress: called with each stage when it starts, such as `print`; nothing is shown
        by default.
      **named: arguments of the step that are passed by name.

    Returns:
      The candidates with their figures, and the one chosen. Print it, compare them on
      the page of its `html()`, paste its `python()`, or `save` it for
      `fully_shard(options=path)`.

    Raises:
      ShardingError: the step cannot be sharded as it is.
      ValueError: no such target, `memory` is no size or less than a MiB, or
        `compilations` is less than one.
      ImportError: the target's compiler is not installed.

    Example:
      >>> import shardfn
      >>> found = shardfn.tune(step, "h100:64", state, batch)  # doctest: +SKIP
      >>> found.save("tuned.json")  # doctest: +SKIP
      >>> step = shardfn.fully_shard(step, mesh, options="tuned.json")  # doctest: +SKIP
    """
    check_arguments(
        "tune",
        memory=(memory, SIZE.or_none()),
        compilations=(compilations, WHOLE),
        also=(also, ASKED),
        progress=(progress, FUNCTION),
    )
    _check_names(step, named)
    if compilations < 1:
        raise ValueError(f"compilations={compilations}: pass one or more.")
    asked = None if memory is None else _bytes_of(memory)
    if not isinstance(step, ShardedStep):
        check_step(step, "tune")
        step = fully_shard(step, targets.mesh(target))
    there = targets.target(target)
    search = _Search(step, target, args, named, mesh_shape, progress, compilations)
    bound = there.memory if asked is None else asked
    report = search.compiled("as it is", ())
    others = advise(report, targets.devices(target), bound, of_storage(report))
    rows = (*asked_rows(report, bound, also), *others)
    least = TUNED_SHARE * report.step_seconds
    able = [row for row in rows if not row.mesh]
    if report.memory.peak > bound:
        if report.memory.arguments <= bound or "offload" in also:
            search.tries_all([row for row in able if row.takes < 0], bound)
        fits = choose(tuple(search.found), bound).fits(bound)
        able = able if fits else []
    search.tries_all([row for row in able if row.saves >= least], bound)
    tried = [c.options for c in search.found]
    options = choose(tuple(search.found), bound).options
    tuned = _tuned(report, options)
    return Tuning(
        report.step,
        target,
        bound,
        tuple(search.found),
        tuple(row for row in rows if row.options not in tried),
        tuned,
    )


_PARAMETERS = inspect.signature(tune).parameters.values()


def _check_names(step: Callable[..., Any], named: Mapping[str, Any]) -> None:
    """Raises for a name that is almost one of `tune`'s own, where the step has none
    such; others are named when the step is called."""
    try:
        there = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of no function, or of some in C
        return
    if any(p.kind is p.VAR_KEYWORD for p in there):
        return
    own = [p.name for p in _PARAMETERS if p.kind is p.KEYWORD_ONLY]
    for name in named.keys() - {p.name for p in there}:
        if close := difflib.get_close_matches(name, own, n=1):
            raise ShardingError(
                f"neither tune nor the step has an argument {name!r}.\n{called()}"
                f"Did you mean {close[0]}=...? tune has {', '.join(own)}."
            )


def _bytes_of(memory: int | str) -> int:
    size = size_in(memory) if isinstance(memory, str) else memory
    if size is None:
        raise ValueError(
            f"memory={memory!r} is no size: pass bytes, or a text such as '70GiB'."
        )
    if size < LEAST_MEMORY:
        raise ValueError(
            f"memory={memory!r} is {size} bytes, which lacks its unit, it seems "
            f"(limits.LEAST_MEMORY): pass a text with one, such as '70GiB'."
        )
    return size


@dataclass(slots=True)
class _Search:
    """What has been compiled so far.

    Attributes:
      step: the step with its own options.
      target: the machine's name.
      args: the step's arguments.
      named: those passed by name.
      mesh_shape: sizes of the mesh axes there.
      progress: called with each stage.
      left: how many programs may still be compiled.
      found: what has been.
    """

    step: ShardedStep[..., Any]
    target: str
    args: tuple[Any, ...]
    named: dict[str, Any]
    mesh_shape: tuple[int, ...] | None
    progress: Callable[[str], None]
    left: int
    found: list[Candidate] = field(default_factory=list)

    def compiled(self, title: str, options: Changes) -> Report:
        """Compiles the step with these options."""
        self.left -= 1
        number = len(self.found) + 1
        start = time.perf_counter()

        def show(stage: str) -> None:
            self.progress(f"{number}. {title}: {stage}")

        report = with_options(self.step, dict(options)).on(
            self.target,
            *self.args,
            mesh_shape=self.mesh_shape,
            progress=show,
            **self.named,
        )
        self.found.append(
            Candidate(
                title,
                options,
                report.step_seconds,
                report.memory.peak,
                report.verification.wire_bytes,
                report.exposed_seconds,
                report.verification.ok,
                compiling=time.perf_counter() - start,
                report=report,
            )
        )
        return report

    def tries(self, title: str, options: Changes) -> None:
        """The same, unless all compilations are used up or it has been compiled; what
        cannot be is a candidate with an error."""
        if self.left <= 0 or any(c.options == options for c in self.found):
            return
        start = time.perf_counter()
        try:
            self.compiled(title, options)
        except (ShardingError, jax.errors.JaxRuntimeError) as error:
            first = str(error).partition("\n")[0]
            took = time.perf_counter() - start
            self.found.append(Candidate(title, options, error=first, compiling=took))

    def tries_all(self, rows: Sequence[Advice], memory: int) -> None:
        """Tries each on top of the best so far, as long as one program is left for the
        best of them together; then that."""
        base, start = choose(tuple(self.found), memory), len(self.found)
        for row in rows:
            if self.left > 1:
                self.adds(base, row)
        self.combine(base, start, memory)
        for row in rows:
            self.adds(base, row)

    def adds(self, base: Candidate, row: Advice) -> None:
        """Tries an option with those of a candidate."""
        together = joined(base.options, row.options)
        if together is not None:
            self.tries(_titled(base, row.title), together)

    def combine(self, first: Candidate, start: int, memory: int) -> None:
        """Adds to the best option the next best of those that help by themselves.

        Args:
          first: what they were added to.
          start: where in `found` they begin.
          memory: bytes that the step may take.
        """
        helpful = [c for c in self.found[start:] if choose((first, c), memory) == c]
        fits = first.fits(memory)
        helpful.sort(key=lambda c: c.seconds if fits else c.peak)
        for other in helpful[1:]:
            best = choose(tuple(self.found), memory)
            together = joined(best.options, other.options)
            if together is not None:
                self.tries(_titled(best, other.title), together)


def _titled(first: Candidate, title: str) -> str:
    """What to call a candidate with the options of another one and more."""
    return f"{first.title} + {title}" if first.options else title


def joined(some: Changes, others: Changes) -> Changes | None:
    """Both sets of options; None if they say different things of one."""
    found = dict(some)
    for name, value in others:
        if name not in found:
            found[name] = value
        elif isinstance(value, Mapping) and isinstance(found[name], Mapping):
            if any(found[name].get(key, v) != v for key, v in value.items()):
                return None
            found[name] = {**found[name], **value}
        elif found[name] != value:
            return None
    return tuple(found.items())


def _tuned(report: Report, options: Changes) -> TunedOptions:
    target = report.target
    return TunedOptions(
        report.step,
        target.name,
        target.platform,
        jax.__version__,
        state_of((x.name, x.shape, x.dtype) for x in report.plan.leaves),
        report.plan.operations_hash,
        options,
    )
