"""The literals of one program as arrays, made and cast once each.

In: the atoms that a node reads. Out: arrays for its literals, of a type that varies
along the mesh axes that its other operands vary along, as primitives demand. Many nodes
read the same few literals, and every cast is an equation to trace and to lower.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn._core import compat
from shardfn._core.program import Atom
from shardfn._lowering.move_lowerings import varying

_Key = tuple[str, bytes, tuple[str, ...]]
"""A literal's type and bits, and the mesh axes along which it varies."""


@dataclass(frozen=True, slots=True)
class Literals:
    """Those that were read so far."""

    made: dict[_Key, jax.Array] = field(default_factory=dict)

    def array(self, literal: Any) -> jax.Array:
        """A literal as an array, the same on all devices."""
        key = _key_of(literal)
        if key not in self.made:
            value = jnp.asarray(np.asarray(literal.val), literal.aval.dtype)
            self.made[key] = compat.with_weak_type(value, literal.aval.weak_type)
        return self.made[key]

    def alike(
        self, atoms: Sequence[Atom], operands: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """The operands of a node that reads `atoms`, its literals cast. One that waits
        for something is no longer what `array` made, and is left to the primitive."""
        pairs = enumerate(zip(atoms, operands, strict=True))
        literals = [
            i for i, (a, x) in pairs if not isinstance(a, int) and x is self.array(a)
        ]
        if not literals:
            return operands
        names = tuple(sorted(frozenset().union(*map(compat.varying_axes, operands))))
        out = list(operands)
        for i in literals if names else ():
            key = _key_of(atoms[i], names)
            if key not in self.made:
                self.made[key] = varying(operands[i], *names)
            out[i] = self.made[key]
        return out


def _key_of(literal: Any, names: tuple[str, ...] = ()) -> _Key:
    return str(literal.aval), np.asarray(literal.val).tobytes(), names
