"""The plan: a frozen value that says what every device runs and what it moves.

In: what `propagate` writes and passes rewrite. Out: what `emit` follows.

A `BodyPlan` is straight-line: `Reshard` steps make a new version of a value in another
sharding, `Apply` steps run one node of the program on such versions.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from shardfn._core.automatic_axes import AutoSplit, part_shape
from shardfn._core.leaves import NO_LEAF, Names
from shardfn._core.moves import AllGather, Move, moves_of
from shardfn._core.phases import Pass
from shardfn._core.quantized import Quantized
from shardfn._core.reasons import Cause, Note
from shardfn._core.sharding import Sharding, Split


class Ref(NamedTuple):
    """A version of a program's value: version 0 is as made, others are resharded."""

    value: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Reshard:
    """Makes `result` from `source` by moving along `path` (see `resharding`).

    Attributes:
      source: the version that is moved.
      result: the version it makes.
      path: shardings from the first to the last, neighbours one move apart.
      shape, dtype: global shape and dtype's name on the wire; usually the value's own.
      written: how the value is quantized over each mesh axis; empty if it is not.
      in_bits: what it makes stays quantized.
      residual: a version that it makes, too: what quantizing took from its terms.
      itemsize: bytes per element.
      during: its pass; stored: whether this gathers a value of the stored state.
      gradient: whether it moves what a backward pass makes, or is linear in it.
      after: the version that the move waits for.
      auto: how automatic mesh axes split the value, which moves part by part.
      together: what the first of several neighbours makes that are one collective.
      used_first: of a gather in a loop: its first products use it (`first_gathers`).
      in_turn: of another there: what it waits for is used only when it can begin.
      padded: the dimension where the value, or a device's part of a sum, is smaller.
      cause: what it is for; no part of what plans are compared by.
      notes: what passes did to it, no part of that either.
    """

    source: Ref
    result: Ref
    path: tuple[Sharding, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    during: Pass
    stored: bool = False
    gradient: bool = False
    after: Ref | None = None
    auto: AutoSplit = ()
    together: Ref | None = None
    written: tuple[Quantized | None, ...] = ()
    in_bits: bool = False
    residual: Ref | None = None
    undelayed: bool = False
    used_first: bool = False
    in_turn: bool = False
    padded: int | None = None
    cause: Cause | None = field(default=None, compare=False, repr=False)
    notes: tuple[Note, ...] = field(default=(), compare=False, repr=False)

    @property
    def makes(self) -> tuple[Ref, ...]:
        """The versions that it makes."""
        return (self.result,) if self.residual is None else (self.result, self.residual)

    @property
    def moves(self) -> list[Move]:
        """The moves along its path."""
        return moves_of(self.path, self.written)

    @property
    def phase(self) -> str:
        """Forward, backward or update."""
        return self.during.phase

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the value over our axes: of one part, if automatic ones split it."""
        return part_shape(self.shape, self.auto)

    @property
    def leaves_part(self) -> bool:
        """Whether it leaves each device of a group its part of a whole value."""
        return any(isinstance(s, Split) and s.group for s in self.path[-1])

    @property
    def takes_bits(self) -> bool:
        """Whether it moves elements and scales as they come, if they come so."""
        takes = self.in_bits or any(move.packed_as for move in self.moves[:1])
        return takes and not self.auto

    @property
    def is_local(self) -> bool:
        """Whether each device makes its part of what it has."""
        return not any(move.op for move in self.moves)

    @property
    def gathers_state(self) -> bool:
        return self.stored and any(isinstance(m, AllGather) for m in self.moves)


@dataclass(frozen=True, slots=True)
class Apply:
    """Runs node `node` of the program.

    Attributes:
      node: index of the node.
      primitive: its primitive's name.
      operands: a version per operand, None for a literal.
      operand_shardings: their shardings.
      result_shardings: shardings of the results as the op makes them.
      parts: `(factor, mesh axis index)` for every factor that is split.
      bodies: plans of control flow bodies.
      fallback: whether it runs on gathered operands, as it has no rule; place: where.
      times: how often a body runs per run of this step (scan length), None if unknown.
      imports: versions that the body of a scan or remat imports: a scan slices them.
      exports: versions made of what that body exports: a scan stacks it.
      ahead: parts of a scan's body that run in an earlier iteration. The body imports
        what they export, after what the scan imports.
      early: operands outside of a remat's barrier: their gathers wait for imports.
      narrow: results that a scan stacks before its body casts them (`narrow_stacks`).
      stacks_last: whether what a scan stacks and what it carries end together.
      after: an op on literals alone waits for this version to exist.
    """

    node: int
    primitive: str
    operands: tuple[Ref | None, ...]
    operand_shardings: tuple[Sharding, ...]
    result_shardings: tuple[Sharding, ...]
    parts: tuple[tuple[str, int], ...] = ()
    bodies: "tuple[BodyPlan, ...]" = ()
    fallback: bool = False
    place: str = ""
    times: int | None = 1
    imports: tuple[Ref, ...] = ()
    exports: tuple[Ref, ...] = ()
    ahead: "tuple[Ahead, ...]" = ()
    early: tuple[int, ...] = ()
    narrow: tuple[int, ...] = ()
    stacks_last: bool = False
    after: Ref | None = None


Step = Reshard | Apply


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies `source` between the memories of a device and its host.

    Attributes:
      source: the version that is copied.
      result: the version it makes.
      memory: where that is.
      shape: global shape of the value.
      sharding: its sharding, before and after.
      dtype: name of its dtype.
      itemsize: bytes per element.
      during: the pass that it is part of.
      leaf: the names of the state leaves that it is for.
      after: what is copied waits for this version to exist.
    """

    source: Ref
    result: Ref
    memory: str
    shape: tuple[int, ...]
    sharding: Sharding
    dtype: str
    itemsize: int
    during: Pass
    leaf: Names = NO_LEAF
    after: Ref | None = None


@dataclass(frozen=True, slots=True)
class BlockLoop:
    """Runs steps block by block of dimension `dim`, so that a device holds a block of
    what the host's memory holds.

    Attributes:
      steps: pointwise operations, and copies from and to the host's memory.
      shape: global shape of all values but scalars.
      sharding: their sharding.
      dim: the dimension.
      blocks: how many each device's part is cut into.
      sliced: versions from outside that each iteration reads a block of, others whole.
      made: versions that leave, block by block.
      into: per made version, the one in whose place it is written; None for none.
      reads: all versions from outside, `sliced` and `into` among them.
    """

    steps: "tuple[Apply | Transfer, ...]"
    shape: tuple[int, ...]
    sharding: Sharding
    dim: int
    blocks: int
    sliced: tuple[Ref, ...]
    made: tuple[Ref, ...]
    into: tuple[Ref | None, ...]
    reads: tuple[Ref, ...]


HostStep = Transfer | BlockLoop


@dataclass(frozen=True, slots=True)
class HostSchedule:
    """What a plan runs where leaves of the state live in the host's memory.

    Attributes:
      steps: the plan's steps, some in block loops, and copies between the memories.
      outputs: what is returned, copies in place of what has to leave for the host.
    """

    steps: tuple[Step | HostStep, ...]
    outputs: tuple[Ref | None, ...]


def reads(step: Step | HostStep) -> tuple[Ref, ...]:
    """The versions that a step reads."""
    if isinstance(step, BlockLoop):
        return step.reads
    waits = () if step.after is None else (step.after,)
    if isinstance(step, Reshard | Transfer):
        return (step.source, *waits)
    known = (ref for ref in step.operands if ref is not None)
    return (*known, *step.imports, *waits)


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """Plan of one program.

    Attributes:
      inputs: shardings of the arguments.
      steps: what runs, in order.
      outputs: what is returned; None for a literal.
      output_shardings: its shardings.
      imports: versions that come in besides the arguments.
      exports: versions that are handed out besides the outputs.
      handed: of a loop's, versions that a later iteration gets (`Ahead`).
      duplicated: versions that each product that reads them makes itself.
      on_host, to_host: arguments that arrive, and outputs that leave, in host memory.
      aliased: outputs that are written over arguments, if those are donated.
      host: what is run in place of the steps if there are any.
    """

    inputs: tuple[Sharding, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Ref | None, ...]
    output_shardings: tuple[Sharding, ...]
    imports: tuple[Ref, ...] = ()
    exports: tuple[Ref, ...] = ()
    handed: tuple[Ref, ...] = ()
    duplicated: tuple[Ref, ...] = ()
    on_host: frozenset[int] = frozenset()
    to_host: frozenset[int] = frozenset()
    aliased: frozenset[int] = frozenset()
    host: HostSchedule | None = None

    @property
    def run(self) -> tuple[tuple[Step | HostStep, ...], tuple[Ref | None, ...]]:
        """The steps and outputs that are run."""
        if self.host is not None:
            return self.host.steps, self.host.outputs
        return self.steps, self.outputs

    @property
    def leaving(self) -> frozenset[Ref]:
        """All versions that leave it."""
        outputs = (ref for ref in self.run[1] if ref is not None)
        return frozenset((*outputs, *self.exports, *self.handed))

    @property
    def falls_back(self) -> bool:
        """Whether an op in it, or in a body in it, runs on gathered operands."""
        ops = [step for step in self.steps if isinstance(step, Apply)]
        return any(op.fallback or any(b.falls_back for b in op.bodies) for op in ops)


Site = tuple[tuple[int, ...], Ref]
"""Where a version is made: in which calls of a body, and its name there."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Steps of a scan's body that run `lead` iterations ahead of the others.

    `part` reads what the scan goes through, its constants and imports, and exports. The
    body imports what its gathers move that are `tied`, or if `handed` what it exports,
    and hands it on.
    """

    lead: int
    part: BodyPlan
    tied: tuple[Site, ...] = ()
    handed: bool = False


Place = tuple[int, ...]
"""Which body of a plan: node and body index of each around it, outermost first."""
