"""Sums gradients, and activations behind stationary leaves, in a wider dtype than the
program makes them in.

In: a program, its plan, and the dtypes asked for. Out: the program in which operations
whose results are summed over devices make them in the wider dtype, so that nothing is
rounded before the sum. What follows gets the sum rounded to its own dtype, or as it is
if it would cast it to the wider one anyway.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.control import Control
from shardfn._core.equation_key import equation_key
from shardfn._core.leaves import Names
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import LITERAL, VALUE, Atom, Node, Program, live
from shardfn._core.rule_registry import rule_of
from shardfn._core.sharding import is_unreduced
from shardfn._schedule.summed_leaves import summed_leaves
from shardfn._schedule.wire_dtypes import (
    cast_dtype,
    is_narrower,
    sums,
    sums_gradient,
)

REARRANGES = ("transpose", "reshape", "squeeze", "broadcast_in_dim", "copy")
"""Primitives that compute nothing: what they make of a wide value is wide."""


def widen(program: Program, body: BodyPlan, control: Control) -> Program:
    """Makes terms of sums in the dtype that `reduce_dtype` of their leaves asks for.

    Args:
      program: a program.
      body: its plan; where it moves a sum decides what is widened.
      control: the dtypes asked for.

    Returns:
      The program, to be planned again; the same one if there is nothing to widen.
    """
    applies = [step for step in body.steps if isinstance(step, Apply)]
    bodies: dict[int, tuple[Program, ...]] = {}
    for step in applies:
        inner = zip(program.nodes[step.node].bodies, step.bodies, strict=True)
        bodies[step.node] = tuple(widen(p, plan, control) for p, plan in inner)
    asked = {}
    summed = summed_leaves(program, body) if control.asked("reduce_dtype") else {}
    for step in body.steps:
        if not isinstance(step, Reshard) or not sums(step):
            continue
        leaves = summed.get(step.source.value, ())
        if sums_gradient(program, step):
            leaves = program.leaf(step.source.value)
        if leaves:
            dtype = cast_dtype(control.of(*leaves).reduce_dtype)
            if dtype and is_narrower(step.dtype, dtype):
                asked[step.source.value] = dtype
    chosen = _widened(program, applies, asked)
    if not chosen and all(program.nodes[n].bodies == b for n, b in bodies.items()):
        return program
    return _Rewrite(program, chosen, bodies).run()


def _widened(
    program: Program, applies: Sequence[Apply], asked: dict[int, str]
) -> dict[int, str]:
    """The values to make in a wider dtype: those of `asked` that can be, what they are
    linear in, and what only rearranges them."""
    chosen: dict[int, str] = {}
    if not asked:
        return chosen
    terms = _terms(program, applies)
    for value, dtype in asked.items():
        pending = [value]
        while pending:
            at = pending.pop()
            if at in terms and chosen.get(at) != dtype:
                chosen[at] = dtype
                pending += terms[at]
    for node in program.nodes:
        first = node.inputs[0] if node.inputs else None
        if node.eqn.primitive.name not in REARRANGES:
            continue
        if isinstance(first, int) and first in chosen:
            chosen.update(dict.fromkeys(node.outputs, chosen[first]))
    return chosen


def _terms(program: Program, applies: Sequence[Apply]) -> dict[int, list[int]]:
    """The values that can be made wider, each with those of its operands that are terms
    of sums and so have to be wider too."""
    terms: dict[int, list[int]] = {}
    for step in applies:
        node = program.nodes[step.node]
        if not _can_rebind(node):
            continue
        operands = zip(node.inputs, step.operand_shardings, strict=True)
        unreduced = [a for a, sharding in operands if is_unreduced(sharding)]
        made = [a for a in unreduced if isinstance(a, int) and a in terms]
        if len(made) == len(unreduced):
            terms[node.outputs[0]] = made
    return terms


def _can_rebind(node: Node) -> bool:
    """Whether the primitive takes wider operands without other parameters."""
    if node.kind != "op" or len(node.outputs) != 1 or node.rule is None:
        return False
    params = node.eqn.params.values()
    return not any(hasattr(p, "eqns") or hasattr(p, "jaxpr") for p in params)


@dataclass(slots=True)
class _Rewrite:
    """A program while the values in `chosen` get wide twins.

    `twins` maps a value to its wide twin, `same` a value to one that replaces it.
    """

    program: Program
    chosen: dict[int, str]
    bodies: dict[int, tuple[Program, ...]]
    avals: list[Any] = field(default_factory=list)
    leaves: list[Names] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    twins: dict[int, int] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)

    def run(self) -> Program:
        program = self.program
        self.avals, self.leaves = list(program.avals), list(program.leaves)
        for index, node in enumerate(program.nodes):
            inputs = tuple(map(self.now, node.inputs))
            bodies = self.bodies.get(index, node.bodies)
            self.add(replace(node, inputs=inputs, bodies=bodies))
        outputs = tuple(map(self.now, program.outputs))
        nodes, constants = live(self.nodes, program.constants, outputs)
        return replace(
            program,
            avals=tuple(self.avals),
            leaves=tuple(self.leaves),
            nodes=nodes,
            constants=constants,
            outputs=outputs,
        )

    def now(self, atom: Atom) -> Atom:
        return self.same.get(atom, atom) if isinstance(atom, int) else atom

    def twin(self, atom: Atom) -> int | None:
        return self.twins.get(atom) if isinstance(atom, int) else None

    def add(self, node: Node) -> None:
        value = node.outputs[0] if node.outputs else None
        twin = self.cast_twin(node)
        if twin is not None:
            self.same[node.outputs[0]] = twin
        elif value in self.chosen:
            self.widen(node, node.outputs[0])
        else:
            self.nodes.append(node)

    def cast_twin(self, node: Node) -> int | None:
        """The wide twin that a node casts to, if it is such a cast."""
        if node.eqn.primitive.name != "convert_element_type":
            return None
        twin = self.twin(node.inputs[0])
        dtype = self.avals[node.outputs[0]].dtype
        return twin if twin is not None and self.avals[twin].dtype == dtype else None

    def widen(self, node: Node, value: int) -> None:
        """Adds `node` making the wide twin of `value`, and `value` as a cast of it."""
        wide, own = jnp.dtype(self.chosen[value]), self.avals[value].dtype
        params = dict(node.eqn.params)
        in_op = "preferred_element_type" in params
        if in_op:
            params["preferred_element_type"] = wide
        inputs = [
            self.wider(node, atom, wide)
            if self.twin(atom) is not None
            or (not in_op and self.aval(atom).dtype == own)
            else atom
            for atom in node.inputs
        ]
        run = functools.partial(node.eqn.primitive.bind, **params)
        twin = self.bind(node, inputs, node.kinds, run)
        self.twins[value] = twin
        self.cast(node, twin, own, value)

    def wider(self, node: Node, atom: Atom, dtype: Any) -> int:
        twin = self.twin(atom)
        return self.cast(node, atom, dtype) if twin is None else twin

    def cast(self, node: Node, atom: Atom, dtype: Any, value: int | None = None) -> int:
        """Adds a cast of `atom` that makes `value`, or else a new value."""
        run = lambda x: lax.convert_element_type(x, dtype)  # noqa: E731
        kind = VALUE if isinstance(atom, int) else LITERAL
        return self.bind(node, [atom], (kind,), run, value)

    def bind(
        self,
        node: Node,
        inputs: Sequence[Atom],
        kinds: tuple[str, ...],
        run: Callable[..., jax.Array],
        value: int | None = None,
    ) -> int:
        """Adds the one equation of `run`, which stands where `node` stands."""
        eqn = compat.traced_equation(run, node.eqn, [self.aval(a) for a in inputs])
        if value is None:
            value = len(self.avals)
            self.avals.append(eqn.outvars[0].aval)
            self.leaves.append(self.program.leaf(node.outputs[0]))
        eqn_key, _ = equation_key(eqn, inputs)
        self.nodes.append(
            Node(
                eqn=eqn,
                inputs=tuple(inputs),
                outputs=(value,),
                derivatives=node.derivatives,
                during=node.during,
                rule=rule_of(eqn),
                eqn_key=eqn_key,
                kinds=kinds,
            )
        )
        return value

    def aval(self, atom: Atom) -> Any:
        return self.avals[atom] if isinstance(atom, int) else atom.aval
