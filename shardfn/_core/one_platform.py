"""Values of code that only one platform runs.

In: an array, and the platform that its step is planned for. Out: the same array, and an
error where it is lowered for another platform, as `jax.export` may do.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardfn._core.errors import ShardingError

only_on_p = Primitive("only_on")


def only_on(x: jax.Array, platform: str, place: str) -> jax.Array:
    """`x`, of a branch that a platform runs alone; `place` is the user's line."""
    return only_on_p.bind(x, platform=platform, place=place)


def _lower(context: Any, x: Any, *, platform: str, place: str) -> list[Any]:
    of = context.platforms or context.module_context.platforms
    others = [name for name in of if name != platform]
    if others:
        raise ShardingError(
            f"a step that is sharded over {platform} devices is lowered for "
            f"{', '.join(others)}, where jax.lax.platform_dependent has another "
            f"branch.\n  {place}\nShard it over a mesh of devices of that platform, "
            "which need not be there: step.on(...), shardfn.analysis.targets."
        )
    return [x]


only_on_p.def_impl(lambda x, **_: x)
only_on_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(only_on_p, _lower)
ad.deflinear2(only_on_p, lambda cotangent, _, **params: [cotangent])
batching.defvectorized(only_on_p)
