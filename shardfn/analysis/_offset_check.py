"""Whether loops of a compiled program read and write their own parts of stacks.

In: the program's text. Out: what they do otherwise, a line for each part; nothing if
all is right, or the compiler leaves it to the indices.
"""

from shardfn.analysis._hlo.offsets import Offset, offsets


def check_offsets(text: str) -> tuple[str, ...]:
    """What a program reads or writes elsewhere than its indices say.

    Args:
      text: the program.

    Returns:
      A line for each part of a stack, of the first iteration in which it is so.
    """
    wrong: dict[str, Offset] = {}
    for offset in offsets(text):
        if offset.said != offset.true:
            wrong.setdefault(offset.instruction, offset)
    return tuple(map(_line, wrong.values()))


def _line(offset: Offset) -> str:
    does = "written" if offset.writes else "read"
    name = offset.op_name or offset.instruction
    return (
        f"misplaced: in iteration {offset.iteration} a part of a stack is {does} at "
        f"byte {offset.said}, where its indices say {offset.true}, at {name}; "
        "compile with xla_disable_hlo_passes=dynamic-slice-annotator"
    )
