"""A traced step in the form that propagate and emit share.

In: a closed jaxpr. Out: a `Program`: values are numbered, calls are inlined, equal
equations merged, dead ones dropped, and control flow holds programs of its own.

Calls (jit, custom_jvp, ...) are inlined because XLA inlines them too: two gathers of
one parameter, one in each call, would be merged behind the plan's back.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from shardfn import _compat

Atom = int | Literal
"""A value of the program, or a literal."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One equation of a program.

    Attributes:
      eqn: the equation as traced.
      inputs: value numbers or literals.
      outputs: value numbers.
      backward: True in the backward pass of autodiff.
      kind: "op", "barrier" (operands pass through unchanged, tied together), or the
        control flow: "scan", "while", "cond", "remat".
      bodies: the programs of control flow: the scan or remat body, the while condition
        and body, the branches.
      counts: scan: (constants, carries); while: (condition constants, body constants).
    """

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    backward: bool
    kind: str = "op"
    bodies: "tuple[Program, ...]" = ()
    counts: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A jaxpr with numbered values.

    Attributes:
      avals: the aval of every value.
      inputs: the values that are arguments.
      constants: values that are arrays captured by the traced function.
      nodes: equations in order.
      outputs: what the program returns.
      zeros: values known to be zero everywhere.
    """

    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Atom, ...]
    zeros: frozenset[int]


def aval_of(program: Program, atom: Atom) -> Any:
    return program.avals[atom] if isinstance(atom, int) else atom.aval


def make_program(closed_jaxpr: Any) -> Program:
    """Numbers the values of a closed jaxpr; see the module's first lines."""
    return _Builder().build(_compat.without_dead_code(closed_jaxpr), backward=False)


@dataclass
class _Builder:
    """What is shared while one jaxpr and the jaxprs in it become programs."""

    cache: dict[tuple[int, bool], Program] = field(default_factory=dict)
    keep_alive: list[Any] = field(default_factory=list)

    def build(self, closed: Any, backward: bool) -> Program:
        key = (id(closed), backward)
        if key not in self.cache:
            self.keep_alive.append(closed)
            self.cache[key] = _Values(self, backward).run(closed)
        return self.cache[key]


@dataclass
class _Values:
    """The values and nodes of one program while it is built.

    Equations on equal operands are merged, except those on literals alone: what they
      make
    can be made in any sharding, and consumers that want different ones should not share
    it. `same` maps such a value to the first one equal to it.
    """

    builder: _Builder
    backward: bool
    avals: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: list[tuple[int, Any]] = field(default_factory=list)
    seen: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    zeros: set[int] = field(default_factory=set)
    same: dict[int, int] = field(default_factory=dict)

    def run(self, closed: Any) -> Program:
        jaxpr, consts = _compat.open_jaxpr(closed)
        inputs = tuple(self.new(v.aval) for v in jaxpr.invars)
        outputs = self.inline(jaxpr, consts, inputs, self.backward)
        nodes, constants = _live(self.nodes, self.constants, outputs)
        return Program(
            avals=tuple(self.avals),
            inputs=inputs,
            constants=constants,
            nodes=nodes,
            outputs=outputs,
            zeros=frozenset(self.zeros),
        )

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def inline(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom], backward: bool
    ) -> tuple[Atom, ...]:
        env: dict[Any, Atom] = {}

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = value = self.new(var.aval)
            self.constants.append((value, const))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = tuple(map(read, eqn.invars))
            is_backward = backward or "transpose(" in _compat.name_stack(eqn)
            body = _compat.inlined_body(eqn)
            if body is not None:
                inner, inner_consts = _compat.open_jaxpr(_compat.close_jaxpr(body))
                results = self.inline(inner, inner_consts, operands, is_backward)
            else:
                results = self.add(eqn, operands, is_backward)
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple(map(read, jaxpr.outvars))

    def add(
        self, eqn: Any, operands: tuple[Atom, ...], backward: bool
    ) -> tuple[int, ...]:
        key = _merge_key(eqn, operands, self.same)
        equal = self.seen.get(key) if key is not None else None
        if equal is not None and any(isinstance(atom, int) for atom in operands):
            return equal
        kind, bodies, counts = self.control_flow(eqn, backward)
        outputs = tuple(self.new(v.aval) for v in eqn.outvars)
        self.nodes.append(Node(eqn, operands, outputs, backward, kind, bodies, counts))
        if self.makes_zeros(eqn, operands):
            self.zeros.update(outputs)
        if equal is not None:
            self.same.update(zip(outputs, equal, strict=True))
        elif key is not None:
            self.seen[key] = outputs
        return outputs

    def control_flow(
        self, eqn: Any, backward: bool
    ) -> tuple[str, tuple[Program, ...], tuple[int, int]]:
        def body(jaxpr: Any) -> Program:
            return self.builder.build(_compat.close_jaxpr(jaxpr), backward)

        params = eqn.params
        if eqn.primitive is _compat.scan_p:
            return "scan", (body(params["jaxpr"]),), _compat.scan_counts(eqn)
        if eqn.primitive is _compat.while_p:
            counts = params["cond_nconsts"], params["body_nconsts"]
            bodies = body(params["cond_jaxpr"]), body(params["body_jaxpr"])
            return "while", bodies, counts
        if eqn.primitive is _compat.cond_p:
            return "cond", tuple(map(body, params["branches"])), (0, 0)
        if eqn.primitive is _compat.remat_p:
            return "remat", (body(params["jaxpr"]),), (0, 0)
        if eqn.primitive.name == "optimization_barrier":
            return "barrier", (), (0, 0)
        return "op", (), (0, 0)

    def makes_zeros(self, eqn: Any, operands: tuple[Atom, ...]) -> bool:
        passes_on = ("broadcast_in_dim", "convert_element_type", "reshape", "copy")
        if eqn.primitive.name not in passes_on or not operands:
            return False
        first = operands[0]
        if isinstance(first, Literal):
            return np.ndim(first.val) == 0 and bool(first.val == 0)
        return first in self.zeros


def _merge_key(
    eqn: Any, operands: tuple[Atom, ...], same: dict[int, int]
) -> Hashable | None:
    """Equal keys mean equal results; None if the equation must not be merged."""
    if eqn.effects or eqn.primitive.name in ("optimization_barrier", "name"):
        return None
    if any(hasattr(p, "eqns") or hasattr(p, "jaxpr") for p in eqn.params.values()):
        return None

    def operand_key(atom: Atom) -> Hashable:
        if isinstance(atom, int):
            return same.get(atom, atom)
        value = np.asarray(atom.val) if np.isscalar(atom.val) else atom.val
        return type(atom.val), str(atom.aval), value.tobytes()

    try:
        key = (
            eqn.primitive,
            tuple(map(operand_key, operands)),
            tuple(sorted(eqn.params.items())),
            str([v.aval for v in eqn.outvars]),
        )
        hash(key)
    except (TypeError, AttributeError):
        return None
    return key


def _live(
    nodes: list[Node], constants: list[tuple[int, Any]], outputs: Sequence[Atom]
) -> tuple[tuple[Node, ...], tuple[tuple[int, Any], ...]]:
    """The nodes and constants that some output or effect needs."""
    needed = {v for v in outputs if isinstance(v, int)}
    kept = []
    for node in reversed(nodes):
        if node.eqn.effects or needed.intersection(node.outputs):
            kept.append(node)
            needed.update(v for v in node.inputs if isinstance(v, int))
    return tuple(reversed(kept)), tuple(c for c in constants if c[0] in needed)
