"""Which moves may be one collective.

In: a move. Out: its `BucketKind`: moves of equal kinds may join.
"""

import math
from dataclasses import dataclass

from shardfn._core.control import Control
from shardfn._core.leaves import Names
from shardfn._core.limits import JOINED_BYTES
from shardfn._core.moves import AllGather, AllToAll
from shardfn._core.phases import Pass
from shardfn._core.plan import BodyPlan, Reshard
from shardfn._core.sharding import AxisSharding, Split, Unreduced
from shardfn._core.sizes import is_key_name

ASKED = "one of the moves of {} that are one collective, as bucket_bytes asks"
SMALL = (
    "one of the moves of {} around stationary leaves that are one collective: it costs "
    "more to begin than to send (limits.JOINED_BYTES)"
)


@dataclass(frozen=True, slots=True)
class BucketKind:
    """What the moves of one bucket have in common.

    Attributes:
      early: they take the place of the first: what they move is there by then.
      is_small: they are no leaves, but what meets stationary ones.
      moves: the collectives on their paths, and the mesh axes of each.
      states: of every sharding on their paths, what it is along each mesh axis.
      dtypes: on the wire, and over each mesh axis if they are quantized.
      during: the pass that they are part of.
      waits: they are tied to an activation.
      most: bytes that move together.
    """

    early: bool
    is_small: bool
    moves: tuple[tuple[str, tuple[int, ...]], ...]
    states: tuple[tuple[str, ...], ...]
    dtypes: tuple[str | None, ...]
    during: Pass
    waits: bool
    most: int

    @property
    def why(self) -> str:
        return SMALL if self.is_small else ASKED


def kind_of(
    step: Reshard, leaf: Names, control: Control, stays: bool
) -> BucketKind | None:
    """The kind of a move; None if it goes alone.

    Args:
      step: the move.
      leaf: the leaves that its value belongs to.
      control: up to how many bytes each leaf moves together with others.
      stays: whether there are stationary leaves around.

    Returns:
      The kind.
    """
    small = stays and not leaf
    most = JOINED_BYTES if small else control.of(*leaf).bucket_bytes
    if not (leaf or small) or step.auto or is_key_name(step.dtype):
        return None
    if step.residual is not None:
        return None
    moves = step.moves
    sent = [move for move in moves if move.communicates]
    joins = all(move.joins for move in sent)
    sums = all(s.op == "sum" for s in step.path[0] if isinstance(s, Unreduced))
    if not sent or not joins or not sums or bytes_of(step) > most:
        return None
    exchanges = any(isinstance(move, AllGather | AllToAll) for move in moves)
    return BucketKind(
        early=exchanges if small else step.gathers_state,
        is_small=small,
        moves=tuple((move.name, move.over) for move in moves),
        states=tuple(tuple(map(_state, sharding)) for sharding in step.path),
        dtypes=(step.dtype, *(q.dtype if q else None for q in step.written)),
        during=step.during,
        waits=step.after is not None,
        most=most,
    )


def has_stationary(body: BodyPlan) -> bool:
    """Whether leaves of a body's arguments stay where they are stored."""
    return any(
        isinstance(state, Split) and state.stationary
        for sharding in body.inputs
        for state in sharding
    )


def bytes_of(step: Reshard) -> int:
    """Bytes of the value that a move is of."""
    return math.prod(step.shape) * step.itemsize


def _state(state: AxisSharding) -> str:
    group = state.group if isinstance(state, Split) else 0
    return f"{type(state).__name__} {group}"
