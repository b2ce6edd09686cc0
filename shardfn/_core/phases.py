"""In which phase of a training step each node runs: forward, backward or update.

In: a program and the phase it starts in. Out: one phase per node.
"""

from shardfn._core.program import Node, Program

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def node_phases(program: Program, start: str) -> list[str]:
    """The phase of every node: forward up to the first backward one, update after
    it."""
    seen = start != FORWARD
    phases = []
    for node in program.nodes:
        if node.backward:
            seen = True
            phases.append(BACKWARD)
        else:
            phases.append(UPDATE if seen else FORWARD)
            seen = seen or holds_backward(node)
    return phases


def last_phase(node: Node, phase: str) -> str:
    """The phase that a node which starts in `phase` ends in."""
    return BACKWARD if holds_backward(node) else phase


def holds_backward(node: Node) -> bool:
    """Whether a body of the node has a backward pass of its own."""
    return any(
        inner.backward or holds_backward(inner)
        for body in node.bodies
        for inner in body.nodes
    )


def mixes_passes(program: Program) -> bool:
    """Whether a program holds both a forward and a backward pass, as a microbatch
    does."""
    kinds = {node.backward for node in program.nodes}
    nested = any(mixes_passes(b) for node in program.nodes for b in node.bodies)
    return len(kinds) > 1 or nested
