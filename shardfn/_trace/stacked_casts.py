"""Casts behind a loop what its body casts to a wider dtype only to stack it.

In: a program whose values are named after leaves. Out: the program, in which a loop
stacks what it casts as it was before the cast, and one cast of the stack follows it.
The bits are the same, and the stack takes less memory: gradients of a layer that
computes in bfloat16 are stacked in that, and an optimizer in float32 casts them where
it reads them.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.equation_key import equation_key
from shardfn._core.leaves import Names
from shardfn._core.program import VALUE, Node, Program, aval_of
from shardfn._core.rule_registry import rule_of


def take_out_wider_stacks(
    program: Program, keeps: Callable[[Names], bool] = lambda _: False
) -> Program:
    """Takes casts to a wider dtype of what loops stack out of them.

    Args:
      program: the program, its values named.
      keeps: whether a value of these leaves is to be cast where it is.

    Returns:
      The program; the same one if there is nothing to take out.
    """
    rewrite = _Rewrite(list(program.avals), list(program.leaves))
    for node in program.nodes:
        bodies = tuple(take_out_wider_stacks(body, keeps) for body in node.bodies)
        if any(a is not b for a, b in zip(bodies, node.bodies, strict=True)):
            node = replace(node, bodies=bodies)
        rewrite.add(node, keeps)
    nodes = tuple(rewrite.nodes)
    if nodes == program.nodes:
        return program
    avals, leaves = tuple(rewrite.avals), tuple(rewrite.leaves)
    return replace(program, avals=avals, leaves=leaves, nodes=nodes)


@dataclass(slots=True)
class _Rewrite:
    """A program while its nodes are added again."""

    avals: list[Any]
    leaves: list[Names]
    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node, keeps: Callable[[Names], bool]) -> None:
        """Adds a node; a loop as one that stacks what it can in a narrower dtype, with
        the casts behind it."""
        if node.kind != "scan":
            self.nodes.append(node)
            return
        wanted = {
            j: value
            for j, value in enumerate(node.outputs)
            if j in node.regions[0].stacks and not keeps(self.leaf(value))
        }
        body, narrow = _narrowed(node.bodies[0], wanted.keys())
        outputs, casts = list(node.outputs), list[Node]()
        for j, dtype in narrow.items():
            outputs[j] = len(self.avals)
            self.avals.append(self.avals[wanted[j]].update(dtype=dtype))
            if self.leaves:
                self.leaves.append(self.leaf(wanted[j]))
            casts.append(self.cast(node, outputs[j], wanted[j]))
        if narrow:
            node = replace(node, bodies=(body,), outputs=tuple(outputs))
        self.nodes += [node, *casts]

    def leaf(self, value: int) -> Names:
        return self.leaves[value] if self.leaves else ()

    def cast(self, loop: Node, source: int, value: int) -> Node:
        """A node behind a loop that makes `value` of `source`."""
        wide = self.avals[value].dtype
        eqn = compat.traced_equation(
            lambda x: lax.convert_element_type(x, wide), loop.eqn, [self.avals[source]]
        )
        eqn_key, _ = equation_key(eqn, [source])
        return Node(
            eqn=eqn,
            inputs=(source,),
            outputs=(value,),
            derivatives=loop.derivatives,
            rule=rule_of(eqn),
            kinds=(VALUE,),
            eqn_key=eqn_key,
            during=loop.during,
        )


def _narrowed(body: Program, wanted: Set[int]) -> tuple[Program, dict[int, Any]]:
    """A body that returns some of its results in the dtype that it casts them from.

    Args:
      body: of a loop, or of a call.
      wanted: the results to return so, if they are casts to a wider dtype that nothing
        else of the body's results is made of.

    Returns:
      The body, and the dtypes of the results that it now returns narrower.
    """
    outputs, narrow = list(body.outputs), dict[int, Any]()
    nodes, avals = list(body.nodes), list(body.avals)
    makers = {value: i for i, node in enumerate(nodes) for value in node.outputs}
    for i, places in _by_maker(body, wanted, makers).items():
        node = nodes[i]
        if _is_widening(body, node):
            (source,) = node.inputs
            for j in places:
                outputs[j], narrow[j] = source, aval_of(body, source).dtype
        elif node.is_call:
            at = {
                k
                for k, value in enumerate(node.outputs)
                if _is_only_returned(body, value, wanted)
            }
            inner, dtypes = _narrowed(node.bodies[0], at)
            if dtypes:
                nodes[i] = replace(node, bodies=(inner,))
            for k, dtype in dtypes.items():
                value = node.outputs[k]
                avals[value] = avals[value].update(dtype=dtype)
                narrow |= {j: dtype for j in places if body.outputs[j] == value}
    if not narrow:
        return body, {}
    made = replace(body, nodes=tuple(nodes), avals=tuple(avals), outputs=tuple(outputs))
    return made, narrow


def _by_maker(
    body: Program, wanted: Set[int], makers: dict[int, int]
) -> dict[int, list[int]]:
    """The results at `wanted`, by the node that makes them."""
    found: dict[int, list[int]] = {}
    for j in sorted(wanted):
        atom = body.outputs[j]
        if isinstance(atom, int) and atom in makers:
            found.setdefault(makers[atom], []).append(j)
    return found


def _is_only_returned(body: Program, value: int, wanted: Set[int]) -> bool:
    """Whether a value is read by nothing but results at `wanted`."""
    places = [j for j, atom in enumerate(body.outputs) if atom == value]
    return bool(places) and wanted >= {*places} and value not in {*_read(body.nodes)}


def _read(nodes: Sequence[Node]) -> Iterator[int]:
    for node in nodes:
        yield from (atom for atom in node.inputs if isinstance(atom, int))


def _is_widening(body: Program, node: Node) -> bool:
    """Whether a node casts a value to a dtype that has all of its numbers."""
    if node.eqn.primitive is not lax.convert_element_type_p:
        return False
    (source,), (made,) = node.inputs, node.outputs
    if not isinstance(source, int):
        return False
    given, wide = (body.avals[value].dtype for value in (source, made))
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (given, wide)):
        return False
    narrow, finfo = jnp.finfo(given), jnp.finfo(wide)
    return (
        narrow.bits < finfo.bits
        and narrow.nmant <= finfo.nmant
        and narrow.maxexp <= finfo.maxexp
        and narrow.minexp >= finfo.minexp
    )
