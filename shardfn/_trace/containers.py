"""The user's containers, closed while what is in them is abstract.

In: a pytree. Out: a node with the same leaves that knows how to make it again. JAX puts
`ShapeDtypeStruct`s into the containers that a function returns; a class that converts
its leaves when it is made, by `jnp.asarray` in `__post_init__`, takes arrays and
tracers alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import (
    GetAttrKey,
    tree_flatten_with_path,
    treedef_is_leaf,
)

from shardfn._core.call_arguments import in_plain, is_plain
from shardfn._core.leaves import Leaf, path_name
from shardfn._trace.returned_values import check_values


@jax.tree_util.register_pytree_with_keys_class
class Closed:
    """A pytree by its leaves.

    Attributes:
      leaves: the leaves.
      names: the path of each.
      treedef: how they are put together.
    """

    __slots__ = ("leaves", "names", "treedef")

    def __init__(
        self, leaves: Sequence[Any], names: tuple[str, ...], treedef: Any
    ) -> None:
        self.leaves, self.names, self.treedef = leaves, names, treedef

    @property
    def kind(self) -> str:
        """Name of the container's type."""
        return self.treedef.node_data()[0].__name__

    def open(self) -> Any:
        """The pytree."""
        return jax.tree.unflatten(self.treedef, self.leaves)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keyed = zip(map(GetAttrKey, self.names), self.leaves, strict=True)
        return tuple(keyed), (self.names, self.treedef)

    @classmethod
    def tree_unflatten(cls, form: tuple[Any, ...], leaves: Sequence[Any]) -> "Closed":
        return cls(leaves, *form)


def close(tree: Any) -> Any:
    """A pytree closed; a leaf, None and what is closed already stay as they are."""
    flat, treedef = tree_flatten_with_path(tree)
    if tree is None or isinstance(tree, Closed) or treedef_is_leaf(treedef):
        return tree
    names = tuple(path_name(path) for path, _ in flat)
    return Closed([x for _, x in flat], names, treedef)


def close_avals(leaves: Sequence[Leaf], treedef: Any) -> tuple[Any, ...]:
    """Arguments without values, each closed, of their leaves and their structure."""
    children, rest = treedef.children(), iter(leaves)
    skip, out = int(len(children) > 1), []
    for child in children:
        own = [next(rest) for _ in range(child.num_leaves)]
        names = tuple(path_name(leaf.path[skip:]) for leaf in own)
        avals = [leaf.aval for leaf in own]
        if treedef_is_leaf(child):  # So is what is empty: None, or a list.
            out.append(jax.tree.unflatten(child, avals))
        else:
            out.append(Closed(avals, names, child))
    return tuple(out)


def closed_inside(treedef: Any, leaves: Sequence[Leaf], start: int = 0) -> Any:
    """A pytree without values, in which plain containers stay, and others are closed.

    Args:
      treedef: its structure.
      leaves: its leaves.
      start: how many keys of their paths lead to it.
    """

    def close_class(treedef: Any, own: list[int], depth: int) -> Closed:
        names = tuple(path_name(leaves[i].path[start + depth :]) for i in own)
        return Closed([leaves[i].aval for i in own], names, treedef)

    made = in_plain(treedef, range(len(leaves)), close_class)
    return jax.tree.map(
        lambda x: x if isinstance(x, Closed) else leaves[x].aval, made, is_leaf=_is
    )


def close_inside(tree: Any) -> Any:
    """A pytree in which plain containers stay, and others are closed."""
    return jax.tree.map(close, tree, is_leaf=lambda x: not is_plain(type(x)))


def opened_inside(tree: Any) -> Any:
    """The pytree of which classes are closed."""
    return jax.tree.map(opened, tree, is_leaf=_is)


def _is(tree: Any) -> bool:
    return isinstance(tree, Closed)


def classes_closed(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` on arguments of which classes are closed, as in what it returns."""

    def run(*args: Any) -> Any:
        return close_inside(step(*opened_inside(args)))

    return run


def on_closed(
    step: Callable[..., Any], structures: list[Any], inside: bool = False
) -> Callable[[tuple[Any, ...], tuple[Any, ...]], Any]:
    """`step` on closed states and batch; its results are closed one by one, or the
    classes `inside` them are, and the structure of what it really returned is added to
    `structures`."""

    def run(states: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
        out = step(tuple(map(opened, states)), tuple(map(opened, batch)))
        check_values(out)
        structures.append(jax.tree.structure(out))
        if inside:
            return close_inside(out)
        if isinstance(out, tuple | list):
            return tuple(map(close, out))
        return close(out)

    return run


def opened(tree: Any) -> Any:
    """The pytree that is closed, or the tree itself."""
    return tree.open() if isinstance(tree, Closed) else tree
