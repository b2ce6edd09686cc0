"""What can wait around the loops over layers that run backward.

In: a body's plan. Out: the `Choice`s that it leaves, and the plan as some of them say.
A loop may wait for the reduce-scatters of large gradients that stand in front of it. A
large product that is one term of a sum which is complete only behind the loop, such as
that of a tied table, is made in front of it or behind it: either the term waits, or
what it is made of. Large constants, such as the zeros that a lookup's gradient is added
to, may be made behind it if they are used there. A compiler would keep whole logits
until it needs the gradient of a table, and make the zeros that another table's is added
to before the step begins.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from shardfn._core.limits import CHAINED_BYTES
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes, Sharding, is_unreduced
from shardfn._core.sizes import local_bytes
from shardfn._schedule.chain_reduce_scatters import scatters_alone
from shardfn._schedule.cotangents import cotangent_of
from shardfn._schedule.open_order import is_constant
from shardfn._schedule.versions import reading, tied
from shardfn._schedule.wire_dtypes import sums_gradient


class Choice(NamedTuple):
    """Something that a plan can do around a loop.

    Attributes:
      kind: the loop "waits" for sums; a "term" is made in front of it; "constants" are
        made behind it.
      term: what the step in question makes.
    """

    kind: Literal["waits", "term", "constants"]
    term: Ref | None = None


def loops(program: Program, body: BodyPlan) -> list[int]:
    """The nodes of a body's loops that move parameters in the backward pass."""
    steps = (step for step in body.steps if isinstance(step, Apply))
    return [step.node for step in steps if _is_loop(program, step)]


def choices(program: Program, body: BodyPlan, axes: Axes, loop: int) -> list[Choice]:
    """What a body's plan can do around a loop.

    Args:
      program: the program.
      body: its plan.
      axes: the mesh axes.
      loop: the loop's node.

    Returns:
      The choices.
    """
    return list(_Around(program, body, axes, loop).choices())


def around_loop(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    loop: int,
    chosen: Collection[Choice],
    waited: frozenset[Ref],
) -> tuple[BodyPlan, frozenset[Ref]]:
    """A body's plan with what is around a loop in the order that was chosen.

    Args:
      program: the program.
      body: its plan.
      axes: the mesh axes.
      loop: the loop's node.
      chosen: what it does of what it can do.
      waited: versions that a loop before it has waited for.

    Returns:
      The plan, and the versions that have been waited for now.
    """
    around = _Around(program, body, axes, loop, set(waited))
    return around.ordered(chosen), frozenset(around.waited)


def _node(program: Program, step: Apply) -> Node:
    return program.nodes[step.node]


def _is_loop(program: Program, step: Apply) -> bool:
    """Whether a step is a loop of the backward pass that moves parameters itself."""
    node = _node(program, step)
    if not node.is_loop or not node.backward or not node.outputs:
        return False
    inner = zip(node.bodies, step.bodies, strict=True)
    return not node.is_unrolled and any(_moves(p, b) for p, b in inner)


def _moves(program: Program, body: BodyPlan) -> bool:
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.gathers_state or sums_gradient(program, step):
                return True
            continue
        inner = zip(_node(program, step).bodies, step.bodies, strict=True)
        if any(_moves(p, b) for p, b in inner):
            return True
    return False


def _reading(step: Apply, old: Ref, tie: Reshard) -> Apply:
    """`step`, reading the tied version in place of the `old` one."""
    new = reading(step, lambda ref: tie.result if ref == old else ref)
    assert isinstance(new, Apply)
    return new


