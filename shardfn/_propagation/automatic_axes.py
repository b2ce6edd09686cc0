"""Notes on every move of a plan how automatic mesh axes split what it moves.

In: a program, its plan, and the automatic splits of its state. Out: the plan, its moves
with `Reshard.auto`. XLA partitions operations over automatic axes by itself, but
gathers over them in front of a collective over another axis; so each collective runs
on the parts that this propagation finds, by the same op sharding rules. Where XLA has
split the value otherwise, it makes it so first: the bytes over our axes are the plan's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardfn._core.automatic_axes import (
    AutoAxes,
    AutoSplit,
    auto_names,
    count,
    free_of,
    full,
)
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import Atom, Node, Program, aval_of
from shardfn._core.rule_registry import rule_of
from shardfn._core.sharding import Unreduced
from shardfn._core.sizes import elements

Splits = list[AutoSplit]
Flow = tuple[Apply, Splits]


def split_automatically(
    program: Program,
    body: BodyPlan,
    inputs: Sequence[AutoSplit],
    outputs: Sequence[AutoSplit],
) -> BodyPlan:
    """Notes the automatic splits of a whole step.

    Args:
      program: the step.
      body: its plan.
      inputs: how automatic axes split each argument.
      outputs: how they will split each result.

    Returns:
      The plan with the splits on its moves.
    """
    if not any((*inputs, *outputs)):
        return body
    return _Walk(program, {}).run(body, inputs, outputs)[0]


@dataclass(slots=True)
class _Walk:
    """One program, and the splits of its values.

    Attributes:
      program: the program.
      rules: the rules of its equations and of those around it.
      splits: what follows from the operands of what makes a value.
      preferred: what follows from its uses.
    """

    program: Program
    rules: dict[int, OpShardingRule | None]
    splits: dict[int, AutoSplit] = field(default_factory=dict)
    preferred: dict[int, AutoSplit] = field(default_factory=dict)

    def run(
        self,
        body: BodyPlan,
        inputs: Sequence[AutoSplit],
        outputs: Sequence[AutoSplit] = (),
    ) -> tuple[BodyPlan, Splits]:
        """The plan with its moves noted, and the splits of the program's results."""
        self.splits.update(zip(self.program.inputs, inputs, strict=True))
        applied = [s for s in body.steps if isinstance(s, Apply)]
        for step in applied:
            node = self.program.nodes[step.node]
            self.splits.update(zip(node.outputs, self.apply(step)[1], strict=True))
        for atom, split in zip(self.program.outputs, outputs, strict=False):
            self.prefer(atom, split)
        for step in reversed(applied):
            self.propagate_back(self.program.nodes[step.node])
        steps = tuple(
            self.note(s) if isinstance(s, Reshard) else self.apply(s)[0]
            for s in body.steps
        )
        return replace(body, steps=steps), list(map(self.of, self.program.outputs))

    def of(self, atom: Atom) -> AutoSplit:
        return self.splits.get(atom, ()) if isinstance(atom, int) else ()

    def prefer(self, atom: Atom, split: AutoSplit) -> None:
        if isinstance(atom, int) and split and not self.of(atom):
            self.preferred.setdefault(atom, split)

    def will_be(self, atom: Atom) -> AutoSplit:
        """How a value is or will be split: gradients end as their parameters are."""
        preferred = self.preferred.get(atom, ()) if isinstance(atom, int) else ()
        return self.of(atom) or preferred

    def note(self, step: Reshard) -> Reshard:
        value = step.source.value
        is_sum = any(isinstance(s, Unreduced) for s in step.path[0])
        split = self.will_be(value) if is_sum else self.of(value)
        return replace(step, auto=free_of(split, step.path))

    def apply(self, step: Apply) -> Flow:
        """The step with its bodies noted, and the splits of its results."""
        node = self.program.nodes[step.node]
        operands = list(map(self.of, node.inputs))
        if node.passes_through:
            return step, operands
        if node.bodies:
            preferred = list(map(self.will_be, node.outputs))
            return _flow(self.rules, step, node, operands, preferred)
        rule = self.rule(node)
        if rule is None or not any(operands):
            return step, [()] * len(node.outputs)
        found = _factors(
            rule, zip(rule.operands, operands, self.sizes(node.inputs), strict=True)
        )
        return step, [_in_value(dims, rule, found) for dims in rule.results]

    def propagate_back(self, node: Node) -> None:
        """What the results of an op, and its other operands, prefer of each operand."""
        rule = self.rule(node) if node.kind == "op" else None
        if rule is None:
            return
        atoms = (*node.outputs, *node.inputs)
        sides = zip(
            (*rule.results, *rule.operands),
            map(self.will_be, atoms),
            self.sizes(atoms),
            strict=True,
        )
        found = _factors(rule, sides)
        for atom, dims in zip(node.inputs, rule.operands, strict=True):
            self.prefer(atom, _in_value(dims, rule, found))

    def rule(self, node: Node) -> OpShardingRule | None:
        key = id(node.eqn)
        if key not in self.rules:
            self.rules[key] = rule_of(node.eqn)
        return self.rules[key]

    def sizes(self, atoms: Sequence[Atom]) -> list[int]:
        return [elements(aval_of(self.program, atom)) for atom in atoms]


