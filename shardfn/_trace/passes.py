"""In which pass of which gradient each equation of a step runs.

In: a program as traced, and what its arguments are. Out: the same, its nodes marked
with their `Pass`, and the loops that go through microbatches marked as such.

JAX keeps with each equation the transforms that made it: inside `jvp` it is a forward
pass, inside `transpose` the backward pass of that. What neither made comes before the
gradients, or updates something with them; or it is a forward pass of its own, as of a
teacher or of an evaluation: that begins where parameters meet rows of the batch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.phases import BACKWARD, FORWARD, UPDATE, Pass
from shardfn._core.program import Atom, Node, Program, number_of
from shardfn._core.sharding import Sharding, Split
from shardfn._trace.dim_marks import FIXED, ROWS, Marking, Marks, has_rows, marks_of

Directions = tuple[str, ...]
"""Of the gradients that something is part of, from the outside, which pass."""


@dataclass(frozen=True, slots=True)
class Argument:
    """What an argument of a step is.

    Attributes:
      marks: what lies along its dimensions; see `dim_marks`.
      state: whether it is part of the state.
    """

    marks: Marks
    state: bool = False


def argument(shape: Sequence[int], sharding: Sharding, is_state: bool) -> Argument:
    """What an argument of this shape is: along what splits a batch's leaf lie rows."""
    splits = {s.dim for s in sharding if isinstance(s, Split) and not is_state}
    return Argument(
        tuple(ROWS if d in splits else FIXED for d in range(len(shape))), is_state
    )


def mark_passes(program: Program, arguments: Sequence[Argument] = ()) -> Program:
    """Marks every node with its pass.

    Args:
      program: the program.
      arguments: what its arguments are; none of them state or batch if not given.

    Returns:
      The program.
    """
    if not arguments:
        ranks = (len(getattr(program.avals[v], "shape", ())) for v in program.inputs)
        arguments = [Argument((FIXED,) * rank) for rank in ranks]
    inputs = tuple(a.marks for a in arguments)
    state = tuple(a.state for a in arguments)
    return _Passes().program(program, (), inputs, state)


@dataclass(slots=True)
class _Passes:
    """What is known while nodes are marked in the order of the trace.

    `begun` counts the gradients that have begun their forward pass; `after` says
    whether the newest has begun its backward pass.
    """

    begun: int = 0
    after: bool = False
    marking: Marking = field(default_factory=Marking)
    known: dict[Hashable, tuple[Program, tuple[int, bool]]] = field(
        default_factory=dict
    )
    keep_alive: list[Program] = field(default_factory=list)

    @property
    def at(self) -> tuple[int, bool]:
        return self.begun, self.after

    def go(self, at: tuple[int, bool]) -> None:
        self.begun, self.after = at

    def program(
        self,
        program: Program,
        outer: Directions,
        inputs: tuple[Marks, ...],
        state: tuple[bool, ...],
    ) -> Program:
        """A program, marked, whose node is part of `outer` gradients."""
        key = id(program), outer, inputs, state, self.at
        if key not in self.known:
            self.keep_alive.append(program)
            marked = _Body(self, program, outer, inputs, state).marked()
            self.known[key] = marked, self.at
        marked, at = self.known[key]
        self.go(at)
        return marked

    def derived(self, directions: Directions) -> Pass:
        """The pass of what the derivatives of a gradient made."""
        if directions[0] == BACKWARD:
            self.go((max(self.begun, 1), True))
        elif self.after or not self.begun:
            self.go((self.begun + 1, False))
        inner = list(directions[1:])
        while inner and inner[-1] == FORWARD:
            inner.pop()
        return Pass(directions[0], self.begun - 1, tuple(inner))

    def plain(self, alone: bool) -> Pass:
        """The pass of what no gradient made; `alone` if it is part of a forward pass of
        its own."""
        if self.after and alone:
            return Pass(FORWARD, self.begun)
        return Pass(UPDATE if self.after else FORWARD, max(self.begun - 1, 0))


