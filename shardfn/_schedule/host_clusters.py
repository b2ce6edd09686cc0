"""Which operations work on leaves in the host's memory, and can do so in blocks.

In: a plan, and its versions that live in the host's memory. Out: clusters of pointwise
operations: what makes a new leaf of an old one, and what else of its shape only that
needs.

A cluster has a level. Where a step needs all of what a cluster makes, as the norm of an
update does, operations that need that step are a cluster of a higher level.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shardfn._core.phases import UPDATE
from shardfn._core.plan import (
    Apply,
    BodyPlan,
    Ref,
    Reshard,
    Step,
    reads,
)
from shardfn._core.program import Program, aval_of
from shardfn._core.sharding import Sharding, is_unreduced
from shardfn._core.step_order import made_by

Form = tuple[tuple[int, ...], Sharding]
"""The global shape and the sharding that all large values of a cluster have."""


@dataclass(slots=True)
class Cluster:
    """Pointwise operations, in their order.

    Attributes:
      form: of their operands and results that are no scalars.
      ops: the indices of their steps.
      made: the versions that they make.
      read: those that they read from elsewhere, in order.
    """

    form: Form
    ops: list[int] = field(default_factory=list)
    made: set[Ref] = field(default_factory=set)
    read: list[Ref] = field(default_factory=list)


def clusters_of(
    program: Program, body: BodyPlan, host: Collection[Ref]
) -> tuple[Cluster, ...]:
    """The clusters of a plan.

    Args:
      program: the program.
      body: its plan.
      host: the versions that live in the host's memory.

    Returns:
      The clusters, in the order of their last operations. They depend on each other one
      way.
    """
    found = _Search(program, body, host, _updates(program, body))
    for index, step in enumerate(body.steps):
        found.visit(index, step)
    clusters = found.clusters()
    _take_in_operands(program, body, clusters)
    for cluster in clusters:
        cluster.ops.sort()
        steps = [body.steps[i] for i in cluster.ops]
        read = itertools.chain(*map(reads, steps))
        cluster.read = [r for r in dict.fromkeys(read) if r not in cluster.made]
    return tuple(sorted(clusters, key=lambda cluster: cluster.ops[-1]))


@dataclass(slots=True)
class _Search:
    """Follows what depends on leaves in the host's memory, step by step.

    Attributes:
      updates: the steps of the update.
      level: per version, how many clusters one after the other it waits for.
      member: per version that a cluster makes, an operation of that cluster.
      joined: per operation, another one of its cluster, as in union-find.
    """

    program: Program
    body: BodyPlan
    host: Collection[Ref]
    updates: Collection[int]
    level: dict[Ref, int] = field(default_factory=dict)
    member: dict[Ref, int] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    readers: dict[tuple[Ref, int], int] = field(default_factory=dict)

    def visit(self, index: int, step: Step) -> None:
        """Finds out what one step belongs to, and what it waits for. Where there is an
        update, only that goes through leaves: what all later passes wait for, such as
        the cast of a parameter, would part it from the leaves that it reads first."""
        form = form_of(self.program, step) if index in self.updates else None
        reached = [r for r in reads(step) if r in self.host or r in self.member]
        if form is None or not reached:
            waits = [self.level.get(r, 0) + (r in self.member) for r in reads(step)]
            for ref in made_by(self.program, step):
                self.level[ref] = max(waits, default=0)
            return
        level = max(self.level.get(r, 0) for r in reads(step))
        self.joined[index] = index
        for ref in reached:
            if ref in self.host:
                self.join(index, self.readers.setdefault((ref, level), index))
            elif self.level[ref] == level:
                self.join(index, self.member[ref])
        for ref in made_by(self.program, step):
            self.level[ref], self.member[ref] = level, index

    def root(self, index: int) -> int:
        while self.joined[index] != index:
            index = self.joined[index]
        return index

    def join(self, one: int, other: int) -> None:
        self.joined[self.root(one)] = self.root(other)

    def clusters(self) -> list[Cluster]:
        found: dict[int, Cluster] = {}
        for index in self.joined:
            step = self.body.steps[index]
            form = form_of(self.program, step)
            assert form is not None
            cluster = found.setdefault(self.root(index), Cluster(form))
            cluster.ops.append(index)
            cluster.made.update(made_by(self.program, step))
        return list(found.values())


def _updates(program: Program, body: BodyPlan) -> set[int]:
    """The steps of the update, and those that only it reads, such as the decay of a
    moment that the user wrote in front of the gradient; all if there is no update."""
    if all(node.during.phase != UPDATE for node in program.nodes):
        return set(range(len(body.steps)))
    found: set[int] = set()
    earlier: set[Ref] = set()  # what steps of other passes read
    for index in reversed(range(len(body.steps))):
        step = body.steps[index]
        of = step if isinstance(step, Reshard) else program.nodes[step.node]
        is_alone = not of.during.is_backward and earlier.isdisjoint(
            made_by(program, step)
        )
        if of.during.phase == UPDATE or is_alone:
            found.add(index)
        else:
            earlier.update(reads(step))
    return found


def _take_in_operands(
    program: Program, body: BodyPlan, clusters: Sequence[Cluster]
) -> None:
    """Adds to each cluster the pointwise operations of the update that only it reads:
    outside, what they make would be as large as a leaf."""
    users: dict[Ref, set[int]] = {}
    for index, step in enumerate(body.steps):
        for ref in reads(step):
            users.setdefault(ref, set()).add(index)
    leaving = body.leaving
    cluster_of = {index: cluster for cluster in clusters for index in cluster.ops}
    for index in reversed(range(len(body.steps))):
        step = body.steps[index]
        if index in cluster_of or (form := form_of(program, step)) is None:
            continue
        assert isinstance(step, Apply)
        made = made_by(program, step)
        using = {i for ref in made for i in users.get(ref, ())}
        into = {id(cluster_of.get(i)): cluster_of.get(i) for i in using}
        if len(into) != 1 or not leaving.isdisjoint(made):
            continue
        ((_, cluster),) = into.items()
        if cluster is not None and cluster.form == form and _may_wait(program, step):
            cluster.ops.append(index)
            cluster.made.update(made)
            cluster_of[index] = cluster


def _may_wait(program: Program, step: Apply) -> bool:
    """Whether an operation may wait for the update: it is part of it, or widens a
    scalar."""
    node = program.nodes[step.node]
    scalars = all(not aval_of(program, atom).shape for atom in node.inputs)
    return scalars or node.during.phase == UPDATE


def form_of(program: Program, step: Step) -> Form | None:
    """The shape and sharding of what a pointwise operation reads and makes, scalars
    aside; None for other steps."""
    if not isinstance(step, Apply) or step.after is not None:
        return None
    node = program.nodes[step.node]
    rule = node.rule
    if node.kind != "op" or rule is None or node.eqn.effects or not node.outputs:
        return None
    if not rule.flat or rule.reduce or rule.shifts:
        return None
    shape, sharding = program.avals[node.outputs[0]].shape, step.result_shardings[0]
    shapes = [aval_of(program, atom).shape for atom in node.inputs]
    large = [
        s
        for s, each in zip(step.operand_shardings, shapes, strict=True)
        if each == shape
    ]
    if not shape or is_unreduced(sharding) or not (large or rule.linear):
        return None
    alike = all(s == sharding for s in (*large, *step.result_shardings))
    alike &= all(program.avals[v].shape == shape for v in node.outputs)
    scalars = (
        s for s, each in zip(step.operand_shardings, shapes, strict=True) if not each
    )
    whole = all(each in ((), shape) for each in shapes)
    whole &= not any(map(is_unreduced, scalars))
    return (shape, sharding) if alike and whole and shapes else None
