"""Follows a plan on one device's blocks, inside `shard_map`.

In: a program, its plan, local arguments. Out: local results. Everything decided is in
  the
plan; emit only evaluates equations and makes the moves. Types stay truthful: a value is
invarying along a mesh axis exactly if the plan says that it is replicated there.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn import _compat
from shardfn._collectives import run_move, varying
from shardfn._padding import is_inside
from shardfn._plan import Apply, BodyPlan, Ref, Reshard
from shardfn._program import Node, Program, aval_of
from shardfn._rule import (
    LocalOp,
    OpShardingRule,
    flat_factor_start,
    is_flat_factor,
    rule_of,
    run_local,
)
from shardfn._sharding import Axes, Sharding, local_shape

Arrays = Sequence[jax.Array]


def emit(program: Program, plan: BodyPlan, args: Arrays, axes: Axes) -> list[jax.Array]:
    """Runs `program` by `plan` on one device's blocks.

    Args:
      program: the traced step.
      plan: its plan.
      args: local blocks, sharded as `plan.inputs` says.
      axes: the mesh axes, bound by the surrounding `shard_map`.

    Returns:
      Local blocks, sharded as `plan.output_shardings` says.
    """
    return _Run(program, plan, axes).run(args)


@dataclass(slots=True)
class _Run:
    program: Program
    plan: BodyPlan
    axes: Axes
    env: dict[Ref, jax.Array] = field(default_factory=dict)
    literals: dict[Any, jax.Array] = field(default_factory=dict)

    def run(self, args: Arrays) -> list[jax.Array]:
        program = self.program
        self.env.update((Ref(v), jnp.asarray(c)) for v, c in program.constants)
        for value, arg in zip(program.inputs, args, strict=True):
            self.env[Ref(value)] = arg
        last_use = _last_uses(self.plan)
        for index, step in enumerate(self.plan.steps):
            if isinstance(step, Reshard):
                self.reshard(step)
            else:
                self.apply(step, program.nodes[step.node])
            for ref in last_use.get(index, ()):
                self.env.pop(ref, None)
        return [
            self.typed(self.read(ref, atom), sharding, aval_of(program, atom).weak_type)
            if hasattr(aval_of(program, atom), "weak_type")
            else self.read(ref, atom)
            for ref, atom, sharding in zip(
                self.plan.outputs,
                program.outputs,
                self.plan.output_shardings,
                strict=True,
            )
        ]

    def read(self, ref: Ref | None, atom: Any) -> jax.Array:
        if ref is not None:
            return self.env[ref]
        key = (str(atom.aval), np.asarray(atom.val).tobytes())
        if key not in self.literals:
            value = jnp.asarray(atom.val, atom.aval.dtype)
            self.literals[key] = _compat.with_weak_type(value, atom.aval.weak_type)
        return self.literals[key]

    def varies(self, sharding: Sharding) -> tuple[str, ...]:
        return tuple(
            n for n, s in zip(self.axes.names, sharding, strict=True) if s is not None
        )

    def typed(
        self, x: jax.Array, sharding: Sharding, weak: bool | None = None
    ) -> jax.Array:
        """`x` varying along the axes that `sharding` is not replicated on."""
        x = varying(x, *self.varies(sharding))
        return x if weak is None else _compat.with_weak_type(x, weak)

    # Moves

    def reshard(self, step: Reshard) -> None:
        x = self.env[step.source]
        if step.after is not None:
            x, _ = lax.optimization_barrier((x, self.env[step.after]))
        for before, after in zip(step.path, step.path[1:], strict=False):
            x = run_move(x, step.shape, before, after, self.axes)
        self.env[step.result] = x

    # Equations

    def apply(self, step: Apply, node: Node) -> None:
        operands = [
            self.read(ref, atom)
            for ref, atom in zip(step.operands, node.inputs, strict=True)
        ]
        with _compat.as_user_code(node.eqn):
            results = {
                "op": self.op,
                "scan": self.scan,
                "while": self.loop,
                "cond": self.branch,
                "remat": self.remat,
                "barrier": self.barrier,
            }[node.kind](step, node, operands)
        for value, result, sharding in zip(
            node.outputs, results, step.result_shardings, strict=True
        ):
            self.env[Ref(value)] = self.typed(result, sharding)

    def op(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        rule = rule_of(node.eqn)
        if node.eqn.effects:
            return self.once(node, operands)
        if rule is None:
            out = node.eqn.primitive.bind(*self.alike(operands), **node.eqn.params)
            return out if node.eqn.primitive.multiple_results else [out]
        local = self.local_op(step, node, rule)
        operands = [
            _masked(local, dims, x, aval_of(self.program, atom).shape)
            for dims, x, atom in zip(rule.operands, operands, node.inputs, strict=True)
        ]
        return run_local(local, *self.alike(operands))

    def once(self, node: Node, operands: Arrays) -> Arrays:
        """Runs a node for its effect, such as printing, on the first device alone."""
        bind = functools.partial(node.eqn.primitive.bind, **node.eqn.params)
        first = lax.axis_index(self.axes.names) == 0
        lax.cond(first, lambda *xs: list(bind(*xs)), lambda *_: [], *operands)
        return []

    def local_op(self, step: Apply, node: Node, rule: OpShardingRule) -> LocalOp:
        split: dict[str, list[int]] = {}
        for factor, axis in step.parts:
            split.setdefault(factor, []).append(axis)
        names, sizes = self.axes.names, self.axes.sizes
        return LocalOp(
            eqn=node.eqn,
            rule=rule,
            parts=tuple(
                (
                    factor,
                    tuple(names[a] for a in sorted(on)),
                    math.prod(sizes[a] for a in on),
                )
                for factor, on in split.items()
            ),
            result_shapes=tuple(
                local_shape(self.program.avals[v].shape, s, self.axes)
                for v, s in zip(node.outputs, step.result_shardings, strict=True)
            ),
        )

    def alike(self, operands: Arrays) -> list[jax.Array]:
        """Operands cast to vary along the same mesh axes, as primitives demand."""
        names = frozenset().union(*map(_compat.varying_axes, operands))
        return [varying(x, *sorted(names)) for x in operands]

    def barrier(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        return lax.optimization_barrier(tuple(operands))

    # Control flow

    def body(self, step: Apply, node: Node, i: int) -> Callable[..., list[jax.Array]]:
        def run(*args: jax.Array) -> list[jax.Array]:
            return emit(node.bodies[i], step.bodies[i], args, self.axes)

        return run

    def entering(self, plan: BodyPlan, body: Program, args: Arrays) -> list[jax.Array]:
        """Arguments of a body with the types that its plan gives them."""
        return [
            self.typed(x, sharding, getattr(body.avals[v], "weak_type", None))
            for x, sharding, v in zip(args, plan.inputs, body.inputs, strict=True)
        ]

    def remat(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        args = self.entering(step.bodies[0], node.bodies[0], operands)
        return _compat.bind_remat(node.eqn, self.body(step, node, 0), *args)

    def scan(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        n_consts, n_carry = node.counts
        run, plan, body = self.body(step, node, 0), step.bodies[0], node.bodies[0]
        n_xs = n_consts + n_carry
        consts, xs = operands[:n_consts], operands[n_xs:]
        init = [
            self.typed(x, s, getattr(body.avals[v], "weak_type", None))
            for x, s, v in zip(
                operands[n_consts:n_xs],
                plan.inputs[n_consts:n_xs],
                body.inputs[n_consts:n_xs],
                strict=True,
            )
        ]

        def iteration(carry: Any, x: Any) -> tuple[Any, Any]:
            out = run(*consts, *carry, *x)
            return tuple(out[:n_carry]), tuple(out[n_carry:])

        params = node.eqn.params
        carry, ys = lax.scan(
            iteration,
            tuple(init),
            tuple(xs),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    def loop(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        n_test, n_body = node.counts
        test, run = self.body(step, node, 0), self.body(step, node, 1)
        start = n_test + n_body
        plan, body = step.bodies[1], node.bodies[1]
        args = self.entering(plan, body, operands[n_test:])
        out = lax.while_loop(
            lambda carry: test(*operands[:n_test], *carry)[0],
            lambda carry: tuple(run(*operands[n_test:start], *carry)),
            tuple(args[n_body:]),
        )
        return list(out)

    def branch(self, step: Apply, node: Node, operands: Arrays) -> Arrays:
        index, *rest = operands
        args = self.entering(step.bodies[0], node.bodies[0], rest)
        branches = [self.body(step, node, i) for i in range(len(node.bodies))]
        return lax.switch(index, branches, *args)


def _masked(op: LocalOp, dims: Any, x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` with its padding along reduced factors replaced by what does not count."""
    for factor, names, count in op.parts:
        if is_flat_factor(factor):
            if not op.rule.reduce or not dims:
                continue
            reducer, dim = op.rule.reduce[0][1], flat_factor_start(factor)
            size = math.prod(shape[dim:])
        else:
            reducer, dim = op.rule.reducer(factor), op.rule.dim_of(dims, factor)
            size = op.rule.size(factor)
            if reducer is None or dim is None:
                continue
        if size % count == 0:
            continue
        inside = is_inside(x.shape, dim, size, names)
        x = jnp.where(inside, x, neutral(reducer, x.dtype))
    return x


