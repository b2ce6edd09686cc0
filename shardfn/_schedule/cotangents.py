"""Which operand of a layer is its cotangent, the gradient of what the layer has made.

In: a step of a body's plan that runs a layer's backward pass. Out: the operand without
which it cannot begin. A pass lets the layer wait by letting the operand wait.
"""

from collections.abc import Mapping

from shardfn._core.plan import Apply, Ref
from shardfn._core.program import Program
from shardfn._core.sharding import Sharding, is_unreduced


def cotangent_of(
    program: Program, layer: Apply, made: Mapping[Ref, Apply]
) -> tuple[Ref, Sharding] | None:
    """An operand of a layer that the backward pass makes, and that is no term of a sum.

    Args:
      program: the program of the body.
      layer: the step that runs the layer, or a loop over layers.
      made: per version, the operation of the body that makes it.

    Returns:
      The version and its sharding; None if there is none.
    """
    for ref in layer.operands:
        if ref is None or ref not in made:
            continue
        node = program.nodes[made[ref].node]
        sharding = made[ref].result_shardings[node.outputs.index(ref.value)]
        if node.backward and not is_unreduced(sharding):
            return ref, sharding
    return None
