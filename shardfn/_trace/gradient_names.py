"""Which leaf of the state each gradient updates, found backward from the new state.

In: a program some of whose values are named after leaves. Out: the same names, and
those of what these values are computed from, dimension by dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardfn._core.leaves import NO_LEAF, Names
from shardfn._core.phases import UPDATE
from shardfn._core.program import Node, Program, last_pass, number_of
from shardfn._trace.value_relations import (
    PART,
    SAME,
    has_dimensions,
    is_factor_of,
    is_linear,
    relation_of,
)

LINEAR, ALIKE, PRODUCTS = "linear", "alike", "products"
"""Ways from a leaf back to its gradient: through ops that are linear and keep its
dimensions; through all that keep them; and through products of it and something else,
as with a preconditioner."""


Labels = dict[int, Names]
"""Values of a program and the paths of their leaves."""


class Naming(Protocol):
    """What a way back asks of those that name the program around it.

    Attributes:
      parameters: the names of leaves that forward passes read.
    """

    @property
    def parameters(self) -> set[Names]: ...

    def joined(self, names: Sequence[Names]) -> Names:
        """The names of what belongs to all of these."""
        ...

    def labels(
        self, program: Program, inputs: Sequence[Names], outputs: Sequence[Names]
    ) -> Labels:
        """What the values of a program belong to."""
        ...


def trace_back(naming: Naming, program: Program, labels: Labels) -> None:
    """Names what labelled values are computed from."""
    _sweep(naming, program, labels, LINEAR, ALIKE)
    found = dict(labels)
    _sweep(naming, program, found, PRODUCTS)
    gradients = {
        value: found[value]
        for node in program.nodes
        if last_pass(node).is_backward
        for value in node.outputs
        if value in found and value not in labels
    }
    if gradients:
        labels.update(gradients)
        _sweep(naming, program, labels, LINEAR, ALIKE)


def _sweep(naming: Naming, program: Program, labels: Labels, *ways: str) -> None:
    forward = _forward_values(program)
    for through in ways:
        sweep = _Sweep(naming, labels, forward, through)
        for node in reversed(program.nodes):
            sweep.node(node)


@dataclass(slots=True)
class _Sweep:
    """One way back through a program, `through` these ops.

    `forward` are the values that forward passes made; `parts` those of which parts are
    labelled, and the labels of these.
    """

    naming: Naming
    labels: Labels
    forward: set[int]
    through: str
    parts: dict[int, list[Names]] = field(default_factory=dict)

    def node(self, node: Node) -> None:
        for value in node.outputs:
            if value in self.parts and value not in self.labels:
                self.labels[value] = self.naming.joined(self.parts[value])
        if self.labels.keys().isdisjoint(node.outputs):
            return
        if node.kind == "cond":
            self.branches(node)
        elif node.is_loop:
            self.carries(node)
        elif not node.bodies:
            self.operands(node)

    def operands(self, node: Node) -> None:
        """What results are computed from, dimension by dimension, updates their leaf.

        But what the backward pass has from the forward one, such as statistics of the
        batch, is not a parameter's gradient.
        """
        for j, result in enumerate(node.outputs):
            names = self.labels.get(result, NO_LEAF)
            stops = names in self.naming.parameters and not node.during.is_forward
            for i, atom in enumerate(node.inputs):
                if not names or not isinstance(atom, int) or atom in self.labels:
                    continue
                if stops and atom in self.forward:
                    continue
                how = self.relation(node, i, j)
                if how is None:
                    continue
                if how == PART:
                    self.parts.setdefault(atom, []).append(names)
                else:
                    self.labels[atom] = names

    def relation(self, node: Node, i: int, j: int) -> str | None:
        """How result `j` stands to operand `i`, if the way leads through here."""
        how = relation_of(node, i, j)
        # Nothing tells scalars apart but what is linear in them.
        by_sums = self.through == LINEAR or not has_dimensions(node, j)
        if by_sums and not is_linear(node, i):
            return None
        if how is None and self.through == PRODUCTS and node.during.phase == UPDATE:
            return SAME if is_factor_of(node, i, j) else None
        return how

    def carries(self, node: Node) -> None:
        """What a loop starts from belongs to the leaf that it ends as."""
        if self.through == LINEAR:
            return
        for region in node.regions:
            ends = region.leaving(node.outputs, -1)
            starts = region.entering(node.inputs)
            for j, i in region.loops:
                atom = starts[i]
                if isinstance(atom, int) and ends[j] in self.labels:
                    self.labels.setdefault(atom, self.labels[ends[j]])

    def branches(self, node: Node) -> None:
        """Operands of a cond belong to the leaf that they update in a branch."""
        branches = zip(labelled_bodies(node, self.labels), node.regions, strict=True)
        for (body, inputs, outputs), region in branches:
            inner = self.naming.labels(body, inputs, outputs)
            operands = region.entering(node.inputs)
            for atom, value in zip(operands, body.inputs, strict=True):
                if isinstance(atom, int) and value in inner:
                    self.labels.setdefault(atom, inner[value])


def name_moved(program: Program, labels: Labels, parameters: set[Names]) -> bool:
    """Names what is made of one parameter and its gradients within the step, as an
    inner step of MAML makes; says whether there is any."""
    found = False
    after: set[int] = set()
    for node in program.nodes:
        if node.backward or not after.isdisjoint(map(number_of, node.inputs)):
            after.update(node.outputs)
        for j, value in enumerate(node.outputs):
            if value in labels or node.kind != "op" or node.rule is None:
                continue
            alike = [
                atom
                for i, atom in enumerate(node.inputs)
                if isinstance(atom, int) and relation_of(node, i, j) == SAME
            ]
            names = {labels[atom] for atom in alike if atom in labels}
            others = [atom for atom in alike if atom not in labels]
            moves = not node.backward and not after.isdisjoint(others)
            known = len(names) == 1 and names <= parameters
            if known and (moves or not others) and has_dimensions(node, j):
                labels[value], found = names.pop(), True
    return found


def _forward_values(program: Program) -> set[int]:
    """The values that forward passes alone make."""
    return {
        value
        for node in program.nodes
        if node.during.is_forward and last_pass(node) == node.during
        for value in node.outputs
    }


def labelled_bodies(
    node: Node, labels: Labels
) -> Iterator[tuple[Program, list[Names], list[Names]]]:
    """The bodies of a node, and the labels of their inputs and outputs."""
    ins = [labels.get(number_of(atom), NO_LEAF) for atom in node.inputs]
    outs = [labels.get(value, NO_LEAF) for value in node.outputs]
    for program, region in zip(node.bodies, node.regions, strict=True):
        yield program, region.entering(ins), region.leaving(outs, NO_LEAF)
