"""How a value is split over mesh axes that `fully_shard` was not given: those stay
automatic, XLA partitions over them.

In: the shardings that arrays, their types and traced functions carry. Out: an
`AutoSplit`, and what follows from it: PartitionSpecs, and shapes of one part.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten_with_path

from shardfn._core import compat
from shardfn._core.sharding import Axes, Sharding, Split, local_shape, partition_spec

AutoAxes = tuple[tuple[str, int], ...]
"""Automatic mesh axes and their sizes, major to minor."""

AutoSplit = tuple[AutoAxes, ...]
"""Per dimension, the automatic axes that split it; `()` if none splits any."""

Sizes = Mapping[str, int]
"""The automatic axes of a mesh and their sizes."""


def auto_split(x: Any, shape: Sequence[int], sizes: Sizes) -> AutoSplit | None:
    """The split that an array, a `ShapeDtypeStruct` or a tracer's type carries.

    Args:
      x: the array.
      shape: its shape.
      sizes: the automatic axes.

    Returns:
      The split; None if `x` does not say, such as an array on one device.
    """
    if not sizes:
        return ()
    sharding = getattr(x, "sharding", None)
    if compat.is_traced(x):
        sharding = jax.typeof(x).sharding if compat.is_explicit(x) else None
    split = split_of(sharding, shape, sizes)
    return () if split is not None and len(x.shape) != len(shape) else split


def split_of(sharding: Any, shape: Sequence[int], sizes: Sizes) -> AutoSplit | None:
    """The part of a `NamedSharding` that is about the axes `sizes`, by their names."""
    if not isinstance(sharding, NamedSharding):
        return None
    known = sharding.mesh.shape
    if any(known.get(name) != size for name, size in sizes.items()):
        return None
    dims: list[AutoAxes] = [()] * len(shape)
    for dim, entry in enumerate(sharding.spec[: len(shape)]):
        names = entry if isinstance(entry, tuple) else (entry,)
        found = tuple((n, sizes[n]) for n in names if n in sizes and sizes[n] > 1)
        dims[dim] = found if shape[dim] % count(found) == 0 else ()
    return full(dims)


def full(dims: Sequence[AutoAxes]) -> AutoSplit:
    """The split of all dimensions; `()` if none is split."""
    return tuple(dims) if any(dims) else ()


def count(axes: AutoAxes) -> int:
    """Devices along some axes."""
    return math.prod(size for _, size in axes)


def auto_names(split: AutoSplit) -> frozenset[str]:
    return frozenset(name for axes in split for name, _ in axes)


def part_shape(shape: Sequence[int], split: AutoSplit | None) -> tuple[int, ...]:
    """Shape of one part of a value."""
    counts = [count(axes) for axes in split or ()] or [1] * len(shape)
    return tuple(size // n for size, n in zip(shape, counts, strict=True))


def auto_spec(split: AutoSplit) -> PartitionSpec:
    """The PartitionSpec over automatic axes alone."""
    return PartitionSpec(*(tuple(name for name, _ in axes) or None for axes in split))


def free_of(split: AutoSplit, shardings: Sequence[Sharding]) -> AutoSplit:
    """`split` without dimensions that `shardings` split too; none of it next to a
    flattened one."""
    dims = {s.dim for sharding in shardings for s in sharding if isinstance(s, Split)}
    if any(dim < 0 for dim in dims):
        return ()
    return full([() if d in dims else a for d, a in enumerate(split)])


def fitting(
    split: AutoSplit, shape: Sequence[int], sharding: Sharding, axes: Axes
) -> AutoSplit:
    """The part of `split` whose axes divide the blocks of `sharding`."""
    if not split:
        return ()
    local = local_shape(shape, sharding, axes)
    if len(local) != len(split):
        return ()
    dims = [a if n % count(a) == 0 else () for a, n in zip(split, local, strict=True)]
    return full(dims)


def full_spec(sharding: Sharding, split: AutoSplit, axes: Axes) -> PartitionSpec:
    """The PartitionSpec over all mesh axes, automatic ones minor in their dimension."""
    spec = partition_spec(sharding, axes)
    if not split:
        return spec
    entries: list[Any] = []
    for dim, auto in enumerate(split):
        own = spec[dim] if dim < len(spec) else None
        own = own if isinstance(own, tuple) else () if own is None else (own,)
        names = (*own, *(name for name, _ in auto))
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def made_shardings(closed: Any) -> list[NamedSharding | None]:
    """The shardings that a traced function gives its results; None where it gives none.

    They are said by `with_sharding_constraint`, by the `out_shardings` of a `jax.jit`
    in it, or by the results' own types on a mesh with explicit axes.
    """
    jaxpr, _ = compat.open_jaxpr(closed)
    return [_made_sharding(jaxpr, atom) for atom in jaxpr.outvars]


def _made_sharding(jaxpr: Any, atom: Any) -> NamedSharding | None:
    typed = getattr(atom.aval, "sharding", None)
    if isinstance(typed, NamedSharding) and any(typed.spec):
        return typed
    eqn = next((e for e in jaxpr.eqns if any(v is atom for v in e.outvars)), None)
    if eqn is None:
        return None
    at = eqn.outvars.index(atom)
    said = eqn.params.get("sharding")
    if "out_shardings" in eqn.params:
        said = eqn.params["out_shardings"][at]
    if isinstance(said, NamedSharding):
        return said
    body = compat.inlined_body(eqn)
    if body is None:
        shape = np.shape(atom.aval)
        like = [v for v in eqn.invars if np.shape(v.aval) == shape]
        return _made_sharding(jaxpr, like[0]) if len(like) == 1 else None
    inner, _ = compat.open_jaxpr(compat.close_jaxpr(body))
    if inner.outvars[at] in inner.invars:
        source = eqn.invars[inner.invars.index(inner.outvars[at])]
        return _made_sharding(jaxpr, source)
    return _made_sharding(inner, inner.outvars[at])


@dataclass(frozen=True, slots=True)
class Made:
    """What a function makes, without the user's containers: those that convert their
    leaves when they are made take arrays alone.

    Attributes:
      paths: of the leaves.
      leaves: `ShapeDtypeStruct`s.
      treedef: how they are put together.
    """

    paths: tuple[Any, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    treedef: Any


def made_by(init_fn: Callable[..., Any], args: Sequence[Any], sizes: Sizes) -> Made:
    """What `init_fn` returns, with the splits over automatic axes that it gives its
    leaves."""
    forms: list[Any] = []

    def flat(*args: Any) -> list[Any]:
        leaves, treedef = tree_flatten_with_path(init_fn(*args))
        forms.append((tuple(path for path, _ in leaves), treedef))
        return [x for _, x in leaves]

    leaves = jax.eval_shape(flat, *args)
    if sizes:
        given = made_shardings(jax.make_jaxpr(flat)(*args))
        leaves = [
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, weak_type=x.weak_type, sharding=sharding
            )
            for x, sharding in zip(leaves, given, strict=True)
        ]
    paths, treedef = forms[-1]
    return Made(paths, tuple(leaves), treedef)
