"""A planned step as a function of global arrays.

In: the step as one device runs it, and the mesh. Out: a function for `jax.jit`, under
`shard_map(check_vma=True)`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardfn._core import compat
from shardfn._core.automatic_axes import full_spec
from shardfn._core.sharding import Axes, Sharding, partition_spec, stored_shape
from shardfn._lowering.planned_program import Planned
from shardfn.storage._padding import to_stored, to_whole, whole_spec


def on_mesh(
    planned: Planned, mesh: Mesh, given: Mesh, whole: bool = False
) -> Callable[..., list[jax.Array]]:
    """The planned step on arrays typed by the caller's mesh, explicit or not.

    Args:
      planned: the step.
      mesh: the mesh it is planned on, whose axes are automatic.
      given: the caller's mesh of the same devices.
      whole: whether leaves that are stored padded come and go in their own shapes.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        divided = _divided(mesh, planned.axes)
        with jax.sharding.use_abstract_mesh(divided.abstract_mesh):
            out = _sharded(planned, divided)(*args)
        if not planned.axes.groups:
            return out
        named = [NamedSharding(mesh, spec) for spec in output_specs(planned)]
        return list(map(jax.lax.with_sharding_constraint, out, named))

    def untyped(*args: jax.Array) -> list[jax.Array]:
        return _of_whole(planned, run)(*args) if whole else run(*args)

    def typed(*args: jax.Array) -> list[jax.Array]:
        if not any(map(compat.is_explicit, args)):
            return untyped(*args)
        specs = output_specs(planned, whole)
        with jax.sharding.use_abstract_mesh(given.abstract_mesh):
            over: Any = jax.sharding.auto_axes(
                untyped, axes=given.axis_names, out_sharding=specs
            )
            return over(*args)

    return typed


def _of_whole(
    planned: Planned, run: Callable[..., list[jax.Array]]
) -> Callable[..., list[jax.Array]]:
    """`run` on leaves that come and go in their own shapes."""
    count = len(planned.state)

    def stored(x: jax.Array, sharding: Sharding) -> jax.Array:
        padded = to_stored(x, sharding, planned.axes)
        is_weak = getattr(x, "weak_type", False)
        return x if padded is x else compat.with_weak_type(padded, is_weak)

    def of_whole(*args: jax.Array) -> list[jax.Array]:
        state = map(stored, args[:count], planned.stored)
        out = run(*state, *args[count:])
        shapes = (leaf.aval.shape for leaf in planned.state)
        return [*map(to_whole, out[:count], shapes), *out[count:]]

    return of_whole


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
        in_specs=tuple(_bound(body.inputs[i], axes) for i in full_ins),
        out_specs=[_bound(body.output_shardings[j], axes) for j in full_outs],
        axis_names={n for a in range(len(axes.names)) for n in axes.bound(a)},
    )

    def run(*args: jax.Array) -> list[jax.Array]:
        made = dict(zip(full_outs, over(*(args[i] for i in full_ins)), strict=True))
        out = [
            made[j] if j in made else jax.numpy.zeros(shape, dtype)
            for j, (shape, dtype) in enumerate(outs)
        ]
        for j, leaf in enumerate(planned.state):
            if leaf.auto and not axes.groups:
                named = NamedSharding(mesh, output_specs(planned)[j])
                out[j] = jax.lax.with_sharding_constraint(out[j], named)
        return out

    return run


def _divided(mesh: Mesh, axes: Axes) -> Mesh:
    """The mesh with one of our axes divided into parts."""
    if not axes.groups:
        return mesh
    shape: dict[str, int] = {}
    for name, size in mesh.shape.items():
        if name == axes.names[axes.divided]:
            shape.update(zip(axes.bound(axes.divided), axes.parts, strict=True))
        else:
            shape[name] = size
    types = (AxisType.Auto,) * len(shape)
    devices = mesh.devices.reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=types)


def _bound(sharding: Sharding, axes: Axes) -> PartitionSpec:
    """The PartitionSpec in the names that `shard_map` binds."""
    divided, parts = axes.names[axes.divided], axes.bound(axes.divided)
    entries = []
    for entry in partition_spec(sharding, axes):
        names = (entry,) if isinstance(entry, str) else entry or ()
        names = [n for name in names for n in (parts if name == divided else (name,))]
        entries.append(tuple(names) or None)
    return PartitionSpec(*entries)


def output_specs(planned: Planned, whole: bool = False) -> list[PartitionSpec]:
    """The PartitionSpecs of a planned step's results on the mesh; of leaves that are
    stored padded, those of the whole leaves."""
    autos = [leaf.auto or () for leaf in planned.state]
    shardings = planned.body.output_shardings
    autos += [()] * (len(shardings) - len(autos))
    specs = [
        full_spec(s, auto, planned.axes)
        for s, auto in zip(shardings, autos, strict=True)
    ]
    for j, leaf in enumerate(planned.state if whole else ()):
        shape = leaf.aval.shape
        stored = stored_shape(shape, planned.stored[j], planned.axes)
        if stored != shape:
            specs[j] = whole_spec(specs[j], stored, shape)
    return specs
