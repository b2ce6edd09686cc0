"""A planned program as a list of collectives that people can read.

In: a program and its plan, tree paths of the state leaves. Out: one `Collective` per
move on the wire, with the state leaf that it belongs to, the source line, and M.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from shardfn import _compat
from shardfn._control import Control
from shardfn._errors import where
from shardfn._plan import (
    BodyPlan,
    Collective,
    Place,
    Plan,
    Ref,
    Reshard,
    communicating_moves,
    line_name,
)
from shardfn._program import Program
from shardfn._sharding import Axes


def make_plan(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    control: Control,
    fingerprint: str,
) -> Plan:
    """Describes a planned step.

    Args:
      program: the traced step, its values named after leaves of the state.
      body: its plan.
      axes: the mesh axes.
      control: what was asked of the moves of state leaves.
      fingerprint: what identifies the traced step; see `fingerprint_of`.

    Returns:
      The plan with its collectives and M.
    """
    parameters: dict[str, int] = {}
    collectives = []
    for line, size in _walk(program, body, axes, 1):
        collectives.append(line)
        if line.op == "all_gather" and size:
            key = line.path or f"{line.shape} {line.place}"
            total = size * (line.times or 1)
            parameters[key] = max(parameters.get(key, 0), total)
    return Plan(
        axes=axes,
        body=body,
        collectives=tuple(collectives),
        parameter_bytes=sum(parameters.values()),
        program=fingerprint,
        control=control,
    )


def fingerprint_of(closed_jaxpr: Any, program: Program) -> str:
    """A hash that two traces share iff they are the same program on equal constants."""
    text = re.sub(r"0x[0-9a-f]+|<function [^>]*>", "", str(closed_jaxpr))
    digest = hashlib.sha256(text.encode())
    for constant in _constants(program):
        if _compat.is_key(constant.dtype):
            constant = jax.random.key_data(constant)
        digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()


def _constants(program: Program) -> Iterator[Any]:
    """The arrays that a program and the bodies in it capture."""
    for _, constant in program.constants:
        if hasattr(constant, "dtype"):
            yield constant
    for node in program.nodes:
        for body in node.bodies:
            yield from _constants(body)


def _walk(
    program: Program, body: BodyPlan, axes: Axes, times: int | None, at: Place = ()
) -> Iterator[tuple[Collective, int]]:
    """Every collective, and the bytes of the parameter that it gathers, or 0."""
    users = _users(program, body)
    for step in body.steps:
        if isinstance(step, Reshard):
            path = program.leaf(step.source.value)
            yield from _moves(step, path, users.get(step.result), axes, times, at)
            continue
        bodies = program.nodes[step.node].bodies
        inner = None if times is None or step.times is None else times * step.times
        for ahead in step.ahead:
            runs = None if times is None else times * ((step.times or 0) + ahead.lead)
            yield from _walk(bodies[0], ahead.part, axes, runs, (*at, step.node, 0))
        for i, (program_i, plan_i) in enumerate(zip(bodies, step.bodies, strict=True)):
            yield from _walk(program_i, plan_i, axes, inner, (*at, step.node, i))


def _moves(
    step: Reshard,
    path: str,
    user: tuple[str, str] | None,
    axes: Axes,
    times: int | None,
    at: Place,
) -> Iterator[tuple[Collective, int]]:
    place, fallback = user or ("", "")
    for move in communicating_moves(step, axes):
        gathers = move.op == "all_gather" and step.stored
        yield (
            Collective(
                op=move.op,
                axis=axes.names[move.axis],
                phase=step.phase,
                shape=step.part_shape,
                dtype=step.dtype,
                wire_bytes=move.wire_bytes,
                times=times,
                path=path,
                place=place,
                fallback=fallback,
                name=line_name(at, step.result, move.index),
                elements=move.elements,
            ),
            math.prod(step.part_shape) * step.itemsize if gathers else 0,
        )


def _users(program: Program, body: BodyPlan) -> dict[Ref, tuple[str, str]]:
    """Per version: the source line that first needs it, and the primitive if it is
    there only because that has no rule."""
    users: dict[Ref, tuple[str, str]] = {}
    made_by = {v: node for node in program.nodes for v in node.outputs}
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.source.version == 0 and step.result not in users:
                if step.source.value in made_by:
                    eqn = made_by[step.source.value].eqn
                    users[step.result] = (where(eqn), "")
            continue
        place = None
        for ref in step.operands:
            if ref is None or ref.version == 0:
                continue
            if ref not in users or step.fallback:
                place = place or where(program.nodes[step.node].eqn)
                users[ref] = (place, step.primitive if step.fallback else "")
    return users
