"""Where a value comes from: a name that equal values in different bodies share.

In: a program and the control flow that it lies in. Out: an `Origin` per value. Values
of one origin are equal in every iteration; all else has an origin of its own.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardfn._core.program import Atom, Node, Program

Origin = tuple[Hashable, ...]
"""`("value", program, number)`, `("slice", origin)` of what a scan goes through, or
`("op", what it does, origin)` of an op of one operand."""


def depth_of(origin: Origin) -> int:
    """How many scans slice what a value comes from."""
    depth = 0
    while origin[0] != "value":
        depth += origin[0] == "slice"
        last = origin[-1]
        assert isinstance(last, tuple)
        origin = last
    return depth


@dataclass(slots=True, eq=False)
class Scope:
    """A program, and the node of the program around it whose body it is."""

    program: Program
    node: Node | None = None
    outer: "Scope | None" = None
    origins: dict[int, Origin] = field(default_factory=dict)
    frames: dict[int, "Scope"] = field(default_factory=dict)
    makers: dict[int, tuple[Node, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.program.nodes:
            self.makers.update((v, (node, k)) for k, v in enumerate(node.outputs))

    def enter(self, node: Node) -> "Scope":
        """The frame of the body of a scan or remat."""
        key = node.outputs[0] if node.outputs else -1
        if key not in self.frames:
            self.frames[key] = Scope(node.bodies[0], node, self)
        return self.frames[key]

    def origin(self, atom: Atom) -> Origin:
        if not isinstance(atom, int):
            return "value", _literal(atom)
        if atom not in self.origins:
            self.origins[atom] = self._origin(atom)
        return self.origins[atom]

    def _origin(self, value: int) -> Origin:
        own = "value", id(self.program), value
        if value in self.makers:
            node, index = self.makers[value]
            if node.is_call:
                return self.enter(node).origin(node.bodies[0].outputs[index])
            operands = [a for a in node.inputs if isinstance(a, int)]
            if node.kind != "op" or len(operands) != 1 or node.eqn.effects:
                return own
            key = _op_key(node)
            return (
                own if key is None else ("op", (key, index), self.origin(operands[0]))
            )
        return self._input(value) or own

    def _input(self, value: int) -> Origin | None:
        """The origin of an argument, if it is that of a value outside."""
        if self.node is None or self.outer is None:
            return None
        (region,), position = self.node.regions, self.program.inputs.index(value)
        outside = self.node.inputs[region.operands[position]]
        if position in region.constants:
            return self.outer.origin(outside)
        if position in region.carries or not isinstance(outside, int):
            return None
        return self.outer.slice(outside)

    def slice(self, value: int) -> Origin:
        """The origin of what a scan over `value` gets in each iteration."""
        node, index = self.makers.get(value, (None, 0))
        if node is not None and any(index in r.stacks for r in node.regions):
            return self.enter(node).origin(node.bodies[0].outputs[index])
        return "slice", self.origin(value)


def _op_key(node: Node) -> Hashable | None:
    """What an op does to its one operand; None if that cannot be compared."""
    literals = tuple(None if isinstance(a, int) else _literal(a) for a in node.inputs)
    params = tuple(sorted(node.eqn.params.items()))
    key = node.eqn.primitive, literals, params
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _literal(atom: Any) -> Hashable:
    return str(atom.aval), np.asarray(atom.val).tobytes()
