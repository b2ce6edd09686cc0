"""The error for batch leaves that the devices cannot split evenly.

In: those leaves, and what each is to be split into. Out: one message that names them
and ends in the `batch_spec` that would replicate them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jax.tree_util import DictKey, SequenceKey

from shardfn._core.errors import ShardingError, called
from shardfn._core.limits import SHOWN_LEAVES


@dataclass(frozen=True, slots=True)
class Uneven:
    """A leaf that cannot be split.

    Attributes:
      path: its tree path, and `name` that path as people write it.
      size: elements in the dimension to split; 0 if the leaf has no such dimension.
      dim: that dimension.
      count: devices that would share it.
      axes: the mesh axes that these lie on.
    """

    path: tuple[Any, ...]
    name: str
    size: int
    dim: int
    count: int
    axes: tuple[str, ...]

    @property
    def unit(self) -> str:
        return "rows" if self.dim == 0 else f"elements in dimension {self.dim}"


def refuse_uneven(leaves: Sequence[Uneven], hints: Sequence[str] = ()) -> NoReturn:
    """Raises for leaves of which there is at least one; `hints` may say why."""
    first, *others = leaves
    axis = " x ".join(f"'{name}'" for name in first.axes)
    also = ", ".join(
        f"'{x.name}' with {x.size} {x.unit}" for x in others[: SHOWN_LEAVES - 1]
    )
    more = len(others) - SHOWN_LEAVES + 1
    also += f" and {more} more" if more > 0 else ""
    raise ShardingError(
        f"batch leaf '{first.name}' has {first.size} {first.unit}, which {first.count} "
        f"devices on mesh {'axis' if len(first.axes) == 1 else 'axes'} {axis} cannot "
        "split evenly.\n"
        + (f"  nor can they {also}\n" if others else "")
        + "".join(f"  {hint}\n" for hint in hints)
        + called()
        + f"Pad the batch to {-(-max(first.size, 1) // first.count) * first.count} "
        f"{first.unit} and mask the loss, or pass {_whole(leaves)} to replicate "
        f"{'them' if others else 'it'}."
    )


def _whole(leaves: Sequence[Uneven]) -> str:
    """The `batch_spec` for these leaves, as it can be typed."""
    spec: Any = {}
    for leaf in leaves:
        inside = spec
        for key in ("root", *leaf.path):
            if not isinstance(key, str | DictKey | SequenceKey):
                return "jax.P() for each such leaf in batch_spec"
            inside = inside.setdefault(key, {})
    return f"batch_spec={_written(spec['root'])}"


def _written(spec: dict[Any, Any]) -> str:
    if not spec:
        return "jax.P()"
    if isinstance(next(iter(spec)), DictKey):
        items = (f"{key.key!r}: {_written(inside)}" for key, inside in spec.items())
        return f"{{{', '.join(items)}}}"
    each = {key.idx: _written(inside) for key, inside in spec.items()}
    items = [each.get(i, "None") for i in range(max(each) + 1)]
    return f"({', '.join(items)}{',' * (len(items) == 1)})"
