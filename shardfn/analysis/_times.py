"""How often something runs, as far as that can be known.

In: counts of loops. Out: `Times`, which multiply and add up.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """How often something runs.

    Attributes:
      count: in a step, or if not `known` in one iteration of each while loop that it is
        in.
      known: whether it is in none of which nobody knows the iterations.
    """

    count: int = 1
    known: bool = True

    @property
    def per_step(self) -> int | None:
        """How often in a step; None if that cannot be known."""
        return self.count if self.known else None

    def each(self, inner: int | None) -> "Times":
        """Of what runs `inner` times each time; None if nobody knows how often."""
        return Times(
            self.count * (1 if inner is None else inner),
            self.known and inner is not None,
        )

    def __mul__(self, other: "Times") -> "Times":
        return Times(self.count * other.count, self.known and other.known)

    def __add__(self, other: "Times") -> "Times":
        return Times(self.count + other.count, self.known and other.known)
