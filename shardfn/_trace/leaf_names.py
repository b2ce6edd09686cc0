"""Which leaf of the state each value of a program belongs to.

In: a program and the tree paths of its arguments and outputs. Out: the same program,
its values and those of the bodies in it named after the leaf that they are derived
from, or that they update.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.phases import FORWARD, holds_backward, node_phases
from shardfn._core.program import Atom, Node, Program, aval_of

Labels = dict[int, str]
"""Values of a program and the path of their leaf."""

_Key = tuple[Program, tuple[str, ...], tuple[str, ...]]
"""A program, and the paths of its inputs and outputs."""


def name_leaves(
    program: Program, input_paths: Sequence[str], output_paths: Sequence[str]
) -> Program:
    """Names the values of a step after leaves of its state.

    A value that reshapes, casts or transposes a leaf belongs to it, and so does one
    that an output is computed from by operations on values of its size: a gradient.
    Gradients are named after parameters before other leaves that they update.

    Args:
      program: the step.
      input_paths: per argument, the path of its state leaf, or "".
      output_paths: the same for the outputs.

    Returns:
      The program with `leaves`, each body in it a program of its own.
    """
    naming = _Naming(_read_forward(program, input_paths))
    return naming.name(program, input_paths, output_paths)


@dataclass(frozen=True, slots=True)
class _Naming:
    """Names programs, gradients after `parameters` before other leaves."""

    parameters: set[str]
    known: dict[_Key, Labels] = field(default_factory=dict)

    def name(
        self,
        program: Program,
        input_paths: Sequence[str],
        output_paths: Sequence[str],
    ) -> Program:
        labels = self.labels(program, input_paths, output_paths)
        nodes = tuple(
            replace(
                node,
                bodies=tuple(
                    self.name(body, ins, outs)
                    for body, ins, outs in _bodies(node, labels)
                ),
            )
            if node.bodies
            else node
            for node in program.nodes
        )
        leaves = tuple(labels.get(v, "") for v in range(len(program.avals)))
        return replace(program, nodes=nodes, leaves=leaves)

    def labels(
        self,
        program: Program,
        input_paths: Sequence[str],
        output_paths: Sequence[str],
    ) -> Labels:
        """What the values of a program belong to; found once for the same paths."""
        key = program, tuple(input_paths), tuple(output_paths)
        if key not in self.known:
            self.known[key] = self._labels(*key)
        return self.known[key]

    def _labels(
        self,
        program: Program,
        input_paths: Sequence[str],
        output_paths: Sequence[str],
    ) -> Labels:
        labels = _derived(program, input_paths)
        forward = _forward_values(program)
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
                self.label_operands(program, node, labels, forward)
                if node.kind == "cond":
                    self.label_through(node, labels)
        return labels

    def label_through(self, node: Node, labels: Labels) -> None:
        """Operands of a cond belong to the leaf that they update in a branch."""
        if labels.keys().isdisjoint(node.outputs):
            return
        for body, inputs, outputs in _bodies(node, labels):
            inner = self.labels(body, inputs, outputs)
            for atom, value in zip(node.inputs[1:], body.inputs, strict=True):
                if isinstance(atom, int) and value in inner:
                    labels.setdefault(atom, inner[value])

    def label_operands(
        self, program: Program, node: Node, labels: Labels, forward: set[int]
    ) -> None:
        """Operands as large as a labelled result update the same state leaf; but what
        the backward pass has from the `forward` one, such as statistics of the batch,
        is not a parameter's gradient."""
        if node.kind not in ("op", "constrain"):
            return
        ends = forward.isdisjoint(node.outputs)
        for result in node.outputs:
            if result not in labels or not _size(program, result):
                continue
            not_its = forward if ends and labels[result] in self.parameters else ()
            for atom in node.inputs:
                if not isinstance(atom, int) or atom in not_its:
                    continue
                if _size(program, atom) == _size(program, result):
                    labels.setdefault(atom, labels[result])


def _derived(program: Program, input_paths: Sequence[str]) -> Labels:
    """The values that are a leaf, or part of one, in another shape or dtype."""
    labels = {v: p for v, p in zip(program.inputs, input_paths, strict=True) if p}
    for node in program.nodes:
        source = _only_source(program, node)
        if source in labels:
            labels.update((v, labels[source]) for v in node.outputs)
        if node.kind not in ("scan", "remat", "custom"):
            continue
        carries = node.counts[1] if node.kind == "scan" else 0
        (body, ins, _), *_ = _bodies(node, labels)
        inner = _derived(body, ins)
        for value, atom in list(zip(node.outputs, body.outputs, strict=True))[carries:]:
            if isinstance(atom, int) and atom in inner:
                labels[value] = inner[atom]
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
    """The one value that a node reshapes, casts, transposes or slices, if it does just
    that."""
    values = [a for a in node.inputs if isinstance(a, int)]
    if node.kind not in ("op", "constrain") or len(values) != 1:
        return None
    source = values[0]
    if node.eqn.primitive.name in ("slice", "dynamic_slice"):
        return source
    same = all(_size(program, v) == _size(program, source) for v in node.outputs)
    return source if same else None


def _forward_values(program: Program) -> set[int]:
    """The values that the forward pass alone makes."""
    phases = node_phases(program, FORWARD)
    return {
        value
        for node, phase in zip(program.nodes, phases, strict=True)
        if phase == FORWARD and not holds_backward(node)
        for value in node.outputs
    }


def _bodies(
    node: Node, labels: Labels
) -> Iterator[tuple[Program, list[str], list[str]]]:
    """The bodies of a node, and the labels of their inputs and outputs."""
    ins = [labels.get(a, "") if isinstance(a, int) else "" for a in node.inputs]
    outs = [labels.get(v, "") for v in node.outputs]
    for i, program in enumerate(node.bodies):
        inputs, outputs = ins, outs
        if node.kind == "cond":
            inputs = ins[1:]
        if node.kind == "while":
            tests, consts = node.counts
            carry = ins[tests + consts :]
            inputs = ins[:tests] + carry if i == 0 else ins[tests:]
            outputs = [""] if i == 0 else outs
        yield program, inputs, outputs


def _size(program: Program, atom: Atom) -> int:
    return math.prod(getattr(aval_of(program, atom), "shape", ()))