def neutral(reducer: str, dtype: Any) -> jax.Array:
    """The value that leaves a reduction unchanged."""
    if reducer in ("max", "min"):
        floats = jnp.issubdtype(dtype, jnp.floating)
        if floats:
            return jnp.asarray(-jnp.inf if reducer == "max" else jnp.inf, dtype)
        info = jnp.iinfo(dtype) if dtype != jnp.bool_ else None
        low, high = (info.min, info.max) if info else (False, True)
        return jnp.asarray(low if reducer == "max" else high, dtype)
    return jnp.asarray({"sum": 0, "prod": 1, "and": -1, "or": 0}[reducer]).astype(dtype)


def _last_uses(plan: BodyPlan) -> dict[int, list[Ref]]:
    """Per step, the versions that nothing after it reads."""
    last: dict[Ref, int] = {}
    for index, step in enumerate(plan.steps):
        if isinstance(step, Reshard):
            used = [step.source, *([step.after] if step.after else [])]
        else:
            used = [r for r in step.operands if r is not None]
        last.update((ref, index) for ref in used)
    for ref in plan.outputs:
        if ref is not None:
            last.pop(ref, None)
    out: dict[int, list[Ref]] = {}
    for ref, index in last.items():
        out.setdefault(index, []).append(ref)
    return out
