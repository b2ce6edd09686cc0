"""A traced step in the form that propagation and lowering share.

In: nothing. Out: `Program`, with numbered values, one `Node` per equation, and programs
in the nodes of control flow; `_trace.jaxpr_to_program` makes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jax.extend.core import JaxprEqn, Literal

from shardfn._core.leaves import NO_LEAF, Names
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.phases import BACKWARD, Pass
from shardfn._core.regions import Region

T = TypeVar("T")

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
      derivatives: of the gradients that JAX made it for inside of this program, from
        the outside, whether it is in their forward or backward pass.
      kind: "op", "barrier" (operands pass through unchanged, tied together),
        "constrain" (the operand does, its sharding given by the user), or the control
        flow: "scan", "while", "cond", "remat", "custom" (a function with a
        derivative of its own).
      bodies: the programs of control flow: the scan, remat or custom body, the while
        condition and body, the branches.
      rule: the op's rule, if it has one.
      kinds: per operand VALUE, ZERO (known to be zero) or LITERAL (another one).
      eqn_key: see `equation_key`; the same object for equal equations.
      regions: per body, how its arguments and results lie among the node's.
      during: in which pass of the step it runs; `_trace.mark_passes` fills it in.
      microbatches: whether it is a scan over microbatches, each with rows to split.
    """

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    derivatives: tuple[str, ...] = ()
    kind: str = "op"
    bodies: "tuple[Program, ...]" = ()
    regions: tuple[Region, ...] = ()
    rule: OpShardingRule | None = None
    kinds: tuple[str, ...] = ()
    eqn_key: tuple[Any, ...] = ()
    during: Pass = Pass()
    microbatches: bool = False

    @property
    def backward(self) -> bool:
        """Whether it is in the backward pass of a gradient."""
        return self.during.is_backward

    @property
    def passes_through(self) -> bool:
        """Whether its results are its operands, one by one."""
        return self.kind in ("barrier", "constrain")

    @property
    def is_loop(self) -> bool:
        return self.kind in ("scan", "while")

    @property
    def is_call(self) -> bool:
        """Whether it runs one body once."""
        return self.kind in ("remat", "custom")

    @property
    def times(self) -> int | None:
        """How often it runs its body; None if that cannot be known."""
        if self.kind == "while":
            return None
        return self.eqn.params["length"] if self.kind == "scan" else 1

    def sliced(self, operands: Sequence[T]) -> list[T]:
        """What of its operands a scan takes a slice of in each iteration."""
        return [
            operands[region.operands[i]]
            for region in self.regions
            for i in region.slices
        ]

    @property
    def is_unrolled(self) -> bool:
        """Whether it is a scan of which the compiler keeps no loop: of one round at
        most."""
        if self.kind != "scan":
            return False
        unroll, length = self.eqn.params["unroll"], self.eqn.params["length"]
        return unroll == 0 or 2 * unroll > length  # JAX's 0 is all


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A jaxpr with numbered values.

    Attributes:
      avals: the aval of every value.
      inputs: the values that are arguments.
      constants: values that are arrays captured by the traced function.
      nodes: equations in order.
      outputs: what the program returns.
      leaves: per value, the names of the state leaves that it belongs to; empty if
        values have no names. See `leaf_names`.
    """

    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Atom, ...]
    leaves: tuple[Names, ...] = ()

    def leaf(self, value: int) -> Names:
        """The names of the state leaves that a value belongs to."""
        return self.leaves[value] if self.leaves else NO_LEAF


def number_of(atom: Atom) -> int:
    """The number of a value; one that no value has for a literal."""
    return atom if isinstance(atom, int) else -1


def aval_of(program: Program, atom: Atom) -> Any:
    return program.avals[atom] if isinstance(atom, int) else atom.aval


def last_pass(node: Node) -> Pass:
    """The pass that a node ends in: the backward pass of a whole gradient inside."""
    if node.during.phase == BACKWARD:
        return node.during
    return max(_backward(node), key=lambda p: p.gradient, default=node.during)


def _backward(node: Node) -> Iterator[Pass]:
    """The backward passes of the gradients that lie in the bodies of a node."""
    for body in node.bodies:
        for inner in body.nodes:
            if inner.during.phase == BACKWARD:
                yield inner.during
            else:
                yield from _backward(inner)


def mixes_passes(program: Program) -> bool:
    """Whether a program holds both a forward and a backward pass, as a microbatch
    does."""
    kinds = {node.backward for node in program.nodes}
    nested = any(mixes_passes(b) for node in program.nodes for b in node.bodies)
    return len(kinds) > 1 or nested


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
