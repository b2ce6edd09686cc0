"""Which leaves of the state each value of a program belongs to.

In: a program, its nodes marked with their passes, and the tree paths of its arguments
and outputs. Out: the same program, its values and those of the bodies in it named after
the leaves that they are derived from, or that they update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.leaves import NO_LEAF, Names
from shardfn._core.phases import FORWARD, UPDATE
from shardfn._core.program import Node, Program, last_pass, number_of
from shardfn._trace.value_relations import (
    PART,
    SAME,
    WHOLE,
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

_Key = tuple[Program, tuple[Names, ...], tuple[Names, ...]]
"""A program, and the names of its inputs and outputs."""


def name_leaves(
    program: Program, input_paths: Sequence[str], output_paths: Sequence[str]
) -> Program:
    """Names the values of a step after leaves of its state.

    A value that reshapes, casts or transposes a leaf belongs to it, and one that joins
    several leaves to all of them. So does what an output or a moved copy of a leaf, as
    an inner step of MAML makes, is computed from, dimension by dimension: a gradient.
    The straightest way to a leaf counts, and that to a parameter before that to other
    leaves that a gradient updates.

    Args:
      program: the step.
      input_paths: per argument, the path of its state leaf, or "".
      output_paths: the same for the outputs.

    Returns:
      The program with `leaves`, each body in it a program of its own.
    """
    inputs, outputs = (
        [(path,) if path else NO_LEAF for path in paths]
        for paths in (input_paths, output_paths)
    )
    order = {path: i for i, path in enumerate(input_paths) if path}
    naming = _Naming(_read_forward(program, inputs), order)
    return naming.name(program, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _Naming:
    """Names programs, gradients after `parameters` before other leaves; the names of a
    value that belongs to several stand in `order`."""

    parameters: set[Names]
    order: dict[str, int]
    known: dict[_Key, Labels] = field(default_factory=dict)

    def name(
        self, program: Program, inputs: Sequence[Names], outputs: Sequence[Names]
    ) -> Program:
        labels = self.labels(program, inputs, outputs)
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
        leaves = tuple(labels.get(v, NO_LEAF) for v in range(len(program.avals)))
        return replace(program, nodes=nodes, leaves=leaves)

    def labels(
        self, program: Program, inputs: Sequence[Names], outputs: Sequence[Names]
    ) -> Labels:
        """What the values of a program belong to; found once for the same names."""
        key = program, tuple(inputs), tuple(outputs)
        if key not in self.known:
            self.known[key] = self._labels(*key)
        return self.known[key]

    def _labels(
        self, program: Program, inputs: Sequence[Names], outputs: Sequence[Names]
    ) -> Labels:
        labels = self.derived(program, inputs)
        made = {
            atom: names
            for atom, names in zip(program.outputs, outputs, strict=False)
            if isinstance(atom, int) and names
        }
        parameters = {v: n for v, n in made.items() if n in self.parameters}
        for found in (parameters, made):
            for value, names in found.items():
                labels.setdefault(value, names)
            self.trace_back(program, labels)
        if _name_moved(program, labels, self.parameters):
            self.trace_back(program, labels)
        return labels

    def trace_back(self, program: Program, labels: Labels) -> None:
        """Names what labelled values are computed from."""
        self.sweep(program, labels, LINEAR, ALIKE)
        found = dict(labels)
        self.sweep(program, found, PRODUCTS)
        gradients = {
            value: found[value]
            for node in program.nodes
            if last_pass(node).is_backward
            for value in node.outputs
            if value in found and value not in labels
        }
        if gradients:
            labels.update(gradients)
            self.sweep(program, labels, LINEAR, ALIKE)

    def sweep(self, program: Program, labels: Labels, *ways: str) -> None:
        forward = _forward_values(program)
        for through in ways:
            sweep = _Sweep(self, labels, forward, through)
            for node in reversed(program.nodes):
                sweep.node(node)

    def joined(self, names: Sequence[Names]) -> Names:
        """The names of what belongs to all of these."""
        every = {name for each in names for name in each}
        return tuple(sorted(every, key=lambda name: self.order.get(name, -1)))

    def derived(self, program: Program, inputs: Sequence[Names]) -> Labels:
        """The values that are leaves, or parts of them, in other shapes or dtypes."""
        labels = {v: n for v, n in zip(program.inputs, inputs, strict=True) if n}
        for node in program.nodes:
            names = self.of_operands(node, labels)
            if names:
                labels.update((v, names) for v in node.outputs)
            if node.kind not in ("scan", "remat", "custom"):
                continue
            (body, ins, _), *_ = _bodies(node, labels)
            inner = self.derived(body, ins)
            (region,) = node.regions
            carried = {j for j, _ in region.loops}
            for j, result in region.returned():
                atom = body.outputs[j]
                if j not in carried and isinstance(atom, int) and atom in inner:
                    labels[node.outputs[result]] = inner[atom]
        return labels

    def of_operands(self, node: Node, labels: Labels) -> Names:
        """The names of what a node makes, if it only rearranges leaves, or is an op on
        one of them."""
        if node.kind == "constrain":
            return labels.get(number_of(node.inputs[0]), NO_LEAF)
        rule = node.rule
        if node.kind != "op" or rule is None:
            return NO_LEAF
        values = [i for i, a in enumerate(node.inputs) if isinstance(a, int)]
        values = [i for i in values if rule.operands[i]] or values
        names = [labels.get(number_of(node.inputs[i]), NO_LEAF) for i in values]
        how = {
            relation_of(node, i, j) for i in values for j in range(len(rule.results))
        }
        if not all(names) or not how:
            return NO_LEAF
        if len(values) == 1:
            return names[0] if how <= {SAME, PART} else NO_LEAF
        joins = (
            how <= {SAME, WHOLE} and WHOLE in how and frozenset(values) in rule.linear
        )
        return self.joined(names) if joins else NO_LEAF


@dataclass(slots=True)
class _Sweep:
    """One way back through a program, `through` these ops.

    `forward` are the values that forward passes made; `parts` those of which parts are
    labelled, and the labels of these.
    """

    naming: _Naming
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
                how = self.relation(node, i, j)
                if how is None or stops and atom in self.forward:
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
        branches = zip(_bodies(node, self.labels), node.regions, strict=True)
        for (body, inputs, outputs), region in branches:
            inner = self.naming.labels(body, inputs, outputs)
            operands = region.entering(node.inputs)
            for atom, value in zip(operands, body.inputs, strict=True):
                if isinstance(atom, int) and value in inner:
                    self.labels.setdefault(atom, inner[value])


def _name_moved(program: Program, labels: Labels, parameters: set[Names]) -> bool:
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


def _read_forward(program: Program, inputs: Sequence[Names]) -> set[Names]:
    """Names of the state leaves that forward passes read: the parameters."""
    labels = {v: n for v, n in zip(program.inputs, inputs, strict=True) if n}
    read: set[Names] = set()
    for node in program.nodes:
        if node.during.phase != FORWARD:
            continue
        if last_pass(node) == node.during:
            read.update(labels[a] for a in map(number_of, node.inputs) if a in labels)
            continue
        for body, ins, _ in _bodies(node, labels):
            read |= _read_forward(body, ins)
    return read


def _forward_values(program: Program) -> set[int]:
    """The values that forward passes alone make."""
    return {
        value
        for node in program.nodes
        if node.during.is_forward and last_pass(node) == node.during
        for value in node.outputs
    }


def _bodies(
    node: Node, labels: Labels
) -> Iterator[tuple[Program, list[Names], list[Names]]]:
    """The bodies of a node, and the labels of their inputs and outputs."""
    ins = [labels.get(number_of(atom), NO_LEAF) for atom in node.inputs]
    outs = [labels.get(value, NO_LEAF) for value in node.outputs]
    for program, region in zip(node.bodies, node.regions, strict=True):
        yield program, region.entering(ins), region.leaving(outs, NO_LEAF)
