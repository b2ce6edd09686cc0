"""The plan: a frozen value that says what every device runs and what it moves.

`propagate` writes it, schedule passes rewrite it, `emit` follows it, people print it.
A `BodyPlan` is straight-line: `Reshard` steps make a new version of a value in another
sharding, `Apply` steps run one node of the program on such versions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardfn._reshard import COMMUNICATES, move_of, wire_elements
from shardfn._sharding import Axes, Sharding


@dataclass(frozen=True, slots=True)
class Ref:
    """A version of a program's value: version 0 is as made, others are resharded."""

    value: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Reshard:
    """Makes `result` from `source` by moving along `path` (see `_reshard`).

    Attributes:
      source: the version that is moved.
      result: the version it makes.
      path: shardings from the first to the last, neighbours one move apart.
      shape: global shape of the value.
      dtype: dtype name, such as "bfloat16".
      itemsize: bytes per element.
      phase: forward, backward or update.
      stored: whether this gathers a value of the stored state.
      after: the move waits for this version to exist, so that the compiler cannot merge
        it with an earlier gather of the same value.
    """

    source: Ref
    result: Ref
    path: tuple[Sharding, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    phase: str
    stored: bool = False
    after: Ref | None = None

    @property
    def gathers_state(self) -> bool:
        return self.stored and any(
            move_of(a, b)[0] == "all_gather"
            for a, b in zip(self.path, self.path[1:], strict=False)
        )


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
      fallback: whether it runs on gathered operands for want of a rule.
      moved: bytes gathered for that.
      place: the user's source line, for the fallback's line in the plan.
      times: how often a body runs per run of this step (scan length), None if unknown.
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


Step = Reshard | Apply


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """Plan of one program: argument shardings, steps, and what is returned."""

    inputs: tuple[Sharding, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Ref | None, ...]
    output_shardings: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One line of the plan.

    Attributes:
      op: "all_gather", "psum_scatter", "all_reduce", "all_to_all".
      axis: mesh axis name.
      phase: "forward", "backward" or "update".
      shape: global shape of the value.
      dtype: dtype name on the wire.
      wire_bytes: bytes that each device sends, each time.
      times: runs per step; None inside a while loop.
      path: the state leaf it belongs to, or "".
      place: the user's source line that needs it.
      fallback: the primitive without a rule that caused it, or "".
    """

    op: str
    axis: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    wire_bytes: int
    times: int | None
    path: str = ""
    place: str = field(default="", compare=False)
    fallback: str = ""

    @property
    def total_bytes(self) -> int:
        """Wire bytes per device and step; a while loop is counted once."""
        return self.wire_bytes * (1 if self.times is None else self.times)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one sharded step moves, when, and why; see `print(plan)`.

    Attributes:
      axes: the mesh axes sharded over.
      body: the steps.
      collectives: every collective, in program order.
      parameter_bytes: M, the bytes of the gathered parameters in their compute dtype.
      program: fingerprint of the traced step and of the arrays it captured.
    """

    axes: Axes
    body: BodyPlan = field(repr=False)
    collectives: tuple[Collective, ...]
    parameter_bytes: int
    program: str

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends per step."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def fallbacks(self) -> tuple[Collective, ...]:
        """Collectives that only a primitive without a rule needs."""
        return tuple(c for c in self.collectives if c.fallback)

    def __str__(self) -> str:
        from shardfn._plan_table import table

        return table(self)


def communicating_moves(step: Reshard, axes: Axes) -> Iterator[tuple[str, int, int]]:
    """`(op, mesh axis index, wire bytes)` for each move of `step` that uses the
    wire."""
    for before, after in zip(step.path, step.path[1:], strict=False):
        op, axis = move_of(before, after)
        if op in COMMUNICATES and axes.sizes[axis] > 1:
            sent = wire_elements(before, after, step.shape, axes) * step.itemsize
            yield op, axis, round(sent)
