"""What gathers of leaves are for, and what would be sent instead if leaves stayed.

In: a program and its plan, scheduled. Out: for each leaf of the state its uses, and
which others stay with it.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardfn._core.leaves import Names
from shardfn._core.limits import JOINED_BYTES, STATIONARY_PART
from shardfn._core.moves import ReduceScatter
from shardfn._core.phases import UPDATE
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard
from shardfn._core.program import Program, aval_of, last_pass
from shardfn._core.sent_bytes import sent
from shardfn._core.sharding import Axes, Sharding, Split
from shardfn._core.sizes import elements, nbytes
from shardfn._lowering.leaf_chains import ValueDim, between_leaves


@dataclass(frozen=True, slots=True)
class Use:
    """A gather of a leaf.

    Attributes:
      leaf: its names.
      gathered: bytes of the leaf.
      moved: bytes that are moved instead if the leaf stays.
      least: those of the smallest values that meet it.
      times: how often.
    """

    leaf: Names
    gathered: int
    moved: float
    least: float
    times: int


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What a gather makes of a leaf: its names, how it is stored, and its bytes."""

    leaf: Names
    stored: Sharding
    size: int


def parts_ahead(step: Apply, around: Sequence[BodyPlan] = ()) -> list[BodyPlan]:
    """The parts of the bodies of `step` that run in earlier iterations: of a loop those
    that go ahead, and of a call those of such parts `around` it that call the same."""
    calls = (s for part in around for s in part.steps if isinstance(s, Apply))
    same = (call.bodies[0] for call in calls if call.bodies and call.node == step.node)
    return [*(each.part for each in step.ahead), *same]


def uses_of(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    times: int = 1,
    ahead: Sequence[BodyPlan] = (),
    entering: Mapping[Ref, _Gathered] = MappingProxyType({}),
) -> Iterator[Use]:
    """What each gather of a stored value is for.

    Args:
      program: the program.
      body: its plan.
      axes: the mesh axes.
      times: how often it runs.
      ahead: its parts that run in an earlier iteration of a loop.
      entering: arguments that were gathered in front of a loop around it.

    Returns:
      A `Use` for each gather in the plan and in its parts, and for each of those
      arguments that its operations read, one of no more bytes.
    """
    own = {
        step.result: _Gathered(
            program.leaf(step.source.value),
            step.path[0],
            nbytes(program.avals[step.result.value]),
        )
        for plan in (body, *ahead)
        for step in plan.steps
        if isinstance(step, Reshard) and step.gathers_state
    }
    gathers = {**entering, **own}
    read: list[tuple[Ref, int, int]] = []
    followed: set[Ref] = set()
    for step in body.steps:
        if not isinstance(step, Apply):
            continue
        node = program.nodes[step.node]
        inner = times * (step.times or 1)
        parts = parts_ahead(step, ahead)
        given = gathers if node.is_loop else entering
        for k, region in enumerate(node.regions):
            inside = node.bodies[k]
            same = region.constants if node.is_loop else range(len(region.operands))
            operands = ((i, step.operands[region.operands[i]]) for i in same)
            entered = {
                Ref(inside.inputs[i]): ref
                for i, ref in operands
                if ref is not None and ref in given
            }
            followed.update(entered.values())
            known = {at: given[ref] for at, ref in entered.items()}
            yield from uses_of(inside, step.bodies[k], axes, inner, parts, known)
        for i, ref in enumerate(() if step.bodies else step.operands):
            if ref is not None and ref in gathers:
                read.append((ref, step.node, i))
    met = [_meet(program, ref, k, i, gathers[ref].stored, axes) for ref, k, i in read]
    moved = _moved_by(program, met)
    least: dict[Ref, float] = {}
    for m in met:
        least[m.leaf] = least.get(m.leaf, 0) + m.least
    for ref, gathered in own.items():
        leaf, size = gathered.leaf, gathered.size
        others = 0 if ref in followed else size
        yield Use(leaf, size, moved.get(ref, others), least.get(ref, others), times)
    for ref in entering.keys() & moved.keys():
        yield Use(entering[ref].leaf, 0, moved[ref], least[ref], times)


def _moved_by(program: Program, met: Sequence["_Meet"]) -> dict[Ref, float]:
    """Bytes that are moved instead of each gathered leaf if it stays: what two such
    leaves have between them stays, too, if that makes less than half of a leaf."""
    chains: frozenset[ValueDim] = frozenset()
    if any(m.lacking <= STATIONARY_PART * m.size < m.lacking + m.having for m in met):
        factors: dict[int, list[str]] = {}
        for m in met:
            if m.factor is not None:
                factors.setdefault(m.node, []).append(m.factor)
        chains = between_leaves(program, factors)
    moved: dict[Ref, float] = {}
    for m in met:
        parts = sum(size for place, size in m.places if place not in chains)
        moved[m.leaf] = moved.get(m.leaf, 0) + m.lacking + parts
    return moved


