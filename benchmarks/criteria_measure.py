"""A program of a case in; the row that is measured on it, out.

Everything but the seconds is read off the compiled program, so it is the same in every
run. Seconds are of the CPU, so that a busy machine changes them little.
"""

import math
import resource
import time
from collections import Counter
from typing import Any

import criteria_programs as programs
import jax
from criteria_cases import Case
from jax.sharding import Mesh

from shardfn.analysis import targets
from shardfn.analysis._heap_size import compiled_with_heap
from shardfn.analysis._hlo import overlapped_bytes, read_collectives, wire_bytes
from shardfn.analysis._hlo.play import play
from shardfn.analysis._rates import rates_of

PLATFORMS = {"h100": "gpu", "v5p": "tpu"}
NEWER = jax.__version_info__ >= (0, 11)
PIPELINED = (
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
    if NEWER
    else {"xla_gpu_enable_pipelined_all_gather": True}
)
NOT_DELAYED = (
    {"xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF"}
    if NEWER
    else {"xla_gpu_enable_pipelined_reduce_scatter": False}
)
IN_FLIGHT = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
ASKED: dict[str, dict[str, dict[str, Any]]] = {
    "shardfn first": {"h100": {"prefetch": "first"}},
    "shardfn overlapped": {"h100": {"compiler_options": {**PIPELINED, **IN_FLIGHT}}},
    "shardfn lean": {"h100": {"compiler_options": NOT_DELAYED}},
}
"""What a user can ask for beyond the defaults, by chip: the first weights of a layer
ahead, more overlap for more memory, or less memory and compile time for less
overlap."""


def shardfn_options(program: str, chip: str) -> dict[str, Any] | None:
    """Options of `fully_shard`; None for a baseline."""
    if program in ASKED:
        return ASKED[program][chip]
    return {"shardfn": {}, "shardfn defer": {"accumulate": "defer"}}.get(program)


OURS = ("shardfn", *ASKED, "shardfn defer")
TPU_ONLY = ("constrained, no collective matmul",)
NO_MATMUL_LOOPS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
BASELINES = {
    "replicas": (lambda m, mesh: programs.jitted(m, mesh, programs.P()), {}),
    "jit": (lambda m, mesh: programs.jitted(m, mesh, programs.state_specs), {}),
    "constrained": (programs.constrained, {}),
    "constrained, no collective matmul": (programs.constrained, NO_MATMUL_LOOPS),
    "shard_map by hand": (programs.by_hand, {}),
}


def programs_of(case: Case, chip: str) -> list[str]:
    """Names of the programs that a case is measured on."""
    if case.criteria == (6,):
        return ["shardfn"]
    left_out = {*ASKED} if case.criteria == (4,) else {"shardfn defer"}
    left_out |= {name for name, by_chip in ASKED.items() if chip not in by_chip}
    return [
        name
        for name in (*OURS, *BASELINES)
        if name not in left_out and (chip == "v5p" or name not in TPU_ONLY)
    ]


def seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(case: Case, chip: str, program: str) -> dict[str, Any]:
    """Compiles one program for devices that are not there.

    Returns:
      A row of JSON; with `error` in place of figures if the compiler refuses.
    """
    mesh = targets.mesh(case.target(chip))
    state, batch = programs.arguments(case.model, mesh.size)
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(state["params"]))
    row: dict[str, Any] = {"jax": jax.__version__, "parameters": parameters}
    wall, start, step, options = time.perf_counter(), seconds(), None, {}
    asked = shardfn_options(program, chip)
    if asked is not None:
        step = programs.sharded(case.model, mesh, **asked)
        lowered = step.lower(state, batch)
    else:
        lower, options = BASELINES[program]
        lowered = lower(case.model, mesh)
    row["lower_s"] = seconds() - start
    try:
        compiled, heap = compiled_with_heap(lowered, PLATFORMS[chip], options)
    except jax.errors.JaxRuntimeError as error:
        return row | {"error": _short(str(error))}
    row |= {"seconds": seconds() - start, "wall_s": time.perf_counter() - wall}
    text = compiled.as_text() or ""
    row |= played(text, case.target(chip), mesh)
    row |= read(text) | {"temp": heap}
    if step:
        plan = step.plan(state, batch)
        checked = plan.verify(compiled)  # which knows its platform
        row |= {"planned": plan.wire_bytes, "as_planned": checked.ok}
        if not checked.ok:
            row["problems"] = checked.problems()
    return row


def played(text: str, target: str, mesh: Mesh) -> dict[str, float]:
    """Predicted seconds of a step, and how many of them are waits for transfers; what
    its reads and writes of device memory take alone."""
    rates = rates_of(targets.target(target), mesh)
    timeline = play(text, rates)
    return {
        "step_s": timeline.seconds,
        "exposed_s": timeline.exposed,
        "memory_s": timeline.memory_bytes / rates.memory,
    }


def read(text: str) -> dict[str, Any]:
    """What a compiled program moves, and how long it is."""
    collectives = read_collectives(text)
    kinds: dict[str, Counter[str]] = {}
    for c in collectives:
        kind = kinds.setdefault(c.op, Counter())
        kind["static"] += 1
        kind["elements"] += c.times * c.elements
        kind["runs"] += c.times
        kind["wire"] += wire_bytes([c])
        kind["overlapped"] += overlapped_bytes([c])
    return {
        "wire": wire_bytes(collectives),
        "overlapped": overlapped_bytes(collectives),
        "kinds": {op: dict(kinds[op]) for op in sorted(kinds)},
        "instructions": text.count(" = "),
    }


def _short(message: str) -> str:
    lines = message.splitlines()
    return lines[0][:300] if lines else "no message"
