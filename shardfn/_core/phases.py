"""The passes of a training step: forward, backward and update of each gradient.

In: nothing. Out: `Pass`, which nodes, moves and lines of a plan carry;
`_trace.mark_passes` says which node runs in which.
"""

from dataclasses import dataclass

from shardfn._core.compat import BACKWARD, FORWARD

UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a step.

    Attributes:
      phase: forward or backward, of the outermost gradient that it is part of; update
        is what is done with gradients.
      gradient: which gradient of the step, counted in the order of the trace.
      inner: whether it is the forward or the backward pass of gradients inside that
        one, as a penalty on a gradient or an inner step of MAML has; forward ones at
        the end are left out.
    """

    phase: str = FORWARD
    gradient: int = 0
    inner: tuple[str, ...] = ()

    @property
    def is_backward(self) -> bool:
        """Whether it is the backward pass of some gradient."""
        return self.phase == BACKWARD or BACKWARD in self.inner

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward pass, and no backward pass inside one."""
        return self.phase == FORWARD and not self.is_backward


__all__ = ["BACKWARD", "FORWARD", "UPDATE", "Pass"]
