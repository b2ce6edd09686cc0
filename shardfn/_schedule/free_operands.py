"""Lets products read a large operand before anything reads its gradient.

In: a plan. Out: the plan, in which what reads the gradient of a product's large operand
waits for the other products that read this operand, if they are the last. Attention's
weights are an example: the gradient of the values reads them, and behind their own
gradient comes that of the scores, which is as large again. XLA for GPUs makes products
where they hide transfers, whatever lives on for that.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jax import lax

from shardfn._core.limits import FREED_BYTES
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note
from shardfn._core.sharding import Axes, Sharding, is_unreduced
from shardfn._core.sizes import elements, local_bytes
from shardfn._core.step_order import made_by
from shardfn._schedule.bodies import inside
from shardfn._schedule.heap import Heap
from shardfn._schedule.liveness import Liveness
from shardfn._schedule.versions import fresh, reading, tied

FREES = Note(
    "free_operands",
    "what reads it waits for another product of what it is the gradient of, which "
    "frees {} or more (limits.FREED_BYTES)",
    (FREED_BYTES,),
)


def free_operands(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Lets products of large operands go first that are the last to read them.

    Args:
      program: the program.
      body: its plan.
      axes: the mesh axes.

    Returns:
      The plan; the same where the compiler makes operands inside of products, and what
      lives depends on which. CPUs' plans are as GPUs'.
    """
    if axes.fuses_producers:
        return body
    body = inside(program, body, lambda p, b: free_operands(p, b, axes))
    for both in list(_Gradients(program, body, axes).pairs()):
        body = _ordered(program, body, both)
    return body


Readers = Mapping[Ref, Sequence[int]]
"""By version, the steps that read it."""


class _Both(NamedTuple):
    """Two products in a backward pass, as nodes: `own` makes the gradient of `large`,
    an operand of a product, and `rest` reads `large`, for the gradient of the other
    operand or, in a remat, for that product again."""

    own: int
    rest: int
    large: Ref


@dataclass(slots=True)
class _Gradients:
    """The products of one body's backward pass.

    Attributes:
      program: the program.
      body: its plan.
      axes: the mesh axes.
      products: per version, those that read it.
    """

    program: Program
    body: BodyPlan
    axes: Axes
    products: dict[Ref, list[Apply]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step in self.body.steps:
            if isinstance(step, Apply) and _is_product(self.program.nodes[step.node]):
                for ref in filter(None, step.operands):
                    self.products.setdefault(ref, []).append(step)

    def pairs(self) -> Iterator[_Both]:
        """Those of which one is the last to read what the other makes the gradient of,
        in the order of the plan."""
        found = [
            _Both(own.node, rest.node, large)
            for given, products in self.products.items()
            for rest in products
            for large in rest.operands
            if large not in (None, given) and self.is_large(rest, large)
            for own in products
            if own is not rest and self.is_gradient(own, large)
        ]
        if found:
            live = Liveness(self.program, self.body, self.axes, Heap())
            readers = _readers(live)
            yield from (both for both in found if self.frees(both, live, readers))

    def is_large(self, rest: Apply, large: Ref) -> bool:
        """Whether an operand of `rest` is large, beside what that makes of it."""
        size = self.size(large, rest.operand_shardings[rest.operands.index(large)])
        made = self.size(self.result(rest.node), rest.result_shardings[0])
        return size >= max(FREED_BYTES, 2 * made)

    def is_gradient(self, own: Apply, large: Ref) -> bool:
        """Whether `own` may make the gradient of a value, which operations of this body
        read as it is: one that is a term is summed first."""
        alike = self.elements(self.result(own.node)) == self.elements(large)
        return alike and not is_unreduced(own.result_shardings[0])

    def frees(self, both: _Both, live: Liveness, readers: Readers) -> bool:
        """Whether nothing needs the memory of `large` behind `rest`, if that comes
        before all that reads the gradient of `large`."""
        gradient, rest = self.result(both.own), _index(self.body, both.rest)
        if gradient not in readers:
            return False
        return all(
            root in live.made
            and all(at < readers[gradient][0] for at in readers[root] if at != rest)
            for root in live.roots(both.large)
        )

    def result(self, node: int) -> Ref:
        return Ref(self.program.nodes[node].outputs[0])

    def size(self, ref: Ref, sharding: Sharding) -> int:
        return local_bytes(self.program.avals[ref.value], sharding, self.axes)

    def elements(self, ref: Ref) -> int:
        return elements(self.program.avals[ref.value])


def _is_product(node: Node) -> bool:
    """Whether a node multiplies two matrices in the backward pass."""
    is_op = node.kind == "op" and node.backward
    return is_op and node.eqn.primitive is lax.dot_general_p


def _readers(live: Liveness) -> Readers:
    """The steps that read a version, or need its memory, in their order; what leaves is
    read behind them all."""
    steps = live.body.steps
    found: dict[Ref, list[int]] = defaultdict(list)
    for at, refs in enumerate((*map(reads, steps), live.body.leaving)):
        for ref in {*refs}.union(*map(live.roots, refs)):
            found[ref].append(at)
    return found


def _index(body: BodyPlan, node: int) -> int:
    """The step that runs a node."""
    steps = enumerate(body.steps)
    return next(i for i, s in steps if isinstance(s, Apply) and s.node == node)


def _ordered(program: Program, body: BodyPlan, both: _Both) -> BodyPlan:
    """A body in which `rest` comes before all that reads what `own` makes.

    What is made of `rest` comes behind the barrier that says so: a compiler drops from
    a barrier what nothing reads behind it. The same body if one is made of the other,
    or if neighbours that are one collective are in between.
    """
    places = _index(body, both.own), _index(body, both.rest)
    own, rest = (body.steps[i] for i in places)
    assert isinstance(own, Apply)
    (value,), (other,) = (program.nodes[n].outputs for n in (both.own, both.rest))
    kind = program.avals[value], own.result_shardings[0]
    during, gradient = program.nodes[both.own].during, Ref(value)
    waiting = tied(gradient, fresh(body, value), *kind, during, Ref(other))
    waiting = replace(waiting, notes=(FREES,))
    first, last = sorted(places)
    before, behind, of_either = list[Step](), list[Step](), {gradient, Ref(other)}
    for step in body.steps[: last + 1]:
        if step is own or step is rest or of_either.isdisjoint(reads(step)):
            before.append(step)
        else:
            behind.append(step)
            # A barrier remakes what it waits for, too.
            of_either.update({*made_by(program, step), *filter(None, [step.after])})
    near = body.steps[first : last + 2]
    is_joined = any(isinstance(step, Reshard) and step.together for step in near)
    if is_joined or not of_either.isdisjoint({*reads(own), *reads(rest)}):
        return body

    def name(ref: Ref) -> Ref:
        return waiting.result if ref == gradient else ref

    later = (reading(step, name) for step in (*behind, *body.steps[last + 1 :]))
    return replace(body, steps=(*before, waiting, *later))
