"""FLOPs of matrix products and convolutions.

In: a traced step. Out: what one device computes of it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import jaxprs_in_params

from shardfn._core import compat
from shardfn._core.equation_flops import flops_of


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one step on one device, by the dtype of the operands.

    Attributes:
      run: all that run.
      model: without those that rematerialization repeats.
      exact: whether no while loop, counted once, holds any of them.
    """

    run: Counter[str] = field(default_factory=Counter)
    model: Counter[str] = field(default_factory=Counter)
    exact: bool = True

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.run + other.run,
            self.model + other.model,
            self.exact and other.exact,
        )

    def times(self, count: int, exact: bool = True) -> "Flops":
        """All of them `count` times."""
        return Flops(
            Counter({k: n * count for k, n in self.run.items()}),
            Counter({k: n * count for k, n in self.model.items()}),
            self.exact and (exact or not self.run),
        )


def count_flops(jaxpr: Any, repeated: bool = False) -> Flops:
    """Counts two FLOPs per multiply-add of every matrix product and convolution.

    Args:
      jaxpr: the step as each device runs it: shapes inside `shard_map` are local.
      repeated: whether all of it repeats what has been computed before.

    Returns:
      The FLOPs. Of a conditional the branch with the most counts.
    """
    total = Flops()
    for eqn in jaxpr.eqns:
        is_repeated = repeated or compat.is_repeated(eqn)
        own = flops_of(eqn)
        if own:
            total += Flops(own, Counter() if is_repeated else own)
            continue
        inner = [
            count_flops(getattr(j, "jaxpr", j), is_repeated)
            for j in jaxprs_in_params(eqn.params)
        ]
        name = eqn.primitive.name
        if name == "cond":
            inner = [max(inner, key=lambda f: sum(f.run.values()), default=Flops())]
        for each in inner:
            length = eqn.params["length"] if name == "scan" else 1
            total += each.times(length, exact=name != "while")
    return total