def leaves_met(program: Program, body: BodyPlan) -> Iterator[str]:
    """The leaves that are where they are stored in an op that takes what is no leaf, as
    experts do that tokens of the whole batch are sorted for."""
    for step in body.steps:
        if not isinstance(step, Apply):
            continue
        node = program.nodes[step.node]
        for bodies in zip(node.bodies, step.bodies, strict=True):
            yield from leaves_met(*bodies)
        if step.bodies or last_pass(node).phase == UPDATE:
            continue
        operands = zip(node.inputs, step.operand_shardings, strict=True)
        arrays = [(a, s) for a, s in operands if elements(aval_of(program, a)) > 1]
        leaves = [program.leaf(a) if isinstance(a, int) else () for a, _ in arrays]
        if not all(leaves):
            stays = (any(isinstance(s, Split) for s in each) for _, each in arrays)
            yield from itertools.chain(*itertools.compress(leaves, stays))


def updated_together(program: Program) -> dict[str, frozenset[str]]:
    """By leaf, those that meet it, or each other, element by element, as moments meet a
    gradient; and itself. Leaves that meet nothing so are not in it."""
    links: dict[str, set[str]] = {}
    for names in _met_elementwise(program):
        for name in names:
            links.setdefault(name, set()).update(names)
    together: dict[str, frozenset[str]] = {}
    for name in links:
        if name in together:
            continue
        found, pending = {name}, [name]
        while pending:
            new = links[pending.pop()] - found
            found |= new
            pending += new
        together |= dict.fromkeys(found, frozenset(found))
    return together


def _met_elementwise(program: Program) -> Iterator[set[str]]:
    """The names of the operands of each op that goes element by element."""
    for node in program.nodes:
        for body in node.bodies:
            yield from _met_elementwise(body)
        if node.rule is None or not node.rule.flat or node.rule.reduce:
            continue
        names = [
            program.leaf(atom)
            for atom in (*node.inputs, *node.outputs)
            if isinstance(atom, int) and elements(program.avals[atom]) > 1
        ]
        yield set(itertools.chain(*names))


@dataclass(frozen=True, slots=True)
class _Meet:
    """An op that reads a gathered leaf, as if the leaf stayed.

    Attributes:
      leaf: the leaf as it is gathered.
      node: number of the op.
      size: bytes of the leaf.
      factor: what would be split; None if the op cannot split that.
      lacking: bytes of what has to be gathered or summed: it lacks the factor.
      places: of what has it, where, and the bytes that are exchanged.
      least: bytes of the smallest value that it reads or makes.
    """

    leaf: Ref
    node: int
    size: int
    factor: str | None
    lacking: float
    places: tuple[tuple[ValueDim, float], ...]
    least: int

    @property
    def having(self) -> float:
        return sum(size for _, size in self.places)


def _meet(
    program: Program, leaf: Ref, k: int, i: int, stored: Sharding, axes: Axes
) -> _Meet:
    """Op `k`, whose operand `i` is a leaf."""
    node = program.nodes[k]
    others = [j for j, a in enumerate(node.inputs) if j != i and isinstance(a, int)]
    atoms = [*(node.inputs[j] for j in others), *node.outputs]
    sizes = [nbytes(aval_of(program, atom)) for atom in atoms]
    rule, size = node.rule, nbytes(aval_of(program, node.inputs[i]))
    if rule is None:  # it takes the leaf whole, too
        return _Meet(leaf, k, size, None, sum(sizes) + size, (), size)
    axis, split = next((a, s) for a, s in enumerate(stored) if isinstance(s, Split))
    factor = None if split.dim < 0 else rule.major(rule.operands[i], split.dim)
    lacking, places = 0.0, []
    each = [*(rule.operands[j] for j in others), *rule.results]
    for atom, dims, moves in zip(atoms, each, sizes, strict=True):
        dim = None if factor is None else rule.dim_of(dims, factor)
        if dim is None or not isinstance(atom, int):
            lacking += moves
        else:
            places.append(((atom, dim), moves / axes.sizes[axis]))
    mixes = others and not rule.flat  # not a bias, nor its broadcast
    factor = factor if mixes else None
    return _Meet(leaf, k, size, factor, lacking, tuple(places), min(sizes))


def exchanged_bytes(program: Program, body: BodyPlan, axes: Axes) -> int:
    """Bytes that each device sends of what is neither a leaf nor its gradient."""
    return sent(program, body, axes, counts=_is_no_leaf).bytes


def _is_no_leaf(program: Program, step: Reshard) -> bool:
    return not (step.stored or program.leaf(step.source.value))


def scatters_sums(program: Program, body: BodyPlan) -> bool:
    """Whether small sums that are no leaf's are scattered."""
    for step in body.steps:
        if isinstance(step, Apply):
            bodies = zip(program.nodes[step.node].bodies, step.bodies, strict=True)
            if any(scatters_sums(*each) for each in bodies):
                return True
        elif math.prod(step.shape) * step.itemsize <= JOINED_BYTES:
            scatters = any(isinstance(move, ReduceScatter) for move in step.moves)
            if scatters and not program.leaf(step.source.value):
                return True
    return False
