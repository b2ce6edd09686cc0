"""Whether a compiled program has in the host's memory what its plan has there.

In: the leaves that should live there, and the program's text. Out: what is wrong, a
line for each; nothing if all is as planned.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from shardfn.analysis._copied_bytes import CopiedBytes, copied_bytes, too_early
from shardfn.analysis._hlo.collective import jax_dtype
from shardfn.analysis._hlo.host_copies import is_copy, lives_on_host
from shardfn.analysis._hlo.parse import Instruction, Module, integers, parse_module
from shardfn.analysis._text import shape_text
from shardfn.analysis.host_transfer import HostTransfer, LeafOnHost

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")

Form = tuple[str, tuple[int, ...]]


def check_host(
    planned: Sequence[LeafOnHost],
    transfers: Sequence[HostTransfer],
    copies_itself: bool,
    text: str,
) -> tuple[tuple[CopiedBytes, ...], tuple[str, ...]]:
    """What a program has of the host's memory.

    Args:
      planned: the leaves that live there.
      transfers: the plan's copies.
      copies_itself: whether the step's own code copies besides.
      text: the program.

    Returns:
      The bytes that it copies in each direction; and what it has otherwise than
      planned: leaves that it takes or leaves in another memory, operations but copies
      on what lives on the host, more copies than planned, and copies to the device that
      do not wait for their gradient.
    """
    if not planned and "S(5)" not in text:
        return (), ()
    taken, left = (_on_host(part) for part in _entry_layout(text))
    wrong: list[str] = []
    returned = [leaf for leaf in planned if leaf.returns]
    ways = ("arrives", planned, taken), ("leaves", returned, left)
    for how, asked, found in ways:
        missing = Counter((leaf.dtype, leaf.shape) for leaf in asked) - found
        for leaf in asked:
            form = leaf.dtype, leaf.shape
            if missing[form]:
                missing[form] -= 1
                wrong.append(f"{leaf}: {how} in the device's memory")
    extra = taken - Counter((leaf.dtype, leaf.shape) for leaf in planned)
    for dtype, shape in extra.elements():
        wrong.append(f"an argument arrives on the host: {dtype} {shape_text(shape)}")
    module = parse_module(text)
    wrong += [
        f"{i.opcode} {i.name} computes in the host's memory" for i in _computing(module)
    ]
    found = copied_bytes(transfers, module)
    wrong += [str(c) for c in found if c.found > c.planned and not copies_itself]
    wrong += too_early(transfers, planned, module)
    return found, tuple(wrong)


def _entry_layout(text: str) -> tuple[str, str]:
    """The types of what a program takes, and of what it returns."""
    header = text[: text.find("\n")]
    layout = header.partition("entry_computation_layout={")[2]
    taken, _, left = layout.partition(")->")
    return taken, left.partition(", allow_spmd")[0]


def _on_host(types: str) -> Counter[Form]:
    return Counter(
        (jax_dtype(dtype), tuple(integers(dims)))
        for dtype, dims, layout in _ARRAY.findall(types)
        if "S(5)" in layout
    )


def _computing(module: Module) -> Iterator[Instruction]:
    """Instructions of the schedule that compute on what lives on the host."""
    inside = {
        name
        for comp in module.computations.values()
        for instr in comp.instructions.values()
        for role, names in instr.calls.items()
        if role in ("calls", "to_apply")
        for name in names
    }
    for comp in module.computations.values():
        if comp.name in inside:
            continue
        for instr in comp.instructions.values():
            if lives_on_host(instr, comp) and not is_copy(instr, comp, module):
                yield instr
