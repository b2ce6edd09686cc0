"""Finds what an iteration of a loop over layers gathers first.

In: the plan of a loop's body. Out: its gathers that are used before any matrix product
that reads the result of another. Nothing of their iteration can hide these: a compiler
may begin with any of the products that they are for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardfn._core.equation_flops import flops_of
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, reads
from shardfn._core.program import Node, Program

Site = tuple[tuple[int, ...], Ref]
"""Where a version is made: in which calls of a body, and its name there."""


def first_gathers(program: Program, body: BodyPlan) -> frozenset[Site]:
    """The gathers of the state's leaves that a body uses first.

    Args:
      program: the body's program.
      body: its plan.

    Returns:
      Where their results are made.
    """
    walk = _Walk()
    walk.through(program, body, (), {})
    return frozenset(walk.used)


@dataclass(slots=True)
class _Origin:
    """What a version depends on: gathers that no product has used yet, and whether on
    a product of its iteration."""

    gathers: frozenset[Site] = frozenset()
    is_product: bool = False

    @classmethod
    def of_all(cls, origins: Iterable["_Origin"]) -> "_Origin":
        each = list(origins)
        gathers = frozenset[Site]().union(*(o.gathers for o in each))
        return cls(gathers, any(o.is_product for o in each))


@dataclass(slots=True)
class _Walk:
    """State while a body is read in order; `used` is what its first products use."""

    used: set[Site] = field(default_factory=set)

    def through(
        self,
        program: Program,
        body: BodyPlan,
        within: tuple[int, ...],
        given: Mapping[Ref, _Origin],
    ) -> _Origin | None:
        """Reads a body, or a call in it, up to the first product of a product.

        Returns:
          What its results depend on; None if that product is in it.
        """
        known = dict(given)
        for step in body.steps:
            origin = _Origin.of_all(known.get(ref, _Origin()) for ref in reads(step))
            if isinstance(step, Reshard):
                if step.gathers_state:
                    site = within, step.result
                    origin = _Origin(origin.gathers | {site}, origin.is_product)
                known[step.result] = origin
                continue
            node = program.nodes[step.node]
            if node.is_call:
                inner = self.call(node, step, within, known)
                if inner is None:
                    return None
                origin = _Origin.of_all((origin, inner))
            elif _multiplies(node):
                if origin.is_product:
                    return None
                self.used |= origin.gathers
                origin = _Origin(is_product=True)
            known.update(dict.fromkeys(map(Ref, node.outputs), origin))
            known.update(dict.fromkeys(step.exports, origin))
        return _Origin.of_all(known[r] for r in _handed_out(body) if r in known)

    def call(
        self,
        node: Node,
        step: Apply,
        within: tuple[int, ...],
        known: Mapping[Ref, _Origin],
    ) -> _Origin | None:
        (program,), body = node.bodies[:1], step.bodies[0]
        inputs = (*map(Ref, program.inputs), *body.imports)
        operands = zip(inputs, (*step.operands, *step.imports), strict=True)
        given = {i: known[ref] for i, ref in operands if ref and ref in known}
        return self.through(program, body, (*within, step.node), given)


def _handed_out(body: BodyPlan) -> tuple[Ref, ...]:
    return (*(ref for ref in body.outputs if ref is not None), *body.exports)


def _multiplies(node: Node) -> bool:
    """Whether there is a matrix product or a convolution in a node."""
    if node.kind == "op" and flops_of(node.eqn):
        return True
    return any(_multiplies(inner) for body in node.bodies for inner in body.nodes)
