"""What of a leaf is on disk, and what Orbax is given to write and to read it.

In: leaves of a state, and the arrays that store them. Out: their shapes and dtypes on
disk, how they differ, and the items, arguments and options of Orbax.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.tree_util import tree_flatten_with_path, tree_map_with_path

from shardfn._core import compat, processes
from shardfn._core.leaves import Leaf, path_name
from shardfn._core.static_leaves import without_static
from shardfn.storage._key_words import from_words, in_words, words_of
from shardfn.storage._orbax_handler import StoredRestoreArgs, registry
from shardfn.storage._padded_leaves import on_devices
from shardfn.storage._residual_rows import absent, shape_saved

OLDEST_ORBAX = "0.12.5"
"""The first whose specification of an array on disk names its dtype. By that of 0.12.4
nothing is written."""


def check_version(installed: str) -> None:
    """Raises an ImportError if Orbax is older than what is needed."""
    have, need = (
        [int(n) for n in re.findall(r"\d+", version)[:3]]
        for version in (installed, OLDEST_ORBAX)
    )
    if have < need:
        raise ImportError(
            f"orbax-checkpoint {installed} is too old to save states with shardfn.\n"
            f"Install {OLDEST_ORBAX} or newer: pip install --upgrade orbax-checkpoint"
        )


check_version(ocp.__version__)


@dataclass(frozen=True, slots=True)
class Saved:
    """A leaf as it is on disk; of PRNG keys, their words."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


def on_disk(aval: jax.ShapeDtypeStruct) -> Saved:
    """What is on disk of a leaf."""
    words = words_of(aval)
    return Saved(words.shape, jnp.dtype(words.dtype))


def handler() -> ocp.PyTreeCheckpointHandler:
    """Without compression no chunk is copied to be written: weights hardly compress."""
    return ocp.PyTreeCheckpointHandler(
        use_compression=False, use_zarr3=True, type_handler_registry=registry()
    )


def has_values(leaf: Leaf) -> bool:
    """Whether a leaf is on disk; arrays without elements are not."""
    return 0 not in leaf.aval.shape


def is_known(dtype: Any) -> bool:
    """Whether TensorStore has a dtype."""
    try:
        ts.dtype(dtype)
    except (TypeError, ValueError):
        return False
    return True


ONLY_SAVED = "in it only: "
"""How the line of a leaf begins that a checkpoint has and a state has not."""


def differences(
    leaves: Sequence[Leaf],
    saved: Mapping[str, Saved],
    keys: Mapping[str, str],
    partial: bool = False,
) -> list[str]:
    """A line for every leaf that is not the same in a checkpoint and in a state, or in
    a part of one; `keys` are the dtypes of the PRNG keys that were saved."""
    expected = {leaf.name: on_disk(leaf.aval) for leaf in leaves if has_values(leaf)}
    begin = absent(leaves, saved)
    for leaf in leaves:
        if (as_saved := saved.get(leaf.name)) and leaf.name in expected:
            known = expected[leaf.name]
            shape = shape_saved(leaf, known.shape, as_saved.shape)
            expected[leaf.name] = Saved(shape, known.dtype)
    missing = [
        f"missing: '{k}' {v}" for k, v in expected.items() if k not in {*saved, *begin}
    ]
    extra = [
        f"{ONLY_SAVED}'{k}' {v}"
        for k, v in saved.items()
        if k not in expected and not partial
    ]
    other = [
        f"different: '{k}' is {saved[k]}, and {v} in the state"
        for k, v in expected.items()
        if k in saved and saved[k] != v
    ]
    kinds = {
        leaf.name: str(leaf.aval.dtype)
        for leaf in leaves
        if leaf.name in saved and compat.is_key(leaf.aval.dtype)
    }
    other += [
        f"different: '{k}' is of dtype {keys.get(k)}, and of {kinds.get(k)} in the "
        "state"
        for k in sorted({*kinds, *keys})
        if k in expected and keys.get(k) != kinds.get(k)
    ]
    return [*missing, *extra, *other]


def advice(lines: Sequence[str]) -> str:
    """What to do about `differences`."""
    if all(line.startswith(ONLY_SAVED) for line in lines):
        return "Pass partial=True to read the leaves of this state only."
    return "Restore into a state of the form that was saved, and change it afterwards."


def not_json(x: Any, path: str) -> tuple[str, str] | None:
    """The path and the type of the first part that JSON cannot hold, if any."""
    with contextlib.suppress(TypeError, ValueError):
        json.dumps(x)
        return None
    parts: list[tuple[Any, Any]] = []
    if isinstance(x, dict):
        parts = list(x.items())
    elif isinstance(x, list | tuple):
        parts = list(enumerate(x))
    for key, part in parts:
        if found := not_json(part, f"{path}[{key!r}]"):
            return found
    if isinstance(x, jax.Array):
        return path, f"a jax.Array {jax.typeof(x).str_short()}"
    return path, f"of type {type(x).__name__}"


def empty(target: jax.ShapeDtypeStruct) -> jax.Array:
    """The array that stores a leaf that has no values, or zeros."""
    return jnp.zeros(target.shape, target.dtype, device=target.sharding)


