"""Whether a step has values in the host's memory, of its own or by its plan, and what
the compiler of such a step must not do.

In: programs and plans. Out: yes or no; an option of XLA.
"""

from shardfn._core.memories import HOST, space_of
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program

NO_OFFSETS = ("xla_disable_hlo_passes", "dynamic-slice-annotator")
"""Keeps XLA for GPUs from working out ahead of time at which bytes of a stack the part
of an iteration begins, which it then copies without a kernel. For what loops wait an
iteration to write, and in JAX 0.10 for all that is read backwards, it works out others.
openxla/xla, pull request 46308."""


def has_host_values(program: Program, body: BodyPlan) -> bool:
    """Whether leaves of the state arrive in the host's memory or leave there, or the
    step's own code has values in it."""
    return bool(body.on_host or body.to_host) or copies_itself(program)


def copies_itself(program: Program) -> bool:
    """Whether the step's own code has values in the host's memory."""
    if any(getattr(a, "memory_space", None) == space_of(HOST) for a in program.avals):
        return True
    return any(copies_itself(body) for node in program.nodes for body in node.bodies)
