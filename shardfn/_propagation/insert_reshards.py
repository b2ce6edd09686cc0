"""Decisions written out as a straight-line plan: where each value is moved and used.

In: a program and every node's decision. Out: a `BodyPlan` with one `Reshard` in front
of each use in another sharding; schedule passes then share, delay or hoist them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfn._core.errors import where
from shardfn._core.phases import UPDATE, Pass
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step
from shardfn._core.program import Atom, Node, Program, last_pass, number_of
from shardfn._core.reasons import OPERAND, OUTPUT, RESULT, Cause
from shardfn._core.resharding import reshard_path
from shardfn._core.sharding import Axes, Sharding, Split, without_origin
from shardfn._core.sizes import itemsize
from shardfn._propagation.decision import Decision


def plan_steps(
    program: Program,
    inputs: Sequence[Sharding],
    decisions: Sequence[Decision],
    env: dict[int, Sharding],
    outputs: Sequence[Sharding],
    axes: Axes,
) -> BodyPlan:
    """Writes out the steps of one program.

    Args:
      program: the program.
      inputs: shardings of its arguments.
      decisions: one per node.
      env: sharding of every value, as propagated.
      outputs: shardings to return.
      axes: the mesh axes.

    Returns:
      The plan of the program.
    """
    writer = _Writer(program, env, axes)
    for index, (node, decision) in enumerate(
        zip(program.nodes, decisions, strict=True)
    ):
        writer.node(index, node, decision)
    end = _end(program)
    returned = tuple(
        writer.version(atom, sharding, end, (OUTPUT, j))
        for j, (atom, sharding) in enumerate(zip(program.outputs, outputs, strict=True))
    )
    return BodyPlan(tuple(inputs), tuple(writer.steps), returned, tuple(outputs))


@dataclass(slots=True)
class _Writer:
    program: Program
    env: dict[int, Sharding]
    axes: Axes
    steps: list[Step] = field(default_factory=list)
    current: dict[int, Ref] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    # What backward passes make, and linear functions of it.
    gradients: set[int] = field(default_factory=set)

    def node(self, index: int, node: Node, decision: Decision) -> None:
        about = node, decision.parts, decision.operands, decision.notes
        operands = tuple(
            self.version(atom, sharding, node.during, (OPERAND, i, *about))
            for i, (atom, sharding) in enumerate(
                zip(node.inputs, decision.operands, strict=True)
            )
        )
        self.steps.append(
            Apply(
                node=index,
                primitive=node.eqn.primitive.name,
                operands=operands,
                operand_shardings=decision.operands,
                result_shardings=decision.made,
                parts=decision.parts,
                bodies=decision.bodies,
                fallback=decision.fallback,
                place=where(node.eqn) if decision.fallback else "",
                times=node.times,
            )
        )
        if self.is_gradient(node):
            self.gradients.update(node.outputs)
        for j, (value, made, results) in enumerate(
            zip(node.outputs, decision.made, decision.results, strict=True)
        ):
            if not same_blocks(made, results):
                cause = RESULT, j, *about
                self.current[value] = self.move(
                    Ref(value), made, results, last_pass(node), False, cause
                )

    def is_gradient(self, node: Node) -> bool:
        """Whether a node makes gradients, or something linear in them."""
        if last_pass(node).is_backward:
            return True
        given = {i for i, a in enumerate(node.inputs) if number_of(a) in self.gradients}
        linear = node.rule.linear if node.rule is not None else ()
        return bool(given) and any(given <= group for group in linear)

    def version(
        self, atom: Atom, sharding: Sharding, during: Pass, cause: tuple[Any, ...]
    ) -> Ref | None:
        """A version of `atom` in `sharding`, moved here if it has to be: for a `Cause`
        of these fields, which is not made for the many that stay."""
        if not isinstance(atom, int):
            return None
        now = self.env[atom]
        ref = self.current.get(atom, Ref(atom))
        if same_blocks(now, sharding):
            return ref
        stored = any(isinstance(s, Split) and s.stored for s in now)
        return self.move(ref, now, sharding, during, stored, cause)

    def move(
        self,
        source: Ref,
        start: Sharding,
        end: Sharding,
        during: Pass,
        stored: bool,
        cause: tuple[Any, ...],
    ) -> Ref:
        aval = self.program.avals[source.value]
        number = self.versions.get(source.value, 0) + 1
        self.versions[source.value] = number
        result = Ref(source.value, number)
        path = reshard_path(
            without_origin(start), without_origin(end), aval.shape, self.axes
        )
        self.steps.append(
            Reshard(
                source=source,
                result=result,
                path=path,
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                itemsize=itemsize(aval),
                during=during,
                stored=stored,
                gradient=source.value in self.gradients,
                cause=Cause(*cause),
            )
        )
        return result


def _end(program: Program) -> Pass:
    """The pass in which a program returns: the update, if it makes one."""
    passes = [last_pass(node) for node in program.nodes[-1:]]
    passes += [n.during for n in program.nodes if n.during.phase == UPDATE]
    return passes[-1] if passes else Pass()


def same_blocks(a: Sharding, b: Sharding) -> bool:
    return a == b or without_origin(a) == without_origin(b)