def as_item(tree: Any) -> Any:
    """A pytree as Orbax can take it, which sorts the keys of a node: where numbers and
    names are keys of one, as in `nnx.List`, dictionaries with keys of text. Static
    leaves, which are those of the state that is read into, are None."""
    tree = without_static(tree)
    if not _mixes_keys(tree):
        return tree
    item: dict[str, Any] = {}
    for path, x in tree_flatten_with_path(tree)[0]:
        inside = item
        for key in path[:-1]:
            inside = inside.setdefault(path_name([key]), {})
        inside[path_name(path[-1:])] = x
    return item


def _mixes_keys(tree: Any) -> bool:
    """Whether a node, also one without leaves, has numbers and names as keys."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=lambda x: not jax.tree.leaves(x))
    kinds: dict[Any, set[bool]] = {}
    for path, _ in flat:
        for i, key in enumerate(path):
            is_number = isinstance(getattr(key, "key", getattr(key, "idx", "")), int)
            kinds.setdefault(path[:i], set()).add(is_number)
    return any(len(found) > 1 for found in kinds.values())


def values(arrays: Sequence[jax.Array], leaves: Sequence[Leaf]) -> list[Any]:
    """What Orbax is given to write for each leaf."""
    both = list(zip(arrays, leaves, strict=True))
    words = [in_words(x) for x, leaf in both if has_values(leaf)]
    shapes = [on_disk(leaf.aval).shape for leaf in leaves if has_values(leaf)]
    made = iter(on_devices(words, shapes))
    return [next(made) if has_values(leaf) else None for leaf in leaves]


def restore_args(leaf: Leaf, target: jax.ShapeDtypeStruct) -> StoredRestoreArgs:
    """What tells Orbax how a leaf is read into the array that stores it."""
    words = words_of(target)
    return StoredRestoreArgs(
        dtype=words.dtype,
        name=leaf.name,
        shape=words_of(leaf.aval).shape,
        stored=words,
    )


def read(
    directory: epath.Path,
    leaves: Sequence[Leaf],
    targets: Sequence[jax.ShapeDtypeStruct],
    treedef: Any,
    partial: bool = False,
    begin: Collection[str] = (),
) -> list[jax.Array]:
    """The leaves as `targets` say: zeros where they have no values or are to `begin`;
    of a `partial` state no others are read."""
    both = list(zip(leaves, targets, strict=True))
    there = [has_values(leaf) and leaf.name not in begin for leaf in leaves]
    items = [
        x if is_there else None for is_there, x in zip(there, targets, strict=True)
    ]
    args = [
        restore_args(*pair) if is_there else None
        for is_there, pair in zip(there, both, strict=True)
    ]
    trees = (jax.tree.unflatten(treedef, x)[0] for x in (items, args))
    item, given = map(as_item, trees)
    # Not by a Checkpointer: after it has read, it waits for all processes, also for one
    # that could not.
    with contextlib.closing(handler()) as reader:
        if (
            partial or begin
        ):  # in the form of all that was saved: tuples have their lengths
            form = reader.metadata(directory).tree
            asked = {x.name: (y, a) for (x, y), a in zip(both, args, strict=True)}
            item, given = (_in_form(form, asked, i) for i in (0, 1))
        restored = reader.restore(
            directory,
            args=ocp.args.PyTreeRestore(
                item, restore_args=given, partial_restore=not partial
            ),
        )
    named = {path_name(path): x for path, x in tree_flatten_with_path(restored)[0]}
    return [
        from_words(named[leaf.name], target.dtype) if is_there else empty(target)
        for is_there, (leaf, target) in zip(there, both, strict=True)
    ]


def _in_form(form: Any, asked: Mapping[str, tuple[Any, Any]], i: int) -> Any:
    """What Orbax takes for the leaves of a checkpoint, those not asked for left out."""
    left_out = ocp.PLACEHOLDER, ocp.RestoreArgs()
    return tree_map_with_path(
        lambda path, _: asked.get(path_name(path), left_out)[i], form
    )


def read_step(directory: epath.Path) -> None:
    """Raises what Orbax raises of the file in which it notes when it has written."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        reader.metadata(directory)


def manager_options(
    options: ocp.CheckpointManagerOptions | None,
    directory: epath.Path,
    group: Sequence[int] | None = None,
) -> ocp.CheckpointManagerOptions:
    """Options with which the processes of a mesh wait for each other on their hosts.
    Orbax does it by a collective of all else, which gloo, on CPU devices, ends after 30
    seconds: one process may write or delete for longer than that."""
    options = options or ocp.CheckpointManagerOptions()
    numbers, several = processes.checkpointing(group), options.multiprocessing_options
    if not numbers or several.active_processes is not None:
        return options
    if options.create:  # Orbax does not, for processes that it is given
        if processes.index() == numbers[0]:
            directory.mkdir(parents=True, exist_ok=True)
        processes.meet("opened the directory of checkpoints", numbers)
    first = several.primary_host
    if first is not None and first not in numbers:
        first = numbers[0]
    several = dataclasses.replace(
        several, active_processes=set(numbers), primary_host=first
    )
    return dataclasses.replace(options, create=False, multiprocessing_options=several)
