"""Primitives of JAX by name, and the collectives of its types.

In: names. Out: the primitives of this JAX that have them.
"""

import functools
import importlib

import jax
from jax._src.cudnn import fused_attention_stablehlo as _fused_attention
from jax.extend import random as _extend_random
from jax.extend.core import JaxprEqn, Primitive, primitives as _primitives

scan_p = _primitives.scan_p
while_p = _primitives.while_p
cond_p = _primitives.cond_p
remat_p = _primitives.remat_p


UNREDUCED_COLLECTIVES = (
    *("unreduced_psum", "unreduced_pmax", "unreduced_pmin", "preduced"),
    *("unreduced_reduce_scatter", "all_gather_reduced"),
    *("vary_unreduced_cast", "vary_unreduced_cast_p"),
)
"""Collectives of arrays whose types say that their sums over devices are not taken."""


def primitive(name: str) -> Primitive | None:
    """The JAX primitive called `name`, or None where this JAX version has none."""
    from jax import lax

    return getattr(lax, f"{name}_p", None)


@functools.cache
def _primitives_by_name() -> dict[str, Primitive]:
    """Every primitive that JAX exports, and the private ones that user code binds."""
    modules = [jax.lax, jax.lax.linalg, _primitives, _extend_random]
    for name in ("lax.lax", "lax.linalg", "random.prng", "random.core", "dispatch"):
        modules.append(importlib.import_module(f"jax._src.{name}"))
    for name in ("pjit", "lax.control_flow.conditionals", "ad_util"):
        modules.append(importlib.import_module(f"jax._src.{name}"))
    modules.append(_fused_attention)
    found = (v for m in modules for v in vars(m).values() if isinstance(v, Primitive))
    return {p.name: p for p in found}


def primitives(*names: str) -> tuple[Primitive, ...]:
    """The primitives of these names; names that this JAX does not have are left out."""
    known = _primitives_by_name()
    return tuple(known[name] for name in names if name in known)


ADDITIONS = primitives("add", "add_any")
"""An addition that a program makes, and one that taking its gradient makes."""


def attention_heads_first(eqn: JaxprEqn) -> bool:
    """Whether queries of cuDNN's attention have their heads in front of positions."""
    return eqn.params["layout"] == _fused_attention.AttentionLayout.BNTH.value


def attention_is_causal(eqn: JaxprEqn) -> bool:
    """Whether a position of cuDNN's attention attends to those before it alone."""
    masks = _fused_attention.MaskType
    return eqn.params["mask_type"] in (masks.CAUSAL, masks.PADDING_CAUSAL)


def beta_types_vary() -> bool:
    """Whether `lax.betainc` runs on values that vary over a manual mesh axis."""
    return jax.__version_info__ >= (0, 12)
