"""A planned step as a function of global arrays.

In: the step as one device runs it, and the mesh. Out: a function for `jax.jit`, under
`shard_map(check_vma=True)`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn import _compat
from shardfn._auto import full_spec
from shardfn._planner import Planned
from shardfn._sharding import partition_spec


def on_mesh(
    planned: Planned, mesh: Mesh, given: Mesh
) -> Callable[..., list[jax.Array]]:
    """The planned step on arrays typed by the caller's mesh, explicit or not.

    Args:
      planned: the step.
      mesh: the mesh it is planned on, whose axes are automatic.
      given: the caller's mesh of the same devices.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return _sharded(planned, mesh)(*args)

    def typed(*args: jax.Array) -> list[jax.Array]:
        if not any(map(_compat.is_explicit, args)):
            return run(*args)
        specs = output_specs(planned)
        with jax.sharding.use_abstract_mesh(given.abstract_mesh):
            over: Any = jax.sharding.auto_axes(
                run, axes=given.axis_names, out_sharding=specs
            )
            return over(*args)

    return typed


def _sharded(planned: Planned, mesh: Mesh) -> Callable[..., list[jax.Array]]:
    """The planned step on global arrays. Empty ones stay outside: jax 0.11 crashes
    on an empty array that goes through `shard_map`."""
    axes, body = planned.axes, planned.body
    ins = [v.shape for v in planned.input_avals]
    outs = [(v.shape, v.dtype) for v in planned.output_avals]
    full_ins = [i for i, shape in enumerate(ins) if 0 not in shape]
    full_outs = [j for j, (shape, _) in enumerate(outs) if 0 not in shape]
    avals = planned.input_avals

    def local(*args: jax.Array) -> list[jax.Array]:
        given = dict(zip(full_ins, args, strict=True))
        out = planned.run(
            *(
                given[i] if i in given else jax.numpy.zeros(v.shape, v.dtype)
                for i, v in enumerate(avals)
            )
        )
        return [out[j] for j in full_outs]

    over = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition_spec(body.inputs[i], axes) for i in full_ins),
        out_specs=[partition_spec(body.output_shardings[j], axes) for j in full_outs],
        axis_names=set(axes.names),
    )

    def run(*args: jax.Array) -> list[jax.Array]:
        made = dict(zip(full_outs, over(*(args[i] for i in full_ins)), strict=True))
        out = [
            made[j] if j in made else jax.numpy.zeros(shape, dtype)
            for j, (shape, dtype) in enumerate(outs)
        ]
        for j, leaf in enumerate(planned.state):
            if leaf.auto:
                named = NamedSharding(mesh, output_specs(planned)[j])
                out[j] = jax.lax.with_sharding_constraint(out[j], named)
        return out

    return run


def output_specs(planned: Planned) -> list[PartitionSpec]:
    """The PartitionSpecs of a planned step's results on the mesh."""
    autos = [leaf.auto or () for leaf in planned.state]
    shardings = planned.body.output_shardings
    autos += [()] * (len(shardings) - len(autos))
    return [
        full_spec(s, auto, planned.axes)
        for s, auto in zip(shardings, autos, strict=True)
    ]
