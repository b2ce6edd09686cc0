"""A planned program as a list of collectives that people can read.

In: a program and its plan, tree paths of the state leaves. Out: one `Collective` per
  move
on the wire, with the state leaf that it belongs to, the source line, and M.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardfn import _compat
from shardfn._errors import where
from shardfn._phase import FORWARD, node_phases
from shardfn._plan import (
    Apply,
    BodyPlan,
    Collective,
    Plan,
    Ref,
    Reshard,
    communicating_moves,
)
from shardfn._program import Atom, Node, Program, aval_of
from shardfn._sharding import Axes

Labels = dict[int, str]
"""Values of a program and the state leaf they are derived from, or update."""


def make_plan(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    input_paths: Sequence[str],
    output_paths: Sequence[str],
    fingerprint: str,
) -> Plan:
    """Describes a planned step.

    Args:
      program: the traced step.
      body: its plan.
      axes: the mesh axes.
      input_paths: per argument, the path of its state leaf, or "".
      output_paths: the same for the outputs.
      fingerprint: what identifies the traced step; see `fingerprint_of`.

    Returns:
      The plan with its collectives and M.
    """
    parameters_of = _Walk(axes, _read_forward(program, input_paths))
    lines = parameters_of.walk(program, body, input_paths, output_paths, 1)
    parameters: dict[str, int] = {}
    collectives = []
    for line, size in lines:
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


@dataclass(slots=True)
class _Walk:
    """Goes through a plan and its bodies; gradients are named after `parameters` before
    other state leaves that they update."""

    axes: Axes
    parameters: set[str]

    def walk(
        self,
        program: Program,
        body: BodyPlan,
        input_paths: Sequence[str],
        output_paths: Sequence[str],
        times: int | None,
    ) -> Iterator[tuple[Collective, int]]:
        """Every collective, and the bytes of the parameter that it gathers, or 0."""
        labels = self.label(program, input_paths, output_paths)
        users = _users(program, body)
        for step in body.steps:
            if isinstance(step, Reshard):
                path = labels.get(step.source.value, "")
                yield from self.moves(step, path, users.get(step.result), times)
                continue
            node = program.nodes[step.node]
            inner = None if times is None or step.times is None else times * step.times
            for inner_body, inner_plan, ins, outs in _bodies(node, step, labels):
                yield from self.walk(inner_body, inner_plan, ins, outs, inner)

    def moves(
        self, step: Reshard, path: str, user: tuple[str, str] | None, times: int | None
    ) -> Iterator[tuple[Collective, int]]:
        place, fallback = user or ("", "")
        for op, axis, wire in communicating_moves(step, self.axes):
            gathers = op == "all_gather" and step.stored
            yield (
                Collective(
                    op=op,
                    axis=self.axes.names[axis],
                    phase=step.phase,
                    shape=step.shape,
                    dtype=step.dtype,
                    wire_bytes=wire,
                    times=times,
                    path=path,
                    place=place,
                    fallback=fallback,
                ),
                math.prod(step.shape) * step.itemsize if gathers else 0,
            )

    def label(
        self,
        program: Program,
        input_paths: Sequence[str],
        output_paths: Sequence[str],
    ) -> Labels:
        labels = {v: p for v, p in zip(program.inputs, input_paths, strict=True) if p}
        for node in program.nodes:
            source = _only_source(program, node)
            if source in labels:
                labels.update((v, labels[source]) for v in node.outputs)
        outputs = list(zip(program.outputs, output_paths, strict=False))
        for wanted in (True, False):
            for atom, path in outputs:
                if (
                    isinstance(atom, int)
                    and path
                    and (path in self.parameters) == wanted
                ):
                    labels.setdefault(atom, path)
            for node in reversed(program.nodes):
                _label_operands(program, node, labels)
        return labels


def _read_forward(program: Program, input_paths: Sequence[str]) -> set[str]:
    """Paths of the state leaves that the forward pass reads: the parameters."""
    phases = node_phases(program, FORWARD)
    read = {
        atom
        for node, phase in zip(program.nodes, phases, strict=True)
        if phase == FORWARD
        for atom in node.inputs
        if isinstance(atom, int)
    }
    return {p for v, p in zip(program.inputs, input_paths, strict=True) if v in read}


def _only_source(program: Program, node: Node) -> int | None:
    """The one value that a node reshapes, casts or transposes, if it does just that."""
    values = [a for a in node.inputs if isinstance(a, int)]
    if node.kind != "op" or len(values) != 1:
        return None
    source = values[0]
    same = all(_size(program, v) == _size(program, source) for v in node.outputs)
    return source if same else None


def _label_operands(program: Program, node: Node, labels: Labels) -> None:
    """Operands as large as a labelled result update the same state leaf."""
    if node.kind != "op":
        return
    for result in node.outputs:
        if result not in labels or not _size(program, result):
            continue
        for atom in node.inputs:
            if isinstance(atom, int) and _size(program, atom) == _size(program, result):
                labels.setdefault(atom, labels[result])


def _bodies(
    node: Node, step: Apply, labels: Labels
) -> Iterator[tuple[Program, BodyPlan, list[str], list[str]]]:
    """The bodies of a node, their plans, and the labels of their inputs and outputs."""
    ins = [labels.get(a, "") if isinstance(a, int) else "" for a in node.inputs]
    outs = [labels.get(v, "") for v in node.outputs]
    for i, (program, plan) in enumerate(zip(node.bodies, step.bodies, strict=True)):
        inputs, outputs = ins, outs
        if node.kind == "cond":
            inputs = ins[1:]
        if node.kind == "while":
            tests, consts = node.counts
            carry = ins[tests + consts :]
            inputs = ins[:tests] + carry if i == 0 else ins[tests:]
            outputs = [""] if i == 0 else outs
        yield program, plan, inputs, outputs


def _users(program: Program, body: BodyPlan) -> dict[Ref, tuple[str, str]]:
    """Per version: the source line that first needs it, and the primitive if it is
    there only because that has no rule."""
    users: dict[Ref, tuple[str, str]] = {}
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.source.version == 0 and step.result not in users:
                made_by = _producer(program, step.source.value)
                if made_by is not None:
                    users[step.result] = (where(made_by.eqn), "")
            continue
        place = None
        for ref in step.operands:
            if ref is None or ref.version == 0:
                continue
            if ref not in users or step.fallback:
                place = place or where(program.nodes[step.node].eqn)
                users[ref] = (place, step.primitive if step.fallback else "")
    return users


def _producer(program: Program, value: int) -> Node | None:
    return next((n for n in program.nodes if value in n.outputs), None)


def _size(program: Program, atom: Atom) -> int:
    return math.prod(getattr(aval_of(program, atom), "shape", ()))
