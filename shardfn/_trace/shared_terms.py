"""Terms of a sum over devices that are the same on all of them.

In: the equations of a program in order. Out: for a sum over dimensions that `jax.vmap`
has added, of terms some of which are broadcast along these, as the gradient of an L2
penalty stands next to that of the loss: the sum of the others, plus these once, times
the number of devices. What is stored in shards is then not gathered to be added.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.program import Atom


@dataclass(slots=True)
class SharedTerms:
    """What is known of the values of one program.

    `added` holds the two operands of each sum, `spread` what was broadcast to make a
    value, and along which dimensions.
    """

    added: dict[int, tuple[int, int]] = field(default_factory=dict)
    spread: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)

    def equation(
        self, eqn: JaxprEqn, operands: Sequence[Atom], results: Sequence[Atom]
    ) -> None:
        """Notes the value that an equation makes."""
        if len(results) != 1 or not isinstance(results[0], int):
            return
        known = [atom for atom in operands if isinstance(atom, int)]
        if eqn.primitive in compat.ADDITIONS and len(known) == 2:
            self.added[results[0]] = known[0], known[1]
        elif eqn.primitive.name == "broadcast_in_dim" and len(known) == 1:
            dims = tuple(eqn.params["broadcast_dimensions"])
            shape = eqn.outvars[0].aval.shape  # pyright: ignore
            inner = eqn.invars[0].aval.shape  # pyright: ignore
            if inner == tuple(shape[d] for d in dims):
                new = frozenset(range(len(shape))) - {int(d) for d in dims}
                self.spread[results[0]] = known[0], new

    def taken_out(
        self, eqn: JaxprEqn, operands: Sequence[Atom], avals: Sequence[Any]
    ) -> tuple[Any, tuple[int, ...]] | None:
        """A jaxpr that makes what the sum `eqn` makes without a sum over terms that all
        devices share, and its operands; None if it has no such terms, or no others."""
        axes = compat.summed_dimensions(eqn)
        if not axes or not isinstance(operands[0], int):
            return None
        shape = avals[operands[0]].shape
        terms = self.terms(operands[0], shape, avals)
        once = [i for i, v in enumerate(terms) if self.is_shared(v, axes, shape, avals)]
        if not once or len(once) == len(terms):
            return None
        sources = tuple(
            self.spread[v][0] if i in once and v in self.spread else v
            for i, v in enumerate(terms)
        )
        count = math.prod(shape[d] for d in axes)

        def run(*values: jax.Array) -> list[jax.Array]:
            own = [x for i, x in enumerate(values) if i not in once]
            same = [values[i] for i in once]
            factor = jnp.asarray(count, avals[sources[0]].dtype)
            return [
                sum(own[1:], own[0]).sum(tuple(axes)) + sum(same[1:], same[0]) * factor
            ]

        with compat.as_user_code(eqn):
            like = [compat.abstract(avals[v]) for v in sources]
            return jax.make_jaxpr(run)(*like), sources

    def terms(self, value: int, shape: Any, avals: Sequence[Any]) -> list[int]:
        """The values that add up to `value`, and scalars that are added to each of its
        elements. A sum that is among them more than once is taken apart once: the terms
        of `y + y` would double with each such sum."""
        found, open_, pending = list[int](), set[int](), [value]
        while pending:
            term = pending.pop()
            is_sum = term in self.added and avals[term].shape == shape
            if not is_sum or term in open_:
                found.append(term)
                continue
            open_.add(term)
            pending += reversed(self.added[term])
        return found

    def is_shared(
        self, value: int, axes: frozenset[int], shape: Any, avals: Sequence[Any]
    ) -> bool:
        """Whether a term is broadcast along the dimensions `axes`, and these alone."""
        if avals[value].shape != shape:  # a scalar
            return len(axes) == len(shape)
        return value in self.spread and self.spread[value][1] == axes
