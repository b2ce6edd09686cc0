"""A program while operations of it are replaced by what functions do.

In: a program. Out: the program with other nodes, in which the function's operations
run in the pass of the node that they are for, and carry its line of code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardfn._core import compat
from shardfn._core.leaves import NO_LEAF
from shardfn._core.phases import Pass
from shardfn._core.program import Atom, Node, Program, live
from shardfn._trace.jaxpr_to_program import make_program


@dataclass(slots=True)
class Inlined:
    """A program and what is added to it.

    Attributes:
      program: as it was.
      avals: those of its values, and of more.
      nodes: those of the new program so far.
      constants: its constants, and more.
    """

    program: Program
    avals: list[Any] = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    constants: list[tuple[int, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.avals = list(self.program.avals)
        self.constants = list(self.program.constants)

    def finished(self) -> Program:
        """The new program, of what its outputs need."""
        program = self.program
        nodes, constants = live(self.nodes, self.constants, program.outputs)
        more = (NO_LEAF,) * (len(self.avals) - len(program.avals))
        return replace(
            program,
            avals=tuple(self.avals),
            nodes=nodes,
            constants=constants,
            leaves=(*program.leaves, *more) if program.leaves else (),
        )

    def inline(
        self,
        near: Node,
        run: Callable[..., Any],
        operands: Sequence[Atom],
        results: Sequence[int] | None = None,
    ) -> tuple[Atom, ...]:
        """Adds what a function does, in the pass and the line of a node.

        Args:
          near: the node.
          run: the function.
          operands: what it is given.
          results: the values that it makes; new ones if none are given.

        Returns:
          The values that it makes.
        """
        avals = [self.avals[a] if isinstance(a, int) else a.aval for a in operands]
        with compat.at_top_level(), compat.as_user_code(near.eqn):
            closed = jax.make_jaxpr(run)(*map(compat.abstract, avals))
        inner = _in_pass(make_program(closed), near.during)
        known: dict[int, Atom] = dict(zip(inner.inputs, operands, strict=True))
        for atom, value in zip(inner.outputs, results or (), strict=False):
            assert isinstance(atom, int) and atom not in known
            known[atom] = value
        for value, aval in enumerate(inner.avals):
            if value not in known:
                known[value] = len(self.avals)
                self.avals.append(aval)

        def named(atoms: Sequence[Atom]) -> tuple[Any, ...]:
            return tuple(known[a] if isinstance(a, int) else a for a in atoms)

        self.constants += [(*named([v]), c) for v, c in inner.constants]
        self.nodes += [
            replace(node, inputs=named(node.inputs), outputs=named(node.outputs))
            for node in inner.nodes
        ]
        return named(inner.outputs)


def _in_pass(program: Program, during: Pass) -> Program:
    """A program whose nodes run in one pass."""
    nodes = (
        replace(
            node,
            during=during,
            bodies=tuple(_in_pass(body, during) for body in node.bodies),
        )
        for node in program.nodes
    )
    return replace(program, nodes=tuple(nodes))
