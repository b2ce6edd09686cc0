"""Which sums are over the split factor of a stationary leaf.

In: a program and its plan. Out: the leaves of each value that is made of such terms: an
activation behind a weight that is split along what it contracts.
"""

from shardfn._core.leaves import Names
from shardfn._core.plan import Apply, BodyPlan
from shardfn._core.program import Program
from shardfn._core.sharding import Sharding, Split, is_unreduced


def summed_leaves(program: Program, body: BodyPlan) -> dict[int, Names]:
    """The names of the stationary leaves of which values are terms of sums.

    Args:
      program: a program.
      body: its plan; plans inside it are left alone.

    Returns:
      The names by value; none of a value that is no such term.
    """
    found: dict[int, Names] = {}
    for step in body.steps:
        if not isinstance(step, Apply) or not any(
            map(is_unreduced, step.result_shardings)
        ):
            continue
        node = program.nodes[step.node]
        names: list[str] = []
        for atom, sharding in zip(node.inputs, step.operand_shardings, strict=True):
            if not isinstance(atom, int):
                continue
            if is_unreduced(sharding):
                names += found.get(atom, ())
            elif _stays(sharding):
                names += program.leaf(atom)
        results = zip(node.outputs, step.result_shardings, strict=True)
        for value, sharding in results if names else ():
            if is_unreduced(sharding):
                found[value] = tuple(dict.fromkeys(names))
    return found


def _stays(sharding: Sharding) -> bool:
    return any(isinstance(s, Split) and s.stationary for s in sharding)
