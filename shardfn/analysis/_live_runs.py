"""How often each move of a plan runs whose result something needs.

In: a program and its plan. Out: per body and step, the runs that a compiler keeps. An
iteration that is written out, in a loop of one round or behind the last, makes what the
next one would read: where there is none, compilers drop that, and its gathers with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardfn._core.plan import Apply, BodyPlan, Place, Ref, reads
from shardfn._core.program import Node, Program
from shardfn.analysis._times import Times

Runs = Mapping[tuple[Place, int], Times]
"""By body and index of a move in it."""

Needed = frozenset[int]
"""Indices of the arguments, or results, of a body that something reads."""


def count_runs(program: Program, body: BodyPlan) -> Runs:
    """The runs of every move of a step, of which all results are read; moves that never
    run are left out."""
    counting = _Counting()
    counting.body(program, body, frozenset(range(len(body.outputs))), (), Times())
    return counting.runs


@dataclass(slots=True)
class _Counting:
    """Counts while bodies are walked from their ends."""

    runs: dict[tuple[Place, int], Times] = field(default_factory=dict)

    def add(self, place: Place, index: int, times: Times) -> None:
        before = self.runs.get((place, index), Times(0))
        self.runs[place, index] = before + times

    def body(
        self,
        program: Program,
        body: BodyPlan,
        results: Needed,
        at: Place,
        times: Times,
    ) -> Needed:
        """Adds `times` runs of a body, `results` of which are read; its arguments that
        it reads."""
        live = {body.outputs[i] for i in results} | {*body.exports, *body.handed}
        joined: set[Ref | None] = set()
        for index in reversed(range(len(body.steps))):
            step = body.steps[index]
            if isinstance(step, Apply):
                live |= self.node(program.nodes[step.node], step, live, at, times)
            elif step.result in live or step.together in joined - {None}:
                joined.add(step.together)
                live.update(reads(step))
                self.add(at, index, times)
        return frozenset(i for i, v in enumerate(program.inputs) if Ref(v) in live)

    def node(
        self,
        node: Node,
        step: Apply,
        live: Iterable[Ref | None],
        at: Place,
        times: Times,
    ) -> set[Ref]:
        """Adds the runs of a node's bodies; the versions that it reads, none if nothing
        reads what it makes."""
        results = {i for i, v in enumerate(node.outputs) if Ref(v) in live}
        exported = any(ref in live for ref in step.exports)
        if not (results or exported or node.eqn.effects):
            return set()
        whole = node.kind == "while" or bool(step.ahead or node.eqn.effects)
        operands = [] if node.bodies else [*range(len(step.operands))]
        operands += [0] if node.kind == "cond" else []
        bodies = zip(node.bodies, step.bodies, node.regions, strict=True)
        for i, (program, plan, region) in enumerate(bodies):
            place = (*at, step.node, i)
            if node.kind == "scan" and not whole:
                needed = self.scan(node, step, results, place, times)
            else:
                given = enumerate(region.results)
                read = (j for j, out in given if whole or out in results)
                runs = times.each(step.times)
                needed = self.body(program, plan, frozenset(read), place, runs)
            arguments = enumerate(region.operands)
            operands += [of for j, of in arguments if whole or j in needed]
        refs = (step.operands[i] for i in operands)
        return {ref for ref in (*refs, *step.imports, step.after) if ref is not None}

    def scan(
        self,
        node: Node,
        step: Apply,
        results: set[int],
        place: Place,
        times: Times,
    ) -> Needed:
        """Adds the runs of a scan's body, of the last iteration first; the arguments
        that some iteration reads."""
        (program,), (plan,), (region,) = node.bodies, step.bodies, node.regions
        carried = dict(region.loops)
        stacks = frozenset(i for i in region.stacks if i in results)
        live = frozenset(i for i in carried if i in results)
        length = step.times or 0
        unroll = node.eqn.params["unroll"] or length  # JAX's 0 is all
        looped = length - length % unroll if length >= 2 * unroll else 0
        written_out, read = length - looped, set()
        while written_out:
            trial = _Counting()
            needed = trial.body(program, plan, live | stacks, place, Times())
            before = frozenset(i for i, j in carried.items() if j in needed)
            count = written_out if before == live else 1
            self.take(trial, times, count)
            read |= needed
            live, written_out = before, written_out - count
        while looped:
            trial = _Counting()
            needed = trial.body(program, plan, live | stacks, place, Times())
            before = frozenset(i for i, j in carried.items() if j in needed) | live
            if before == live:
                self.take(trial, times, looped)
                read |= needed
                break
            live = before
        return frozenset(read)

    def take(self, trial: "_Counting", times: Times, count: int) -> None:
        """Adds what one iteration runs, `count` of them, `times` times."""
        for (place, index), runs in trial.runs.items():
            self.add(place, index, times * runs.each(count))
