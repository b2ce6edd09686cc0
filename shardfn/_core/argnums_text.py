"""What messages say of the positions of state arguments.

In: positions, and names of arguments that have none. Out: the `state_argnums` to pass,
and how each argument gets a position that it can name.
"""

from collections.abc import Sequence

from shardfn._core.call_arguments import Position
from shardfn._core.errors import listed


def argnums_text(positions: Sequence[Position]) -> str:
    """What to pass if these arguments are state; `positions_advice` goes with it."""
    each = [f"position of '{p}'" if isinstance(p, str) else str(p) for p in positions]
    several = f"({', '.join(each)})"
    return f"state_argnums={each[0] if len(each) == 1 else several}"


def positions_advice(positions: Sequence[Position]) -> str:
    """A sentence on those that have no position; "" if all have."""
    names = [p for p in positions if isinstance(p, str)]
    if not names:
        return ""
    return (
        f" No position yet: {listed(names, len(names))}, passed by name. Let the step "
        "take each in front of any *, and of arguments that calls leave out."
    )


def read_only_advice(position: Position) -> str:
    """What to do with an argument that is taken for a batch, if it is parameters."""
    return (
        "If it is parameters that are only read, name it in state_argnums=, too"
        + f".{positions_advice([position])}".removesuffix(".")
    )
