"""What the arguments of a step mean: which leaves are state, how the batch is split.

In: the arguments of a call, arrays or `ShapeDtypeStruct`s. Out: their avals, paths and
shardings, or an error that names the leaf.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten_with_path

from shardfn._core import compat
from shardfn._core.automatic_axes import auto_split
from shardfn._core.call_arguments import Named
from shardfn._core.errors import ShardingError, called
from shardfn._core.leaves import Leaf, path_name
from shardfn._core.named_states import NamedStates
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    in_order,
    named_twice,
    names_in,
    on_axis,
)
from shardfn.storage._batch import Uneven, of_many_rows, refuse_uneven

NO_AXES: Mapping[str, int] = MappingProxyType({})


def leaves_of(
    tree: tuple[Any, ...], what: str, sizes: Mapping[str, int] = NO_AXES
) -> tuple[list[Leaf], Any]:
    """The leaves of some arguments, on logical shapes, and their tree structure.

    Paths start with the argument's name, or else its number, which one argument alone
    has not.

    Args:
      tree: the arguments.
      what: "state" or "batch", for errors.
      sizes: the automatic mesh axes.

    Returns:
      The leaves and the structure.
    """
    flat, treedef = tree_flatten_with_path(tree)
    skip = 1 if len(tree) == 1 and not isinstance(tree, NamedStates) else 0
    leaves = []
    for path, x in flat:
        aval = abstract(x, path[skip:], what)
        leaves.append(Leaf(path[skip:], aval, auto_split(x, aval.shape, sizes)))
    return leaves, treedef


def abstract(leaf: Any, path: Sequence[Any], what: str) -> jax.ShapeDtypeStruct:
    """The aval of one leaf, which may be an array, a scalar or a `ShapeDtypeStruct`."""
    if isinstance(leaf, jax.Array):
        weak = getattr(leaf, "weak_type", False)  # PRNG keys have none
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    numbers = bool, int, float, complex
    if isinstance(leaf, (*numbers, np.ndarray, np.generic)) and _is_numeric(leaf):
        aval = jax.eval_shape(lambda x: x, leaf)
        weak = type(leaf) in numbers[1:]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
    raise ShardingError(
        f"{what} leaf '{path_name(path) or what}' is {_kind(leaf)}.\n"
        f"{called()}"
        "Pass arrays, numbers or ShapeDtypeStructs, and what compares and hashes by "
        "value, such as functions, text or a frozen dataclass, which is then static. "
        "Leave other parts outside, for example with functools.partial."
    )


def _is_numeric(leaf: Any) -> bool:
    return np.asarray(leaf).dtype.kind in "biufcV"  # V: bfloat16 and its like


def _kind(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray):
        return f"an array of dtype {leaf.dtype}, which JAX does not have"
    name = type(leaf).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}, not an array"


def batch_shardings(
    batch: Sequence[Any],
    leaves: Sequence[Leaf],
    spec: Any,
    axes: Axes,
    is_local: bool = False,
    same: Sequence[Collection[str]] = (),
    hints: Sequence[str] = (),
    raw_keys: Callable[[Sequence[int]], Collection[int]] = lambda unsure: (),
    may_be_whole: bool = False,
) -> tuple[Sharding, ...]:
    """How every batch leaf is split.

    Args:
      batch: the arguments that are not state.
      leaves: their leaves, in order.
      spec: the caller's `batch_spec`, or None.
      axes: the mesh axes; rows are split over those that have rows.
      is_local: whether leaves have the shapes of one device's part.
      same: of such leaves, the mesh axes over which each is the same.
      hints: what is known of arguments that might be none of the batch, for errors.
      raw_keys: of the leaves at some positions, which have the shape and dtype of a raw
        PRNG key, those that are one; the others are rows.
      may_be_whole: whether leaves whose rows the devices do not divide are replicated,
        unless `spec` asks for a split; otherwise they are refused.

    Returns:
      One sharding per leaf: dimension 0 split unless `spec` says otherwise; scalars and
      PRNG keys replicated.
    """
    specs: list[PartitionSpec | None] = []
    _match(*_one_of(spec, batch), specs, hints)
    uneven: list[Uneven] = []
    given = list(zip(leaves, specs, strict=True))
    unsure = [i for i, (x, one) in enumerate(given) if one is None and _is_unsure(x)]
    keys = raw_keys(unsure) if unsure else ()
    split = []
    for i, (leaf, one) in enumerate(given):
        spec = PartitionSpec() if i in keys else one
        alike = same[i] if same else ()
        bad: list[Uneven] = []
        sharding = _batch_leaf(leaf, spec, axes, is_local, alike, bad)
        may = may_be_whole and one is None
        split.append(axes.replicated if bad and may else sharding)
        uneven += [] if may else bad
    if uneven:
        refuse_uneven(uneven, [*hints, *of_many_rows(leaves, uneven)])
    return tuple(split)


def _one_of(spec: Any, batch: Sequence[Any]) -> tuple[Any, Any]:
    """What `spec` is for, and its form there: the only argument that has arrays and a
    position, or all of them."""
    has_arrays = [bool(jax.tree.leaves(x)) and not isinstance(x, Named) for x in batch]
    if len(batch) == 1:
        return spec, batch[0]
    if sum(has_arrays) == 1 and not isinstance(spec, tuple | list):
        spec = tuple(spec if own else None for own in has_arrays)
    return spec, tuple(batch)


def _match(
    spec: Any,
    tree: Any,
    out: list[PartitionSpec | None],
    hints: Sequence[str] = (),
) -> None:
    """One spec per leaf of `tree`; `spec` is a prefix of it that may leave keys out."""
    if spec is None or isinstance(spec, PartitionSpec):
        out.extend([spec] * len(jax.tree.leaves(tree)))
        return
    named, specs = _children(tree), _children(spec)
    if isinstance(spec, dict) and specs and named and not isinstance(tree, dict):
        fields = {path_name([key]): key for key in named}  # of a class
        specs = {fields.get(path_name([key]), key): x for key, x in specs.items()}
    if specs is None or named is None:
        raise ShardingError(
            f"batch_spec has {spec!r} where a PartitionSpec, None or a container of "
            f"them belongs.\n{called()}"
            "Give a prefix of the batch, such as batch_spec={'tokens': jax.P('data')}."
        )
    unknown = [path_name([key]) for key in specs if key not in named]
    if unknown:
        raise ShardingError(
            f"batch_spec names {unknown}, but the batch has "
            f"{[path_name([key]) for key in named]}.\n"
            + "".join(f"  {hint}\n" for hint in hints)
            + f"{called()}"
            "Name leaves of the batch; those left out are split on dimension 0."
        )
    for key, child in named.items():
        _match(specs.get(key), child, out, hints)


def _children(tree: Any) -> dict[Any, Any] | None:
    """The children of the root of a pytree by key; None for a leaf."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return {path[0]: x for path, x in flat} if all(path for path, _ in flat) else None


