"""Makes a value once for each of the products that read it.

In: the plan of a body, and what its pointwise operations are given. Out: copies of the
values that are `duplicated` there. All that a copy is made of comes through a barrier
of its own: a compiler would merge equal operations otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from shardfn._core.barrier import unfused_on_tpus
from shardfn._core.plan import Apply, BodyPlan, Ref
from shardfn._core.program import Program
from shardfn._core.sharding import Axes
from shardfn._schedule.duplicate_producers import Producers

Evaluate = Callable[[Sequence[jax.Array]], Mapping[Ref, jax.Array]]


@dataclass(slots=True)
class Duplicates:
    """Copies of one body's values, beside those that the body makes.

    Attributes:
      counts: how many copies each value has.
      nodes: for how many an operation is evaluated.
      copies: per copy, what it has so far.
    """

    counts: dict[Ref, int] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    copies: list[dict[Ref, jax.Array]] = field(default_factory=list)

    def prepare(self, program: Program, body: BodyPlan, axes: Axes) -> None:
        """Finds what is evaluated for them."""
        if not body.duplicated:
            return
        producers = Producers(program, body, axes)
        # What a loop over blocks has come to make is in memory.
        for value in producers.made.keys() & {*body.duplicated}:
            self.counts[value] = count = len(producers.readers[value]) - 1
            for node in producers.chain(value)[0]:
                self.nodes[node] = max(count, self.nodes.get(node, 0))
        self.copies = [{} for _ in range(max(self.counts.values(), default=0))]

    def follow(
        self, step: Apply, operands: Sequence[jax.Array], evaluate: Evaluate
    ) -> dict[Ref, list[jax.Array]]:
        """Evaluates an operation for each copy that it is part of.

        Args:
          step: its step of the plan.
          operands: what the body itself gives it.
          evaluate: from operands to what it makes.

        Returns:
          The copies of those of the values that it makes.
        """
        finished: dict[Ref, list[jax.Array]] = {}
        for copy in self.copies[: self.nodes.get(step.node, 0)]:
            given: list[jax.Array] = []
            for ref, x in zip(step.operands, operands, strict=True):
                if ref is not None and ref not in copy:
                    copy[ref] = unfused_on_tpus(x)
                given.append(x if ref is None else copy[ref])
            made = evaluate(given)
            copy.update(made)
            for ref in made.keys() & self.counts.keys():
                if len(found := finished.setdefault(ref, [])) < self.counts[ref]:
                    found.append(made[ref])
        return finished
