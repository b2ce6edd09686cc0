"""Whether loops of a compiled program read and write their own parts of stacks.

In: the program's text. Out: what they do otherwise, a line for each part; nothing if
all is right, or the compiler leaves it to the indices.
"""

from shardfn._core.host_values import NO_OFFSETS
from shardfn.analysis._hlo.offsets import Offset, offsets


def check_offsets(text: str) -> tuple[str, ...]:
    """What a program reads or writes elsewhere than its indices say.

    Args:
      text: the program.

    Returns:
      A line for each part of a stack, of the first iteration in which it is so. Parts
      whose indices the text does not tell are left out.
    """
    wrong: dict[str, Offset] = {}
    try:
        found = offsets(text)
    except RecursionError:  # a program of thousands of scalar operations in a row
        return ()
    for offset in found:
        if offset.wrong:
            wrong.setdefault(offset.instruction, offset)
    return tuple(map(_line, wrong.values()))


def _line(offset: Offset) -> str:
    does = "written" if offset.writes else "read"
    name = offset.op_name or offset.instruction
    return (
        f"misplaced: in iteration {offset.iteration} a part of a stack is {does} at "
        f"byte {offset.said}, where its indices say {offset.true}, at {name}; "
        f"compile with {'='.join(NO_OFFSETS)}"
    )
