"""What identifies a traced step: a hash of its program and the arrays it captures.

In: a program. Out: a hash that two traces share iff they are the same program on equal
constants, in every process. Of the step as it was traced: one of what depends neither
on the batch's size nor on the devices.
"""

import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from shardfn._core import compat
from shardfn._core.equation_key import literal_key
from shardfn._core.errors import where
from shardfn._core.program import Program
from shardfn._core.shown_limits import SHOWN_ARRAY_BYTES


def fingerprint_of(program: Program) -> str:
    """The hash of a program and of the bodies in it."""
    hashing = _Hashing()
    hashing.program(program)
    return hashing.digest.hexdigest()


def operations_hash(jaxpr: Any) -> str:
    """The hash of a step's operations, as the step is traced, without their sizes.
    Batches of other sizes are the same program, and so are other devices, for which a
    plan may rewrite it otherwise."""
    names = repr(list(_operations(jaxpr)))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def _operations(jaxpr: Any, in_kernel: bool = False) -> Iterator[str]:
    """Names, in order; of a kernel, whose values are in references, as it is."""
    for eqn in jaxpr.eqns:
        inlined = None if in_kernel else compat.inlined_body(eqn)
        if inlined is not None:  # such as a call of a jitted function
            yield from _operations(compat.open_jaxpr(inlined)[0])
            continue
        yield eqn.primitive.name
        for body in jaxprs_in_params(eqn.params):
            is_kernel = in_kernel or compat.takes_refs(body)
            yield from ("(", *_operations(body, is_kernel), ")")


def listing_of(program: Program) -> Iterator[str]:
    """A line for each captured array and each equation, in which programs of another
    hash differ; arrays of a few elements and literals are shown."""
    for _, constant in program.constants:
        kind = getattr(constant, "dtype", type(constant).__name__)
        values = _value(constant)
        shown = np.asarray(constant) if len(values) <= SHOWN_ARRAY_BYTES else ""
        text = f"captured {kind}{list(np.shape(constant))} {shown}"
        yield f"{' '.join(text.split())} #{zlib.crc32(values):08x}"
    for node in program.nodes:
        literals = [atom.val for atom in node.inputs if not isinstance(atom, int)]
        made = ", ".join(str(v.aval) for v in node.eqn.outvars)
        shown = f" of {', '.join(map(str, literals))}" if literals else ""
        does = zlib.crc32(_text(node.eqn_key).encode())
        name = f"{node.eqn.primitive.name}{shown} -> {made}"
        yield f"{where(node.eqn)}: {name} #{does:08x}"
        for body in node.bodies:
            yield from listing_of(body)


@dataclass(slots=True)
class _Hashing:
    """A hash while it is made, and that of what each equation does: many look alike."""

    digest: Any = field(default_factory=hashlib.sha256)
    known: dict[int, str] = field(default_factory=dict)

    def program(self, program: Program) -> None:
        self.add(*program.inputs)
        for value, constant in program.constants:
            self.add(value)
            self.digest.update(_value(constant))
        for node in program.nodes:
            operands = (a if isinstance(a, int) else None for a in node.inputs)
            self.add(self.eqn_key(node.eqn_key), *operands, *node.outputs)
            for body in node.bodies:
                self.program(body)
        for atom in program.outputs:
            self.add(atom if isinstance(atom, int) else _text(literal_key(atom)))

    def add(self, *values: Any) -> None:
        self.digest.update(repr(values).encode())

    def eqn_key(self, eqn_key: tuple[Any, ...]) -> str:
        if id(eqn_key) not in self.known:
            self.known[id(eqn_key)] = _text(eqn_key)
        return self.known[id(eqn_key)]


def _text(eqn_key: Any) -> str:
    """`eqn_key` in words that are the same in every process."""
    return re.sub(r"0x[0-9a-f]+|<function [^>]*>", "", repr(eqn_key))


def _value(constant: Any) -> bytes:
    """The value of a captured array; nothing for what is none, or has no value yet."""
    if not hasattr(constant, "dtype") or compat.is_traced(constant):
        return b""
    if compat.is_key(constant.dtype):
        with jax.ensure_compile_time_eval():
            constant = jax.random.key_data(constant)
    return np.asarray(constant).tobytes()
