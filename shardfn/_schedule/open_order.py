"""What lives longer because a plan leaves the order open.

In: a body's plan. Out: bytes, step by step, beside those of the plan's own order. XLA
makes one collective of sums of gradients that do not wait for each other, and not
before something needs it. Until then their terms live, or what these are made of, as
it makes products late, too. Large values of literals, such as the zeros that a
gradient is added to, it makes before anything else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardfn._core.limits import CHAINED_BYTES
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, reads
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes, Sharding
from shardfn._core.sizes import local_bytes
from shardfn._schedule import fusion
from shardfn._schedule.chain_reduce_scatters import scatters_alone
from shardfn._schedule.liveness import Liveness


def open_order(live: Liveness) -> list[int]:
    """Bytes that live while each step runs, beside `live.profile()`.

    Args:
      live: of a body.

    Returns:
      The bytes, one number per step, and 0 in the end.
    """
    more = [0] * (len(live.body.steps) + 1)
    for start, end, size in (*_terms(live), *_constants(live)):
        for at in range(start, end):
            more[at] += size
    return more


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of a large gradient.

    Attributes:
      at: which step of the body makes it, or has it inside.
      more: bytes of its terms beyond those of its result, or of what they are made of
        if that is more.
      waits: other sums that have to be made first.
    """

    at: int
    more: int
    waits: frozenset[int]


def _terms(live: Liveness) -> Iterator[tuple[int, int, int]]:
    """From which step to which terms wait for the sums that theirs is made with."""
    found = _Sums(live.axes)
    found.walk(live.program, live.body, {}, None)
    together: list[list[int]] = []
    for i, each in enumerate(found.sums):
        alike = (group for group in together if not each.waits.intersection(group))
        group = next(alike, None)
        if group is None:
            together.append([i])
        else:
            group.append(i)
    for group in together:
        ready = max(found.sums[i].at for i in group)
        end = max(ready, min(found.needed.get(i, found.last) for i in group))
        for i in group:
            yield found.sums[i].at + 1, end + 1, found.sums[i].more


@dataclass(slots=True)
class _Sums:
    """The sums of a body and of the calls in it, which a compiler writes out in place;
    what a loop has inside is summed in each of its iterations.

    Attributes:
      axes: the mesh axes.
      sums: as found.
      needed: per sum, the first step of the body that waits for it: a move, or control
        flow. What else reads it can be as late as the sum.
      last: the last step of the backward pass.
    """

    axes: Axes
    sums: list[_Sum] = field(default_factory=list)
    needed: dict[int, int] = field(default_factory=dict)
    last: int = 0

    def walk(
        self,
        program: Program,
        body: BodyPlan,
        needs: Mapping[Ref, frozenset[int]],
        outside: int | None,
    ) -> dict[Ref, frozenset[int]]:
        """Notes the sums of a body. Returns, per version, those that it needs.

        Args:
          program: the program.
          body: its plan.
          needs: of arguments and imports, the sums that they need.
          outside: the step around it, if the body is that of a call.
        """
        needs = dict(needs)
        none = frozenset[int]()
        ops: dict[Ref, Apply] = {}
        for index, step in enumerate(body.steps):
            at = index if outside is None else outside
            before = none.union(*(needs.get(ref, none) for ref in reads(step)))
            if isinstance(step, Reshard) or step.bodies:
                for each in before:
                    self.needed.setdefault(each, at)
            if isinstance(step, Reshard):
                if scatters_alone(step, program):
                    more = self.waiting(program, step, ops)
                    self.sums.append(_Sum(at, more, before))
                    before |= {len(self.sums) - 1}
                needs |= dict.fromkeys(step.makes, before)
                continue
            node = program.nodes[step.node]
            self.last = max(self.last, at) if node.backward else self.last
            if node.kind == "op":
                ops |= dict.fromkeys(map(Ref, node.outputs), step)
            made = dict.fromkeys((*map(Ref, node.outputs), *step.exports), before)
            if node.is_call:
                made |= self.call(step, node, needs, at)
            needs |= made
        return needs

    def waiting(self, program: Program, move: Reshard, ops: Mapping[Ref, Apply]) -> int:
        """What waits for a sum: its term, or what the operation that makes it reads;
        casts and the like are made with the sum."""
        aval = program.avals[move.source.value]
        term, part = (
            local_bytes(aval, sharding, self.axes)
            for sharding in (move.path[0], move.path[-1])
        )
        made_of: list[tuple[Ref, Sharding]] = []
        ref = move.source
        while ref in ops and len(made_of) < 2:
            op = ops[ref]
            pairs = zip(op.operands, op.operand_shardings, strict=True)
            made_of = [(r, sharding) for r, sharding in pairs if r is not None]
            if not made_of:
                break
            ref = made_of[0][0]
        sizes = (local_bytes(program.avals[r.value], s, self.axes) for r, s in made_of)
        return max(term, sum(sizes)) - part

    def call(
        self, step: Apply, node: Node, needs: Mapping[Ref, frozenset[int]], at: int
    ) -> dict[Ref, frozenset[int]]:
        """What the results of a call need."""
        (program,), (body,) = node.bodies, step.bodies
        none = frozenset[int]()
        given = {
            Ref(value): needs.get(ref, none)
            for value, ref in zip(program.inputs, step.operands, strict=True)
            if ref is not None
        }
        given |= {
            inner: needs.get(ref, none)
            for inner, ref in zip(body.imports, step.imports, strict=True)
        }
        inside = self.walk(program, body, given, at)
        made = zip(map(Ref, node.outputs), body.outputs, strict=True)
        out = {ref: inside.get(of, none) for ref, of in made if of is not None}
        exported = zip(step.exports, body.exports, strict=True)
        return out | {ref: inside.get(of, none) for ref, of in exported}


def _constants(live: Liveness) -> Iterator[tuple[int, int, int]]:
    """From where to where large values of literals alone live before they are used."""
    for index, step in enumerate(live.body.steps):
        if not isinstance(step, Apply) or step.after is not None:
            continue
        if is_constant(live.program, step):
            size = _constant_bytes(live, Ref(live.program.nodes[step.node].outputs[0]))
            if size >= CHAINED_BYTES:
                yield 0, index, size


def _constant_bytes(live: Liveness, ref: Ref) -> int:
    """What a constant takes: it is fused into what reads it, but for one that something
    is written into."""
    written = (
        not live.is_added(Ref(live.program.nodes[step.node].outputs[0]))
        for step, at in live.readers.get(ref, ())
        if at == 0
        and isinstance(step, Apply)
        and fusion.writes_into(live.program.nodes[step.node])
    )
    return live.made[ref][1] if live.roots(ref) == {ref} or any(written) else 0


def is_constant(program: Program, step: Apply) -> bool:
    """Whether the backward pass makes a step's one result of literals alone."""
    if set(step.operands) != {None}:
        return False
    node = program.nodes[step.node]
    pure = node.kind == "op" and node.backward and not node.eqn.effects
    return pure and len(node.outputs) == 1
