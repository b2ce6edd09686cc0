"""What a step copies between the host's memory and the device's, as people read it.

In: a plan. Out: one `HostTransfer` per copy, and their table; what a compiled program
has to have of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.automatic_axes import part_shape
from shardfn._core.leaves import Leaf, leaf_name, names_text
from shardfn._core.line_names import line_name
from shardfn._core.memories import DEVICE, HOST
from shardfn._core.plan import (
    Apply,
    BlockLoop,
    BodyPlan,
    HostStep,
    Ref,
    Reshard,
    Step,
    Transfer,
    reads,
)
from shardfn._core.program import Program
from shardfn._core.sharding import Axes, Sharding, local_shape
from shardfn._core.step_order import made_by
from shardfn.analysis._text import join_columns, shape_text, size_text


@dataclass(frozen=True, slots=True)
class HostTransfer:
    """One copy between the memories.

    Attributes:
      memory: where it goes to, "device" or "host".
      phase: forward, backward or update.
      shape: global shape.
      dtype: name of the dtype.
      bytes: that one device copies per step.
      blocks: in how many parts; 1 if the device holds all of it at once.
      dim: the dimension that is cut into parts; -1 if a scan goes through slices of
        it, one in each iteration.
      path: the state leaf that it is for.
      waits_for: the names of the collectives that make what it waits for (see
        `line_name`); none if it does not wait.
    """

    memory: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    blocks: int
    dim: int
    path: str
    waits_for: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def block_bytes(self) -> int:
        """Bytes that the device holds of it at once."""
        return self.bytes // self.blocks

    @property
    def parts(self) -> str:
        """`one piece`, `4 blocks` or, of a scan, `24 slices`."""
        if self.blocks == 1:
            return "one piece"
        return f"{self.blocks} {'slices' if self.dim < 0 else 'blocks'}"

    def __str__(self) -> str:
        where = "to the host" if self.memory == HOST else "from the host"
        text = f"{self.phase} copy {where}: {size_text(self.bytes)} per device"
        if self.blocks == 1:
            return f"{text}, in one piece"
        if self.dim < 0:
            size = size_text(self.block_bytes)
            return f"{text}, in {self.blocks} slices of a scan, each of {size}"
        return (
            f"{text}, in {self.blocks} blocks of dimension {self.dim}, each of "
            f"{size_text(self.block_bytes)} (limits.HOST_BLOCK_BYTES)"
        )


@dataclass(frozen=True, slots=True)
class LeafOnHost:
    """A leaf of the state in the host's memory: its path, what a device has of it, and
    whether it comes back, or is only read."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    returns: bool = True

    def __str__(self) -> str:
        return f"{self.path}, {self.dtype} {shape_text(self.shape)} per device"


def host_transfers(
    program: Program, body: BodyPlan, state: Sequence[Leaf], axes: Axes
) -> Iterator[HostTransfer]:
    """The copies of a plan, in its order."""
    autos = {leaf_name(leaf.path): leaf.auto or () for leaf in state}
    makers = {ref: step for step in body.run[0] for ref in made_by(program, step)}
    for step, blocks, dim in _copies(body):
        described = _described(step, blocks, dim, autos, axes)
        moves = _moves_behind(step.after, makers) if dim >= 0 else ()
        yield replace(described, waits_for=frozenset(moves))


def _moves_behind(
    ref: Ref | None, makers: Mapping[Ref, Step | HostStep]
) -> Iterator[str]:
    """The names of the last moves that a version is made of."""
    seen, open_ = set[Ref](), [] if ref is None else [ref]
    while open_:
        ref = open_.pop()
        step = makers.get(ref)
        if isinstance(step, Reshard):
            yield from (
                line_name((), step.result, i) for i in range(len(step.path) - 1)
            )
        elif step is not None and ref not in seen:
            seen.add(ref)
            open_ += reads(step)


def _copies(body: BodyPlan) -> Iterator[tuple[Transfer, int, int]]:
    """The copies of a plan, of whole values or of parts: how many parts, and along
    which dimension; -1 where that is the one that a scan goes through."""
    for step in body.host.steps if body.host is not None else ():
        if isinstance(step, Transfer):
            yield step, 1, 0
        elif isinstance(step, BlockLoop):
            for inner in step.steps:
                if isinstance(inner, Transfer):
                    yield inner, step.blocks, step.dim
        elif isinstance(step, Apply):
            times = step.times or 1
            each = [(inner, times) for inner in step.bodies]
            each += [(ahead.part, times + ahead.lead) for ahead in step.ahead]
            for inner, runs in each:
                yield from ((copy, runs, -1) for copy, _, _ in _copies(inner))


def _described(
    step: Transfer, blocks: int, dim: int, autos: Mapping[str, tuple], axes: Axes
) -> HostTransfer:
    auto = next((autos[name] for name in step.leaf if name in autos), ())
    local = part_shape(local_shape(step.shape, step.sharding, axes), auto)
    slices = blocks if dim < 0 else 1
    return HostTransfer(
        memory=step.memory,
        phase=step.during.phase,
        shape=step.shape if dim >= 0 else (blocks, *step.shape),
        dtype=step.dtype,
        bytes=math.prod(local) * step.itemsize * slices,
        blocks=blocks,
        dim=dim,
        path=names_text(step.leaf),
    )


def host_leaves(
    state: Sequence[Leaf],
    stored: Sequence[Sharding],
    axes: Axes,
    returns: Sequence[bool] = (),
) -> tuple[LeafOnHost, ...]:
    """The leaves of a state that live in the host's memory; all come back if `returns`
    does not say."""
    return tuple(
        LeafOnHost(
            leaf_name(leaf.path),
            str(leaf.aval.dtype),
            part_shape(local_shape(leaf.aval.shape, sharding, axes), leaf.auto or ()),
            comes_back,
        )
        for leaf, sharding, comes_back in zip(
            state, stored, returns or [True] * len(state), strict=False
        )
        if leaf.memory == HOST
    )


def copied(transfers: Sequence[HostTransfer], memory: str) -> int:
    """Bytes that each device copies to a memory per step."""
    return sum(t.bytes for t in transfers if t.memory == memory)


def host_table(transfers: Sequence[HostTransfer]) -> str:
    """The copies as text: a row for each, then totals; "" if there are none."""
    if not transfers:
        return ""
    header = ["phase", "copy to", "shape", "dtype", "in", "bytes", "for"]
    rows = [
        [
            t.phase,
            t.memory,
            shape_text(t.shape),
            t.dtype,
            t.parts,
            size_text(t.bytes),
            t.path,
        ]
        for t in transfers
    ]
    sizes = [size_text(copied(transfers, memory)) for memory in (DEVICE, HOST)]
    total = f"each device copies {sizes[0]} from its host and {sizes[1]} to it per step"
    return "\n".join([join_columns(header, rows, {5}), "", total])
