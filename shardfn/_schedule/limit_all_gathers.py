"""Bounds how far ahead unrolled layers gather their weights.

In: a scheduled plan, and how many units ahead each leaf may be gathered. A unit is what
a remat of the backward pass gathers, in both passes, or else one weight. Out: the plan,
in which a gather waits until the unit so many before it begins. A remat's gathers wait
for themselves then, and no longer for the cotangent that enters it.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from shardfn._core.control import Control
from shardfn._core.leaves import Names
from shardfn._core.option_values import layers_ahead
from shardfn._core.phases import UPDATE
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Node, Program, mixes_passes
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Sharding, Split
from shardfn._schedule.bodies import inside
from shardfn._schedule.versions import fresh


def limit_all_gathers(program: Program, body: BodyPlan, control: Control) -> BodyPlan:
    """Ties the gathers of unrolled layers to the layers before them.

    Args:
      program: the program.
      body: its plan, scheduled otherwise.
      control: how many units ahead each leaf is gathered; 0 and "first" leave it as
        it is.

    Returns:
      The plan.
    """
    if not any(map(layers_ahead, control.asked("prefetch"))):
        return body

    def within(program: Program, body: BodyPlan) -> BodyPlan:
        return (
            limit_all_gathers(program, body, control) if mixes_passes(program) else body
        )

    return _Order(program, inside(program, body, within), control).ordered()


@dataclass(slots=True)
class _Order:
    """State while the gathers of one body are tied.

    `starts` are, for each unit so far, the newest activation when it begins: of those
    that depend on the unit before. `depth` is per value the last unit it depends on.
    """

    program: Program
    body: BodyPlan
    control: Control
    starts: list[Ref | None] = field(default_factory=list)
    depth: dict[Ref, int] = field(default_factory=dict)
    newest: Ref | None = None
    current: Hashable = None

    def ordered(self) -> BodyPlan:
        units = self.units()
        steps: list[Step] = []
        for step in self.body.steps:
            if isinstance(step, Reshard):
                if _gathers(step):
                    leaf = self.program.leaf(step.source.value)
                    self.enter(units.get(leaf, step.together or step.result))
                    token = self.start(leaf)
                    if token is not None:
                        step = self.bound(step, leaf, token)
                    self.depth[step.result] = len(self.starts)
                else:
                    self.depth[step.result] = self.depth.get(step.source, 0)
            else:
                step = self.apply(step, self.program.nodes[step.node])
            steps.append(step)
        return replace(self.body, steps=tuple(steps))

    def units(self) -> dict[Names, Hashable]:
        """Per leaf that a remat gathers, that remat."""
        found: dict[Names, Hashable] = {}
        for step in self.body.steps:
            if not isinstance(step, Apply):
                continue
            node = self.program.nodes[step.node]
            moves = step.bodies[0].steps if node.kind == "remat" else ()
            for move in moves:
                if isinstance(move, Reshard) and _gathers(move):
                    leaf = node.bodies[0].leaf(move.source.value)
                    found.setdefault(leaf, step.node)
        return found

    def enter(self, unit: Hashable) -> None:
        """Begins a unit, unless it is the current one."""
        if unit != self.current:
            self.current = unit
            self.starts.append(self.newest)

    def start(self, leaf: Names) -> Ref | None:
        """What a gather of a leaf waits for, in the current unit."""
        ahead = layers_ahead(self.control.of(*leaf).prefetch)
        at = len(self.starts) - 1 - ahead
        return self.starts[at] if ahead and at >= 0 else None

    def bound(self, move: Reshard, leaf: Names, token: Ref) -> Reshard:
        """A gather that waits for a version."""
        ahead = layers_ahead(self.control.of(*leaf).prefetch)
        text = f"waits for the layer {ahead} before its own to begin (prefetch)"
        note = Note("limit_all_gathers", text)
        return replace(move, after=token, notes=noted(move, note))

    def apply(self, step: Apply, node: Node) -> Apply:
        """Notes what a step makes, and what of it is the newest activation."""
        depth = max((self.depth.get(ref, 0) for ref in reads(step)), default=0)
        if node.kind == "remat" and any(map(_gathers, step.bodies[0].steps)):
            self.enter((step.node, "repeated"))
            step, depth = self.unit(step, node), len(self.starts)
        for value, sharding in zip(node.outputs, step.result_shardings, strict=True):
            ref = Ref(value)
            self.depth[ref] = depth
            last = 0 if self.newest is None else self.depth[self.newest]
            if depth and depth >= last and _is_activation(sharding):
                self.newest = ref
        return step

    def unit(self, step: Apply, node: Node) -> Apply:
        """A remat whose gathers wait for what is imported in place of its barrier."""
        (body,), program = step.bodies, node.bodies[0]
        inside: dict[Ref, Ref] = {}
        steps: list[Step] = []
        tied: set[Names] = set()
        for move in body.steps:
            if isinstance(move, Reshard) and _gathers(move):
                leaf = program.leaf(move.source.value)
                token = self.start(leaf)
                if token is not None:
                    if token not in inside:
                        inside[token] = fresh(body, program.inputs[0])
                        body = replace(body, imports=(*body.imports, inside[token]))
                    move = self.bound(move, leaf, inside[token])
                    tied.add(leaf)
            steps.append(move)
        early = tuple(
            i for i, value in enumerate(program.inputs) if program.leaf(value) in tied
        )
        return replace(
            step,
            bodies=(replace(body, steps=tuple(steps)),),
            imports=(*step.imports, *inside),
            early=early,
        )


def _gathers(step: Step) -> bool:
    """Whether a step gathers a parameter for a pass."""
    return isinstance(step, Reshard) and step.gathers_state and step.phase != UPDATE


def _is_activation(sharding: Sharding) -> bool:
    return any(isinstance(s, Split) and not s.stored for s in sharding)
