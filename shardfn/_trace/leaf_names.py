"""Which leaves of the state each value of a program belongs to.

In: a program, its nodes marked with their passes, and the tree paths of its arguments
and outputs. Out: the same program, its values and those of the bodies in it named after
the leaves that they are derived from, or that they update.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.leaves import NO_LEAF, Names
from shardfn._core.phases import FORWARD
from shardfn._core.program import Node, Program, last_pass, number_of
from shardfn._trace.gradient_names import (
    Labels,
    labelled_bodies,
    name_moved,
    trace_back,
)
from shardfn._trace.value_relations import (
    PART,
    SAME,
    WHOLE,
    relation_of,
)

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
                    for body, ins, outs in labelled_bodies(node, labels)
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
            trace_back(self, program, labels)
        if name_moved(program, labels, self.parameters):
            trace_back(self, program, labels)
        return labels

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
            (body, ins, _), *_ = labelled_bodies(node, labels)
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
        for body, ins, _ in labelled_bodies(node, labels):
            read |= _read_forward(body, ins)
    return read