def _batch_leaf(
    leaf: Leaf,
    spec: PartitionSpec | None,
    axes: Axes,
    is_local: bool,
    same: Collection[str],
    uneven: list[Uneven],
) -> Sharding:
    """How one leaf is split; a dimension that cannot be goes into `uneven`."""
    shape = leaf.aval.shape
    _check_names(leaf, spec, axes)
    if spec is None:
        over = () if _is_whole(leaf.aval) else (n for n in axes.batch if n not in same)
        dims = dict.fromkeys(over, 0)
    else:
        dims = {
            name: dim
            for dim, entry in enumerate(spec)
            for name in (entry if isinstance(entry, tuple) else (entry,))
            if name in axes.names
        }
    sharding = axes.replicated
    for axis, name in enumerate(axes.names):
        if name in dims and axes.sizes[axis] > 1:
            sharding = on_axis(sharding, axis, Split(dims[name]))
    for dim in set(dims.values()):
        over = [a for a, n in enumerate(axes.names) if dims.get(n) == dim]
        count = math.prod(axes.sizes[a] for a in over)
        if dim >= len(shape) or (not is_local and shape[dim] % count):
            size = shape[dim] if dim < len(shape) else 0
            names = tuple(axes.names[a] for a in over)
            few = spec is None and size < count and len(shape) > 1
            behind = few and shape[1] > 0 and shape[1] % count == 0
            what = leaf.path, leaf.name or "batch", size, dim, count, names, behind
            uneven.append(Uneven(*what))
    return sharding


def _is_whole(aval: jax.ShapeDtypeStruct) -> bool:
    """Scalars, empty arrays and typed PRNG keys are the same everywhere."""
    return not aval.shape or 0 in aval.shape or compat.is_key(aval.dtype)


def _is_unsure(leaf: Leaf) -> bool:
    """Whether a leaf may be a raw PRNG key, of Threefry or RBG, or else rows."""
    return leaf.aval.dtype == np.uint32 and leaf.aval.shape in ((2,), (4,))


def refuse_unsure(leaf: Leaf, axes: Axes) -> NoReturn:
    """Raises for a leaf that may be a raw key or rows, where no step tells."""
    name, form = leaf.name or "batch", f"uint32{list(leaf.aval.shape)}"
    raise ShardingError(
        f"batch leaf '{name}' is {form}: a raw PRNG key, or rows of this process? "
        f"local_batch cannot tell.\n{called()}"
        "Say so: batch_spec= with jax.P() for a key, with "
        f"jax.P({axes.batch[0]!r}) for rows. Or pass a key of jax.random.key."
    )


def _check_names(leaf: Leaf, spec: PartitionSpec | None, axes: Axes) -> None:
    entries = [e if isinstance(e, tuple) else (e,) for e in spec or ()]
    for name in (n for entry in entries for n in entry if n is not None):
        if name not in axes.names:
            raise ShardingError(
                f"batch_spec of leaf '{leaf.name or 'batch'}' is PartitionSpec"
                f"{tuple(spec or ())}, but the mesh has no axis '{name}' "
                f"that the batch is split over.\n{called()}"
                f"Use the axes that fully_shard was given: {axes.names}."
            )
    what = f"batch_spec of leaf '{leaf.name or 'batch'}' is {spec}"
    twice = named_twice(spec or ())
    if twice is not None:
        raise ShardingError(
            f"{what}, which names mesh axis '{twice}' twice.\n{called()}"
            "An axis splits one dimension: name it once."
        )
    for names in map(names_in, spec or ()):
        if (order := in_order(names, axes)) != names:
            raise ShardingError(
                f"{what}, but the step's axes are {axes.names}, major to minor.\n"
                f"{called()}Write {order} for the dimension."
            )


def is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8, which half a surrogate pair cannot."""
    return isinstance(name, str) and name == name.encode(errors="ignore").decode()
