"""Held-out loss: a state and batches in, nats and perplexity out."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Heldout:
    """The loss on held-out text, summed over its tokens, in nats."""

    nats: float
    tokens: int
    bytes: int

    @property
    def per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / self.bytes

    @property
    def perplexity(self) -> float:
        """Of a token: the number of equally likely choices with the same loss."""
        return math.exp(min(self.nats / self.tokens, 700.0))


def evaluate(
    eval_step: Callable, state: Any, batches: Iterable[Any], size: int
) -> Heldout:
    """Returns the loss over all batches; `size` is the bytes of their text."""
    nats = tokens = 0.0
    for batch in batches:
        metrics = eval_step(state, batch)
        nats += float(metrics["total"])
        tokens += float(metrics["count"])
    return Heldout(nats, int(tokens), size)