def _factors(
    rule: OpShardingRule, sides: Iterable[tuple[Any, AutoSplit, int]]
) -> dict[str, AutoAxes]:
    """The factors that automatic axes split, given how they split some operands and
    results. Those of larger values come first: each axis splits one factor of an op."""
    found: dict[str, AutoAxes] = {}
    for dims, split, _ in sorted(sides, key=lambda side: -side[2]):
        for dim, axes in enumerate(split):
            factor = rule.major(dims, dim) if axes else None
            if factor is None or factor in found:
                continue
            is_taken = auto_names((axes,)) & auto_names(tuple(found.values()))
            divides = rule.size(factor) % count(axes) == 0
            if divides and not is_taken and rule.is_splittable(factor):
                found[factor] = axes
    return found


def _in_value(dims: Any, rule: OpShardingRule, found: dict[str, AutoAxes]) -> AutoSplit:
    return full([found.get(rule.major(dims, d) or "", ()) for d in range(len(dims))])


# Control flow


def _flow(
    rules: Any, step: Apply, node: Node, operands: Splits, preferred: Splits
) -> Flow:
    """The step with its bodies noted, and the splits of its results: of each, those of
    the first body that splits it. Carries that begin whole, as zeros do, take the split
    of what replaces them."""
    given, bodies = list(operands), list(step.bodies)
    results: Splits = [()] * len(node.outputs)

    def run(k: int) -> Splits:
        region, walk = node.regions[k], _Walk(node.bodies[k], rules)
        inputs = [
            full(split[1:]) if i in region.slices else split
            for i, split in enumerate(region.entering(given))
        ]
        outputs = [
            full(split[1:]) if j in region.stacks else split
            for j, split in enumerate(region.leaving(preferred, ()))
        ]
        bodies[k], made = walk.run(step.bodies[k], inputs, outputs)
        return made

    # Loops first: their tests are of what they carry in the end.
    for k in sorted(range(len(bodies)), key=lambda k: not node.regions[k].loops):
        region = node.regions[k]
        while True:  # a carry that is split stays so: it ends
            made, before = run(k), list(given)
            for j, i in region.loops:
                given[region.operands[i]] = given[region.operands[i]] or made[j]
            if given == before:
                break
        for j, i in region.loops:
            made[j] = given[region.operands[i]]
        for j, result in region.returned():
            split = full(((), *made[j])) if j in region.stacks else made[j]
            results[result] = results[result] or split
    return replace(step, bodies=tuple(bodies)), results
