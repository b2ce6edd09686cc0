"""Functions with derivatives of their own (`jax.custom_jvp`, `jax.custom_vjp`).

In: a call of one, its plan, local blocks. Out: the same call on blocks, with the user's
rule as its derivative. The rule is for whole arrays: JAX applies it to the plain call,
and what that gives is planned as any other program, when a derivative is asked for.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from shardfn._core import compat
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Node, Program, aval_of
from shardfn._core.sharding import Axes, Sharding
from shardfn._lowering.plan_jaxpr import plan_jaxpr

Emit = Callable[..., list[jax.Array]]
"""`(program, plan, args, axes, differentiated=...)` to what the plan returns."""


def run_custom(
    node: Node,
    plan: BodyPlan,
    run: Callable[..., list[jax.Array]],
    args: Sequence[jax.Array],
    axes: Axes,
    emit: Emit,
) -> Sequence[jax.Array]:
    """Calls a function with a derivative of its own, inside `shard_map`.

    Args:
      node: the call.
      plan: the plan of its body.
      run: runs the body by its plan.
      args: local blocks, sharded as `plan.inputs` says.
      axes: the mesh axes.
      emit: runs a program by its plan, for the derivative.

    Returns:
      Local blocks, sharded as `plan.output_shardings` says.
    """
    call = _Call(node, plan, axes, emit)
    if node.eqn.primitive.name == "custom_vjp_call":
        ruled: Any = jax.custom_vjp(run)
        ruled.defvjp(*call.reverse())
    else:
        ruled = jax.custom_jvp(run)
        ruled.defjvp(call.forward, symbolic_zeros=True)
    return ruled(*args)


@dataclass(frozen=True, slots=True)
class _Call:
    node: Node
    plan: BodyPlan
    axes: Axes
    emit: Emit

    @property
    def ins(self) -> list[Any]:
        return [v.aval for v in self.node.eqn.invars]

    @property
    def outs(self) -> list[Any]:
        return [v.aval for v in self.node.eqn.outvars]

    def forward(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """The rule of `jax.custom_jvp`, on blocks."""
        given = enumerate(tangents)
        moved = tuple(i for i, t in given if not isinstance(t, SymbolicZero))
        smooth, count = _inexact(self.outs), len(self.ins)

        def jvp(*args: jax.Array) -> list[jax.Array]:
            run, at = self.along(moved, args[:count])
            out, changes, rest = jax.jvp(run, at, args[count:], has_aux=True)
            return [*_merged(smooth, out, rest), *changes]

        ins, outs = self.plan.inputs, self.plan.output_shardings
        rule = self.planned(
            jvp,
            [*self.ins, *(self.ins[i] for i in moved)],
            [*ins, *(ins[i] for i in moved)],
            [*outs, *(outs[j] for j in smooth)],
        )
        made = rule(*primals, *(tangents[i] for i in moved))
        out, changes = made[: len(outs)], made[len(outs) :]
        return out, [
            changes[smooth.index(j)]
            if j in smooth
            else np.zeros(x.shape, jax.dtypes.float0)
            for j, x in enumerate(out)
        ]

    def reverse(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The two rules of `jax.custom_vjp`, on blocks."""
        moved, smooth = _inexact(self.ins), _inexact(self.outs)
        ins, outs = self.plan.inputs, self.plan.output_shardings
        count, tree = len(outs), None

        def vjp(*args: jax.Array) -> list[jax.Array]:
            nonlocal tree
            run, at = self.along(moved, args)
            out, pull_back, rest = jax.vjp(run, *at, has_aux=True)
            residuals, tree = jax.tree.flatten(pull_back)
            return [*_merged(smooth, out, rest), *residuals]

        @functools.cache
        def first() -> _Planned:
            return self.planned(vjp, self.ins, ins, outs)

        def forward(*args: jax.Array) -> Any:
            made = first()(*args)
            return made[:count], made[count:]

        def backward(residuals: Sequence[jax.Array], cotangents: Any) -> Any:
            kept = first().outputs[count:]

            def transposed(*args: jax.Array) -> list[jax.Array]:
                pull_back: Any = jax.tree.unflatten(tree, args[: len(kept)])
                return list(pull_back(list(args[len(kept) :])))

            rule = self.planned(
                transposed,
                [*(aval for aval, _ in kept), *(self.outs[j] for j in smooth)],
                [*(sharding for _, sharding in kept), *(outs[j] for j in smooth)],
                [ins[i] for i in moved],
            )
            grads = rule(*residuals, *(cotangents[j] for j in smooth))
            whole = dict(zip(moved, grads, strict=True))
            return tuple(whole.get(i) for i in range(len(ins)))

        return forward, backward

    def along(
        self, moved: Sequence[int], args: Sequence[Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The plain function of the arguments `moved` alone, and these arguments. It
        returns its inexact results, and the others as an extra."""
        smooth = _inexact(self.outs)

        def run(*values: Any) -> tuple[list[Any], list[Any]]:
            whole = list(args)
            for i, value in zip(moved, values, strict=True):
                whole[i] = value
            out = compat.rebind(self.node.eqn, *whole)
            rest = [x for j, x in enumerate(out) if j not in smooth]
            return [out[j] for j in smooth], rest

        return run, tuple(args[i] for i in moved)

    def planned(
        self,
        run: Callable[..., Any],
        avals: Sequence[Any],
        inputs: Sequence[Sharding],
        required: Sequence[Sharding],
    ) -> "_Planned":
        """Plans a plain function; results beyond `required` come in any sharding."""
        with compat.at_top_level():
            jaxpr = jax.make_jaxpr(run)(*map(compat.abstract, avals))
        made = plan_jaxpr(jaxpr, inputs, required, self.axes)
        return _Planned(made.program, made.body, self.axes, self.emit)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A planned function of blocks."""

    program: Program
    body: BodyPlan
    axes: Axes
    emit: Emit

    def __call__(self, *blocks: jax.Array) -> list[jax.Array]:
        given = self.program, self.body, blocks, self.axes
        return self.emit(*given, differentiated=True)

    @property
    def outputs(self) -> list[tuple[Any, Sharding]]:
        """Aval and sharding of every result."""
        avals = (aval_of(self.program, atom) for atom in self.program.outputs)
        return list(zip(avals, self.body.output_shardings, strict=True))


def _inexact(avals: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the values that have tangents."""
    smooth = (jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)
    return tuple(i for i, has_tangent in enumerate(smooth) if has_tangent)


def _merged(
    positions: Sequence[int], chosen: Sequence[Any], rest: Sequence[Any]
) -> list[Any]:
    """`rest`, with `chosen` put in between at `positions`."""
    out = list(rest)
    for position, value in zip(positions, chosen, strict=True):
        out.insert(position, value)
    return out
