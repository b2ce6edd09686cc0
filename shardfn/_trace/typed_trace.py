"""The jaxpr of a step that names shardings of the caller's mesh, by typed arguments.

In: the step, avals of its arguments and what is known of how they are split. Out: its
jaxpr and what it returns.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardfn._core import compat
from shardfn._core.sharding import Axes, Sharding, partition_spec
from shardfn._trace.argument_flow import is_like_rows


def typed_jaxpr(
    step: Callable[..., Any],
    states: tuple[Any, ...],
    batch: tuple[Any, ...],
    split: Sequence[Sharding],
    axes: Axes,
    mesh: AbstractMesh,
) -> tuple[Any, Any]:
    """The jaxpr of a step that names shardings of the caller's mesh: with
    types that say that the state is whole, and how the batch is split. Propagation
    finds its own shardings; those in the types are a plain step's."""

    leaves, treedef = jax.tree.flatten(batch)
    typed = (
        _typed(x, partition_spec(sharding, axes), mesh)
        for x, sharding in zip(leaves, split, strict=True)
    )
    return _jaxpr(
        step, (_whole(states, mesh), jax.tree.unflatten(treedef, typed)), mesh
    )


def typed_once(
    step: Callable[..., Any], args: tuple[Any, ...], axes: Axes, mesh: AbstractMesh
) -> Iterator[tuple[Any, Any]]:
    """The jaxprs of a step of which is not known what is state: as far as it can be
    traced, where the arguments are whole that can not be rows; the first, the first
    two; or all."""
    rows = PartitionSpec(axes.batch)

    def split(x: Any) -> jax.ShapeDtypeStruct:
        may_be = x.shape and not compat.is_key(x.dtype) and x.shape[0]
        is_even = may_be and x.shape[0] % axes.devices == 0
        return _typed(x, rows if is_even else PartitionSpec(), mesh)

    no_rows = {i for i, x in enumerate(args) if not is_like_rows(x)}
    for whole in no_rows, {0}, {0, 1}, {*range(len(args))}:
        typed = (
            _whole(x, mesh) if i in whole else jax.tree.map(split, x)
            for i, x in enumerate(args)
        )
        with contextlib.suppress(Exception):
            yield _jaxpr(step, tuple(typed), mesh)


def _typed(x: Any, spec: PartitionSpec, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    return compat.abstract(x, NamedSharding(mesh, spec))


def _whole(tree: Any, mesh: AbstractMesh) -> Any:
    return jax.tree.map(lambda x: _typed(x, PartitionSpec(), mesh), tree)


def _jaxpr(step: Callable[..., Any], args: tuple[Any, ...], mesh: AbstractMesh) -> Any:
    with jax.sharding.use_abstract_mesh(mesh), compat.untyped_axes_of_one_device():
        return jax.make_jaxpr(step, return_shape=True)(*args)
