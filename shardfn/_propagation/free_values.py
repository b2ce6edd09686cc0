"""Values that can be made anywhere: noise of a key, masks, one-hots of counts.

In: a program. Out: the values in it that are made of scalars and constants alone.
"""

from shardfn._core.program import Program
from shardfn._core.sizes import elements


def free_values(program: Program) -> frozenset[int]:
    """The values that are made of scalars and constants alone, such as noise of a key,
    and that are none themselves."""
    free: set[int] = set()
    for node in program.nodes:
        given = {a for a in node.inputs if isinstance(a, int)} - free
        if node.kind != "op" or node.eqn.effects:
            continue
        if all(elements(program.avals[value]) == 1 for value in given):
            many = (v for v in node.outputs if elements(program.avals[v]) > 1)
            free.update(many)
    return frozenset(free)
