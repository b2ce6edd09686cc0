"""What quantizing took from the sums of gradients, added to those of the next step.

In: gradients as a step has them, and residuals in its state. Out: the gradients and the
new residuals. On one device nothing is quantized: a residual is zeros and stays so; a
sharded step leaves in it what rounding takes from the term of each device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import GetAttrKey

from shardfn._core.argument_values import COUNT, MESH, NUMERIC, TEXT, check_arguments
from shardfn._core.errors import ShardingError, called
from shardfn._core.leaves import path_name
from shardfn._core.limits import QUANTIZED_ELEMENTS

feed_back_p = Primitive("feed_back")
feed_back_p.multiple_results = True


class TermsKey(GetAttrKey):
    """Where the terms of a residual stand in a tree path.

    Attributes:
      axis: the mesh axis over which they are summed.
    """

    def __init__(self, axis: str) -> None:
        super().__init__("terms")
        self.axis = axis


@dataclass(frozen=True)
class Residual:
    """What the quantized sum of one gradient is off: a pytree node of one leaf.

    Attributes:
      terms: float32, a row of the parameter's shape for each device along the axis:
        what rounding took from its term. Their sum is what the step's sum lacks.
      axis: the mesh axis over which terms are summed.
    """

    terms: jax.Array
    axis: str


jax.tree_util.register_pytree_with_keys(
    Residual,
    lambda r: (((TermsKey(r.axis), r.terms),), r.axis),
    lambda axis, children: Residual(next(iter(children)), axis),
)


def axis_of_terms(path: Sequence[Any]) -> str | None:
    """The mesh axis over which a leaf's rows are summed; None if it is no residual."""
    key = path[-1] if path else None
    return key.axis if isinstance(key, TermsKey) else None


def zero_residuals(
    params: Any, mesh: Mesh | AbstractMesh, axis: str, *, min_size: int | None = None
) -> Any:
    """The residuals with which training begins, a part of the state.

    Args:
      params: the parameters, or `ShapeDtypeStruct`s inside of `jax.eval_shape`.
      mesh: the mesh that the step is sharded over.
      axis: the mesh axis over which `reduce_dtype` quantizes the sums of gradients.
      min_size: leaves with fewer elements get none; by default those that
        `reduce_dtype` quantizes only where it names them.

    Returns:
      A pytree like `params`, a `Residual` for each float and None for other leaves.

    Raises:
      ShardingError: the mesh has no such axis.

    Example:
      >>> import jax, jax.numpy as jnp, shardfn
      >>> mesh = jax.make_mesh((2, 4), ("dcn", "data"))
      >>> residuals = shardfn.zero_residuals({"w": jnp.ones((256, 512))}, mesh, "dcn")
      >>> residuals["w"].terms.shape
      (2, 256, 512)
    """
    check_arguments(
        "zero_residuals",
        mesh=(mesh, MESH),
        axis=(axis, TEXT),
        min_size=(min_size, COUNT.or_none()),
    )
    least = QUANTIZED_ELEMENTS if min_size is None else min_size
    if axis not in mesh.shape:
        raise ShardingError(
            f"zero_residuals was given mesh axis {axis!r}, and the mesh has "
            f"{tuple(mesh.shape)}.\n{called()}"
            "Pass the axis over which reduce_dtype quantizes."
        )

    def zeros(x: Any) -> Residual | None:
        check_arguments("zero_residuals", params=(x, NUMERIC))
        shape = jnp.shape(x)
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        if not is_float or math.prod(shape) < least:
            return None
        return Residual(jnp.zeros((dict(mesh.shape)[axis], *shape), jnp.float32), axis)

    return jax.tree.map(zeros, params)


def error_feedback(grads: Any, residuals: Any) -> tuple[Any, Any]:
    """Adds to gradients what quantizing took from those of the last step.

    Call it where the step has its gradients, before anything is computed of them, also
    before they are clipped. On one device, and where the sums are exact, it changes
    nothing. Where `reduce_dtype` quantizes the sum over the residual's mesh axis, each
    device adds its row of the residual to its term, and leaves there what rounding
    takes; so errors do not add up over steps.

    Args:
      grads: the gradients.
      residuals: a pytree like them of what `zero_residuals` made, or of what the last
        step returned; None for gradients that have none.

    Returns:
      The gradients, in their own dtypes, and the new residuals.

    Raises:
      ShardingError: the residuals are not those of these gradients.

    Example:
      >>> import jax, jax.numpy as jnp, shardfn
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> grads = {"w": jnp.ones((2, 3))}
      >>> residuals = shardfn.zero_residuals(grads, mesh, "data", min_size=0)
      >>> grads, residuals = shardfn.error_feedback(grads, residuals)
      >>> grads["w"].shape
      (2, 3)

    References:
      Seide et al., 1-bit SGD (Interspeech 2014); Karimireddy et al., Error feedback
      fixes SignSGD (arXiv:1901.09847).
    """
    flat, treedef = jax.tree.flatten_with_path(grads)
    try:
        rows = treedef.flatten_up_to(residuals)
    except (ValueError, TypeError, KeyError) as error:
        _refuse(f"whose structure is another: {str(error).splitlines()[0]}")
    fed = list(_fed(flat, rows))
    grads, residuals = ([each[i] for each in fed] for i in (0, 1))
    return treedef.unflatten(grads), treedef.unflatten(residuals)


def _fed(
    flat: Sequence[tuple[Any, Any]], rows: Sequence[Any]
) -> Iterator[tuple[Any, Residual | None]]:
    for (path, grad), row in zip(flat, rows, strict=True):
        if row is None:
            yield grad, None
            continue
        if not isinstance(row, Residual):
            _refuse(f"where '{path_name(path)}' has a {type(row).__name__}")
        if row.terms.shape[1:] != jnp.shape(grad):
            _refuse(
                f"where '{path_name(path)}' has the shape {row.terms.shape[1:]} and "
                f"its gradient {jnp.shape(grad)}"
            )
        dtype = jnp.result_type(grad)
        wide = jnp.asarray(grad, row.terms.dtype)
        made, terms = feed_back_p.bind(wide, row.terms, over=row.axis)
        yield made.astype(dtype), Residual(terms, row.axis)


def _refuse(why: str) -> NoReturn:
    raise ShardingError(
        f"error_feedback was given residuals of other gradients, {why}.\n{called()}"
        "Pass what shardfn.zero_residuals makes of the parameters, or what the last "
        "step returned."
    )


def _run(grad: jax.Array, terms: jax.Array, *, over: str) -> list[jax.Array]:
    return [grad + terms.sum(axis=0), jnp.zeros_like(terms)]


def _abstract(grad: Any, terms: Any, *, over: str) -> list[Any]:
    return [grad.update(weak_type=False), terms.update(weak_type=False)]


def _refuse_batches(*_: Any, **__: Any) -> NoReturn:
    raise ShardingError(
        "error_feedback is called under jax.vmap, or in a step that is written per "
        f"device, where each gradient is one device's.\n{called()}"
        "Call it outside of jax.vmap, and write the step for all rows, without "
        "lax.pmean of gradients: fully_shard makes their sums."
    )


feed_back_p.def_impl(jax.jit(_run, static_argnames="over"))
feed_back_p.def_abstract_eval(_abstract)
mlir.register_lowering(feed_back_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[feed_back_p] = _refuse_batches
