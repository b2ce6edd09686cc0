"""A traced step in the form that propagation and lowering share.

In: nothing. Out: `Program`, with numbered values, one `Node` per equation, and programs
in the nodes of control flow; `_trace.jaxpr_to_program` makes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from shardfn._core.op_sharding_rule import OpShardingRule

Atom = int | Literal
"""A value of the program, or a literal."""

VALUE, ZERO, LITERAL = "value", "zero", "literal"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One equation of a program.

    Attributes:
      eqn: the equation as traced.
      inputs: value numbers or literals.
      outputs: value numbers.
      backward: True in the backward pass of autodiff.
      kind: "op", "barrier" (operands pass through unchanged, tied together),
        "constrain" (the operand does, its sharding given by the user), or the control
        flow: "scan", "while", "cond", "remat", "custom" (a function with a
        derivative of its own).
      bodies: the programs of control flow: the scan, remat or custom body, the while
        condition and body, the branches.
      rule: the op's rule, if it has one.
      kinds: per operand VALUE, ZERO (known to be zero) or LITERAL (another one).
      looks: see `equation_key`; the same object for equations that look the same.
      counts: scan: (constants, carries); while: (condition constants, body constants).
    """

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    backward: bool
    kind: str = "op"
    bodies: "tuple[Program, ...]" = ()
    counts: tuple[int, int] = (0, 0)
    rule: OpShardingRule | None = None
    kinds: tuple[str, ...] = ()
    looks: tuple[Any, ...] = ()

    @property
    def is_unrolled(self) -> bool:
        """Whether it is a scan of which the compiler is given no loop."""
        params = self.eqn.params
        return self.kind == "scan" and params["unroll"] >= params["length"]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A jaxpr with numbered values.

    Attributes:
      avals: the aval of every value.
      inputs: the values that are arguments.
      constants: values that are arrays captured by the traced function.
      nodes: equations in order.
      outputs: what the program returns.
      leaves: per value, the path of the state leaf that it belongs to, or ""; empty if
        values have no names. See `leaf_names`.
    """

    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Atom, ...]
    leaves: tuple[str, ...] = ()

    def leaf(self, value: int) -> str:
        """The path of the state leaf that a value belongs to, or ""."""
        return self.leaves[value] if self.leaves else ""


def aval_of(program: Program, atom: Atom) -> Any:
    return program.avals[atom] if isinstance(atom, int) else atom.aval


def live(
    nodes: Sequence[Node], constants: Sequence[tuple[int, Any]], outputs: Sequence[Atom]
) -> tuple[tuple[Node, ...], tuple[tuple[int, Any], ...]]:
    """The nodes and constants that some output or effect needs."""
    needed = {v for v in outputs if isinstance(v, int)}
    kept = []
    for node in reversed(nodes):
        if node.eqn.effects or needed.intersection(node.outputs):
            kept.append(node)
            needed.update(v for v in node.inputs if isinstance(v, int))
    return tuple(reversed(kept)), tuple(c for c in constants if c[0] in needed)
