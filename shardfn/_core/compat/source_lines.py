"""Where equations come from.

In: an equation. Out: the user's line, and the transforms that it went through.
"""

import os
from pathlib import Path
from typing import Any

from jax._src import source_info_util as _source_info
from jax.extend import source_info_util as _public_source_info
from jax.extend.core import JaxprEqn

PACKAGE = str(Path(__file__).parents[2]) + os.sep
"""The folder that this package is in, with a separator behind it."""

# Frames of this package are not the user's.
_public_source_info.register_exclusion(PACKAGE)


def summarize(eqn: JaxprEqn) -> str:
    """`file:line:column (function)` of the user's code that made an equation."""
    return _public_source_info.summarize(eqn.source_info)


FORWARD, BACKWARD = "forward", "backward"


def derivatives(eqn: JaxprEqn) -> tuple[str, ...]:
    """Of the gradients that an equation was made for, from the outside, whether it is
    in their forward or backward pass.

    JAX notes transforms and the user's name scopes in frames of different types. The
    transpose of an equation has the frame of its `jvp`, too. `jax.jvp` alone is noted
    as the forward pass of a gradient is.
    """
    frames = eqn.source_info.name_stack.stack
    names = [f.name for f in frames if isinstance(f, _source_info.Transform)]
    made_by = [name for name in names if name in ("jvp", "transpose")]
    out: list[str] = []
    for before, name in zip(["", *made_by], made_by, strict=False):
        if name == "transpose":
            out.append(BACKWARD)
        elif before != "transpose":
            out.append(FORWARD)
    return tuple(out)


def is_repeated(eqn: JaxprEqn) -> bool:
    """Whether rematerialization repeats an equation that the forward pass has run."""
    frames = eqn.source_info.name_stack.stack
    return _source_info.Scope("rematted_computation") in frames


def as_user_code(eqn: JaxprEqn) -> Any:
    """A context in which bound primitives keep `eqn`'s source line and name scopes."""
    stack = _public_source_info.current_name_stack() + eqn.source_info.name_stack
    return _public_source_info.user_context(eqn.source_info.traceback, name_stack=stack)
