"""Kernels that are partitioned as functions written in JAX are.

In: a kernel, such as a `pallas_call` or an FFI call, and a reference in JAX. Out: a
function that runs the kernel, on the blocks that the reference's operations could run
on.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from shardfn._core import compat
from shardfn._core.errors import call_site
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.rule_registry import register_rule
from shardfn.rules._composed import composed_rule

partition_like_p = Primitive("partition_like")
partition_like_p.multiple_results = True


def partition_like(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    gradient: Literal["reference", "kernel"] = "reference",
) -> Callable[..., Any]:
    """Lets a kernel be partitioned as its reference in plain JAX is.

    Every dimension that all operations of the reference let be split is one that the
    kernel is split along: each device then calls the kernel on blocks, with their
    shapes. Sums over a dimension are made of devices' terms if what follows them is
    linear. Nothing else of the reference is run, but for its gradient. That the kernel
    computes what the reference does, on blocks too, is trusted: compare them.

    Rows of ragged groups are split, too: where the reference gives an argument to
    `jax.lax.ragged_dot` as the sizes of groups, and does nothing else with it, the
    kernel is given the sizes that the groups have in the device's rows.

    A dimension stays whole along which the reference softmaxes, sorts, counts (as
    `iota` does) or loops, or on whose size a number in it depends, as in a mean.

    Args:
      kernel: a function of arrays, positional, that returns arrays. It is traced once
        per shape, of blocks too, so its grid has to follow from its arguments' shapes.
      reference: a function of the same arguments with results of the same shapes and
        dtypes.
      gradient: "reference" differentiates the reference, at the kernel's arguments;
        "kernel" the kernel, which has a derivative of its own (`jax.custom_vjp`),
        partitioned as the reference's is. Either runs its forward pass a second time.

    Returns:
      A function with the arguments and results of `kernel`. It has reverse derivatives,
      and can be mapped by `jax.vmap`.

    Raises:
      ValueError: when called: the results of the two differ in structure, shape or
        dtype.

    Example:
      >>> import jax, jax.numpy as jnp, shardfn
      >>> def kernel(x, scale):  # such as a pallas_call
      ...     return x / jnp.sqrt((x * x).sum(-1, keepdims=True)) * scale
      >>> normalize = shardfn.rules.partition_like(kernel, kernel)
      >>> step = shardfn.fully_shard(
      ...     lambda scale, x: (scale, normalize(x, scale)),
      ...     jax.make_mesh((8,), ("data",)),
      ... )
      >>> step.plan(jnp.ones(4), jnp.ones((16, 4))).collectives
      ()

    References:
      https://github.com/jax-ml/jax/issues/19748, which asks for this of JAX.
    """
    place = call_site()

    @jax.custom_vjp
    def run(*args: Any) -> Any:
        return _call(kernel, reference, args, place)

    def forward(*args: Any) -> Any:
        return run(*args), args

    def backward(args: tuple[Any, ...], cotangents: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]

        def pulled_back(fn: Callable[..., Any]) -> Callable[..., Any]:
            def gradients(args: tuple[Any, ...], cotangents: Any) -> Any:
                found = jax.tree.leaves(jax.vjp(fn, *args)[1](cotangents))
                return [
                    g for g, is_float in zip(found, floats, strict=True) if is_float
                ]

            return gradients

        if gradient == "reference":
            found = pulled_back(reference)(args, cotangents)
        else:
            own, plain = pulled_back(kernel), pulled_back(reference)
            found = _call(own, plain, (args, cotangents), place)
        rest = iter(found)
        return jax.tree.unflatten(
            tree,
            [
                next(rest) if is_float else np.zeros(x.shape, jax.dtypes.float0)
                for x, is_float in zip(leaves, floats, strict=True)
            ],
        )

    run.defvjp(forward, backward)
    return run


def _call(
    kernel: Callable[..., Any], reference: Callable[..., Any], args: Any, place: str
) -> Any:
    """Binds the primitive to the leaves of the arguments."""
    leaves, tree = jax.tree.flatten(args)
    results = [jax.eval_shape(fn, *args) for fn in (kernel, reference)]
    made, expected = map(_types, results)
    if made != expected:
        raise ValueError(
            f"partition_like got a kernel that returns {made}, and a reference that "
            f"returns {expected}.\n  partition_like was called at {place}\n"
            "Both return arrays of the same structure, shapes and dtypes: cast or "
            "reshape in one of them."
        )

    def flat(fn: Callable[..., Any]) -> Callable[..., Any]:
        def on_leaves(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))

        return on_leaves

    out = partition_like_p.bind(*leaves, kernel=flat(kernel), reference=flat(reference))
    return jax.tree.unflatten(jax.tree.structure(results[0]), out)


def _types(results: Any) -> str:
    leaves, tree = jax.tree.flatten(results)
    return str(jax.tree.unflatten(tree, [compat.type_text(x) for x in leaves]))


def _traced(fn: Callable[..., Any], avals: Sequence[Any], lowers: bool = False) -> Any:
    """The jaxpr of a kernel, traced as outside of `shard_map`: what calls a kernel
    declares its results by shape and dtype alone."""
    with compat.at_top_level(lowers):
        return jax.make_jaxpr(fn)(*map(compat.abstract, avals))


def _results(*avals: Any, kernel: Callable[..., Any], reference: Any) -> Any:
    del reference
    made = _traced(kernel, avals).out_avals
    return [compat.aval_like(avals, x.shape, x.dtype) for x in made]


def _lowered(
    context: Any, *operands: Any, kernel: Callable[..., Any], reference: Any
) -> Any:
    del reference
    closed = _traced(kernel, context.avals_in, lowers=True)
    run = mlir.lower_fun(jaxpr_as_fun(closed), multiple_results=True)
    with compat.at_top_level(lowers=True):
        return run(context.replace(avals_in=closed.in_avals), *operands)


def _batched(
    args: Sequence[Any], dims: Sequence[Any], *, kernel: Any, reference: Any
) -> Any:
    """Both are mapped."""
    mapped = [jax.vmap(fn, in_axes=tuple(dims)) for fn in (kernel, reference)]
    out = partition_like_p.bind(*args, kernel=mapped[0], reference=mapped[1])
    return out, [0] * len(out)


partition_like_p.def_impl(lambda *args, kernel, reference: kernel(*args))
partition_like_p.def_abstract_eval(_results)
mlir.register_lowering(partition_like_p, _lowered)
batching.primitive_batchers[partition_like_p] = _batched


@register_rule(partition_like_p)
def _like_reference(eqn: JaxprEqn) -> OpShardingRule:
    """That of all operations of the reference at once."""
    reference = eqn.params["reference"]
    return composed_rule(
        lambda avals: _traced(reference, avals), [v.aval for v in eqn.invars]
    )
