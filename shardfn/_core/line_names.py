"""The names that lines of a plan have in compiled programs, and in profiles.

In: where a step of a plan stands. Out: its name scope, and what a compiled operation's
metadata says of it.
"""

import re

from shardfn._core.phases import BACKWARD, FORWARD, UPDATE
from shardfn._core.plan import Place, Ref


def line_name(place: Place, result: Ref, move: int) -> str:
    """The name scope of one move of the `Reshard` in body `place` that makes `result`.

    Compilers keep it in the metadata of the collective that they make of the move, so a
    compiled program can be read back line by line, and a profile too.
    """
    return "shardfn." + ".".join(map(str, (*place, result.value, result.version, move)))


def line_names(text: str) -> frozenset[str]:
    """The names in the metadata of a compiled operation, which may stand for several
    moves."""
    return frozenset(re.findall(r"\bshardfn(?:\.\d+)+", text))


REPEATED = "repeated"
"""What rematerialization runs again."""

QUANTIZED, DEQUANTIZED = "shardfn_quantize", "shardfn_dequantize"
"""The name scopes of what writes values in fewer bits, and of what reads them."""


def phase_name(phase: str) -> str:
    """The name scope of operations in a phase, which compilers keep, too."""
    return f"shardfn_{phase}"


def phase_in(text: str) -> str:
    """The phase in the metadata of a compiled operation, of the innermost body that it
    is in; "" if there is none."""
    found = re.findall(rf"\bshardfn_({'|'.join(_PHASES)})\b", text)
    return found[-1] if found else ""


_PHASES = (FORWARD, BACKWARD, UPDATE, REPEATED)