@dataclass(slots=True)
class _Around:
    """One body, while what waits around the loop of one node is chosen.

    `waited` are versions that a loop before it has waited for. `at` is the index of the
    loop's step. Per version, `makers` has the index of the step that makes it,
    `readers` those of the steps that read it, and `shardings` how it is sharded;
    `versions` counts those of a value.
    """

    program: Program
    body: BodyPlan
    axes: Axes
    node: int
    waited: set[Ref] = field(default_factory=set)
    at: int = field(init=False)
    makers: dict[Ref, int] = field(default_factory=dict)
    readers: dict[Ref, list[int]] = field(default_factory=dict)
    shardings: dict[Ref, Sharding] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, step in enumerate(self.body.steps):
            if isinstance(step, Apply) and step.node == self.node:
                self.at = index
            for ref, sharding in self.made(step):
                self.makers[ref], self.shardings[ref] = index, sharding
            for ref in set(reads(step)):
                self.readers.setdefault(ref, []).append(index)
        made = (s.exports for s in self.body.steps if isinstance(s, Apply))
        known = (*self.makers, *self.readers, *itertools.chain(*made))
        for ref in (*known, *self.body.imports):
            newest = self.versions.get(ref.value, 0)
            self.versions[ref.value] = max(newest, ref.version)

    def made(self, step: Step) -> Iterator[tuple[Ref, Sharding]]:
        if isinstance(step, Reshard):
            yield step.result, step.path[-1]
        else:
            outputs = map(Ref, _node(self.program, step).outputs)
            yield from zip(outputs, step.result_shardings, strict=True)

    def choices(self) -> Iterator[Choice]:
        steps = self.body.steps
        if any(scatters_alone(step, self.program) for step in steps[: self.at]):
            yield Choice("waits")
        for index in range(self.at):
            for chain in self.term(index):
                yield Choice("term", self.result(chain[-1]))
        if any(map(self.is_constant, self.behind())):
            yield Choice("constants")

    def ordered(self, chosen: Collection[Choice]) -> BodyPlan:
        steps, at = self.body.steps, self.at
        ready: list[Ref] = []
        sunk: dict[int, list[Ref]] = {}
        for index, step in enumerate(steps[:at]):
            if scatters_alone(step, self.program):
                ready += [step.result] * (Choice("waits") in chosen)
            for chain in self.term(index):
                term = self.result(chain[-1])
                if Choice("term", term) in chosen:
                    ready.append(term)
                else:
                    sunk |= {chain[0]: self.freed(chain[0])}
                    sunk |= dict.fromkeys(chain[1:], [])
        loop = steps[at]
        assert isinstance(loop, Apply)
        new = [step for index, step in enumerate(steps[:at]) if index not in sunk]
        start = self.cotangent(loop)
        if start is not None:
            for ref in ready:
                if ref in self.waited:
                    continue
                self.waited.add(ref)
                tie = self.tie(start, ref)
                loop, start = _reading(loop, start, tie), tie.result
                new.append(tie)
        new.append(loop)
        end = self.result(at)
        for index, made_of in sunk.items():
            step = steps[index]
            assert isinstance(step, Apply)
            for ref in made_of:
                tie = self.tie(ref, end)
                step = _reading(step, ref, tie)
                new.append(tie)
            new.append(step)
        sunken = {*self.behind()} if Choice("constants") in chosen else ()
        for index in range(at + 1, len(steps)):
            step = steps[index]
            if index in sunken and isinstance(step, Apply) and self.is_constant(index):
                step = replace(step, after=end)
            new.append(step)
        return replace(self.body, steps=tuple(new))

    def behind(self) -> Iterator[int]:
        """The steps between this loop and the next one."""
        for index in range(self.at + 1, len(self.body.steps)):
            step = self.body.steps[index]
            if isinstance(step, Apply) and _is_loop(self.program, step):
                return
            yield index

    def is_constant(self, index: int) -> bool:
        """Whether a step makes a large value of literals alone, and waits for none."""
        step = self.body.steps[index]
        if not isinstance(step, Apply) or step.after is not None:
            return False
        if not is_constant(self.program, step):
            return False
        return self.nbytes(index) >= CHAINED_BYTES

    def term(self, index: int) -> Iterator[list[int]]:
        """If step `index` makes a large term that is first read behind the loop, the
        steps that make it, from the one whose operands are no terms on."""
        first = min(self.readers_of(index), default=0) if self.is_term(index) else 0
        if first <= self.at:
            return
        chain = [index]
        while terms := self.terms_in(chain[0]):
            before = self.makers.get(terms[0], -1)
            alone = len(terms) == 1 and before >= 0 and self.is_term(before)
            if not alone or self.readers_of(before) != chain[:1]:
                return
            chain.insert(0, before)
        yield chain

    def is_term(self, index: int) -> bool:
        step = self.body.steps[index]
        if not isinstance(step, Apply) or len(step.result_shardings) != 1:
            return False
        node = _node(self.program, step)
        if node.kind != "op" or not node.backward:
            return False
        large = self.nbytes(index) >= CHAINED_BYTES
        return large and is_unreduced(step.result_shardings[0])

    def terms_in(self, index: int) -> list[Ref]:
        step = self.body.steps[index]
        assert isinstance(step, Apply)
        pairs = zip(step.operands, step.operand_shardings, strict=True)
        return [ref for ref, s in pairs if ref is not None and is_unreduced(s)]

    def freed(self, index: int) -> list[Ref]:
        """Operands of a step in front of the loop that nothing else reads behind it;
        what is stored, or handed out, is there in any case."""
        stays = self.body.leaving
        return [
            ref
            for ref in dict.fromkeys(reads(self.body.steps[index]))
            if ref in self.makers
            and ref not in stays
            and all(i < self.at or i == index for i in self.readers[ref])
        ]

    def result(self, index: int) -> Ref:
        """The first result of a step."""
        step = self.body.steps[index]
        assert isinstance(step, Apply)
        return Ref(_node(self.program, step).outputs[0])

    def readers_of(self, index: int) -> list[int]:
        return self.readers.get(self.result(index), [])

    def nbytes(self, index: int) -> int:
        ref = self.result(index)
        aval = self.program.avals[ref.value]
        return local_bytes(aval, self.shardings[ref], self.axes)

    def cotangent(self, loop: Apply) -> Ref | None:
        """An operand of the loop, no term, that the backward pass makes."""
        made = {
            ref: step
            for ref in loop.operands
            if ref is not None
            and ref in self.makers
            and isinstance(step := self.body.steps[self.makers[ref]], Apply)
        }
        found = cotangent_of(self.program, loop, made)
        return None if found is None else found[0]

    def tie(self, ref: Ref, after: Ref) -> Reshard:
        """A version of `ref` that waits for `after`."""
        aval = self.program.avals[ref.value]
        self.versions[ref.value] += 1
        result = Ref(ref.value, self.versions[ref.value])
        self.shardings[result] = self.shardings[ref]
        during = self.program.nodes[self.node].during
        return tied(ref, result, aval, self.shardings[ref], during, after)