@dataclass(slots=True)
class _Body:
    """One program while its nodes are marked.

    `parameters` are the values made of state and gradients, without rows; `forward`
    those with rows that a forward pass of its own has made.
    """

    passes: _Passes
    program: Program
    outer: Directions
    inputs: tuple[Marks, ...]
    state: tuple[bool, ...]
    parameters: set[Atom] = field(default_factory=set)
    forward: set[Atom] = field(default_factory=set)

    def marked(self) -> Program:
        program = self.program
        marks = self.passes.marking.values(program, self.inputs)
        given = zip(program.inputs, self.state, strict=True)
        self.parameters.update(value for value, is_state in given if is_state)
        own = [node.derivatives for node in program.nodes]
        own = own if self.outer else _without_plain_jvp(program, own)
        nodes = [
            self.node(node, (*self.outer, *directions), marks)
            for node, directions in zip(program.nodes, own, strict=True)
        ]
        return replace(program, nodes=tuple(self.prepared(nodes)))

    def prepared(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes; ops on parameters that only a forward pass of its own reads, such
        as casts, are part of that."""
        out = list(nodes)
        readers = {number_of(atom): {Pass(UPDATE)} for atom in self.program.outputs}
        for index in reversed(range(len(out))):
            node = out[index]
            every = set().union(*(readers.get(v, ()) for v in node.outputs))
            alone = len(every) == 1 and {p.phase for p in every} == {FORWARD}
            if alone and node.kind == "op" and node.during.phase == UPDATE:
                node = out[index] = replace(node, during=every.pop())
            for atom in map(number_of, node.inputs):
                readers[atom] = readers.get(atom, set()) | {node.during}
        return out

    def node(self, node: Node, directions: Directions, marks: dict[int, Marks]) -> Node:
        passes, operands = self.passes, marks_of(self.program, node, marks)
        with_rows = {v for v in node.outputs if has_rows(marks[v])}
        if directions:
            during = passes.derived(directions)
            made_of_parameters = during.phase == BACKWARD
        else:
            alone = passes.after and self.is_forward(node, operands, with_rows)
            during = passes.plain(alone)
            self.forward |= with_rows if alone else set()
            made_of_parameters = _reads(node, self.parameters)
        before = passes.at
        bodies = self.bodies(node, directions, during, operands)
        if made_of_parameters or passes.at != before:
            self.parameters |= {*node.outputs} - with_rows
        loops = passes.marking.is_microbatch_loop(node, operands)
        return replace(node, during=during, bodies=bodies, microbatches=loops)

    def is_forward(
        self, node: Node, operands: Sequence[Marks], with_rows: set[int]
    ) -> bool:
        """Whether parameters meet rows of the batch here, or have met them before."""
        if _reads(node, self.forward):
            return True
        meet = any(map(has_rows, operands)) and _reads(node, self.parameters)
        return meet and bool(with_rows or node.bodies)

    def bodies(
        self,
        node: Node,
        directions: Directions,
        during: Pass,
        operands: Sequence[Marks],
    ) -> tuple[Program, ...]:
        """The bodies of a node, marked. Each begins where the others do."""
        if not node.bodies:
            return ()
        passes, before = self.passes, self.passes.at
        alone = not directions and during.phase == FORWARD and passes.after
        start = (passes.begun + 1, False) if alone else before
        marks = passes.marking.entering(node, operands)
        state = [atom in self.parameters for atom in map(number_of, node.inputs)]
        out, ends = [], [start]
        for body, region, inner in zip(node.bodies, node.regions, marks, strict=True):
            passes.go(start)
            given = tuple(region.entering(state))
            out.append(passes.program(body, directions, inner, given))
            ends.append(passes.at)
        passes.go(before if max(ends) == start else max(ends))
        return tuple(out)


def _reads(node: Node, values: set[Atom]) -> bool:
    return any(number_of(atom) in values for atom in node.inputs)


def _without_plain_jvp(program: Program, own: Sequence[Directions]) -> list[Directions]:
    """Directions without those of `jax.jvp`, of which there is no backward pass: that
    of a gradient inside is one of the step then."""
    out = list(own)
    while True:
        needed: set[Atom] = set()
        changed = False
        for index in reversed(range(len(out))):
            node, directions = program.nodes[index], out[index]
            if not directions:
                continue
            if directions[0] == BACKWARD or not needed.isdisjoint(node.outputs):
                needed.update(map(number_of, node.inputs))
            elif BACKWARD in directions or _holds_backward(node):
                out[index], changed = directions[1:], True
        if not changed:
            return out


def _holds_backward(node: Node) -> bool:
    """Whether a body of a node holds the backward pass of a gradient."""
    return any(
        BACKWARD in inner.derivatives or _holds_backward(inner)
        for body in node.bodies
        for inner in body.nodes
    )
