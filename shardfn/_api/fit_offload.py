"""Corrects what a bound chooses for the host by what a compiler says of it.

In: a step whose `offload` is a bound, and a way to compile it. Out: the program of the
fewest bytes on the host that fits, of as many as may be compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardfn._api.compiled_steps import Programs
from shardfn._core.call_arguments import Rest
from shardfn._core.errors import ShardingError
from shardfn._core.limits import OFFLOAD_COMPILATIONS, OFFLOAD_REFUSED
from shardfn._core.offloading import OffloadChoice, OffloadTrial
from shardfn._core.recent import Recent
from shardfn.analysis._figures import Memory


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled step.

    Attributes:
      programs: those of the step, their storage with the choice.
      traced: the step traced.
      compiled: the step compiled.
      memory: what it takes of a device, by the compiler.
    """

    programs: Programs
    traced: Any
    compiled: jax.stages.Compiled
    memory: Memory


def fitting(
    programs: Programs,
    states: tuple[Any, ...],
    batch: Rest,
    memory: int,
    compiled_as: Callable[[Programs], Built],
) -> Built:
    """The step compiled, with the leaves on the host that make it fit.

    What the compiler says of one choice corrects the plan's estimate for the next,
    until a choice comes twice, or `OFFLOAD_COMPILATIONS` were compiled. Of those that
    fit, the one with the fewest bytes on the host; if none does, the one that takes
    least.

    Args:
      programs: those of the step.
      states: the state arguments, as `ShapeDtypeStruct`s.
      batch: the others.
      memory: bytes of a device.
      compiled_as: compiles the step with the choice of these programs' storage.

    Returns:
      The compiled step; its choice knows what was tried.

    Raises:
      ShardingError: the compiler refused all of them.
    """
    choice = programs.choose_memories(states, batch, memory)
    if choice is None:
        return compiled_as(programs)
    tried: dict[frozenset[str], OffloadTrial] = {}
    best: tuple[OffloadChoice, Built] | None = None
    refused: ShardingError | None = None
    while choice.leaves not in tried and len(tried) < OFFLOAD_COMPILATIONS:
        try:
            built = compiled_as(programs)
        except ShardingError as error:
            built, refused = None, error
        peak = built.memory.peak if built else None
        trial = OffloadTrial(choice.host_bytes, choice.estimate, peak)
        tried[choice.leaves] = trial
        if built and (best is None or _is_better(choice, built, *best)):
            best = choice, built
        storage = programs.storage.on(programs.storage.given)
        programs = replace(programs, storage=storage, _jitted=Recent(1))
        correction = _beyond(trial, choice.bound)
        corrected = programs.choose_memories(states, batch, memory, correction)
        assert corrected is not None
        choice = corrected
    if best is None:
        assert refused is not None
        raise refused
    choice, built = best
    found = replace(choice, trials=tuple(tried.values()))
    chosen = built.programs.storage.chosen
    chosen.update(dict.fromkeys(chosen, found))
    return built


def _beyond(trial: OffloadTrial, bound: int) -> int:
    """Bytes that a step takes beyond the plan's estimate."""
    taken = trial.compiled
    if taken is None:
        taken = int(bound * (1 + OFFLOAD_REFUSED))
    return taken - trial.estimate


def _is_better(
    choice: OffloadChoice, built: Built, other: OffloadChoice, than: Built
) -> bool:
    """Whether a compiled choice is better than another one: it fits, and copies less;
    or takes less where none fits."""
    fits = built.memory.peak <= choice.bound
    fitted = than.memory.peak <= other.bound
    if fits and fitted:
        return choice.host_bytes < other.host_bytes
    return fits if fits != fitted else built.memory.peak < than.memory.peak
