"""The error for batch leaves that the devices cannot split evenly.

In: those leaves, and what each is to be split into. Out: one message that names them
and ends in the `batch_spec` that would replicate them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jax.tree_util import DictKey, SequenceKey

from shardfn._core.argnums_text import read_only_advice
from shardfn._core.call_arguments import ArgumentKey, argument_of
from shardfn._core.errors import ShardingError, called
from shardfn._core.leaves import Leaf
from shardfn._core.shown_limits import SHOWN_LEAVES


@dataclass(frozen=True, slots=True)
class Uneven:
    """A leaf that cannot be split.

    Attributes:
      path: its tree path, and `name` that path as people write it.
      size: elements in the dimension to split; 0 if the leaf has no such dimension.
      dim: that dimension.
      count: devices that would share it.
      axes: the mesh axes that these lie on.
      behind: whether they are few, and the devices divide the next dimension.
    """

    path: tuple[Any, ...]
    name: str
    size: int
    dim: int
    count: int
    axes: tuple[str, ...]
    behind: bool = False

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
        + (f"  also uneven: {also}\n" if others else "")
        + "".join(f"  {hint}\n" for hint in hints)
        + called()
        + _of_microbatches(leaves)
        + f"Pad the batch to {-(-max(first.size, 1) // first.count) * first.count} "
        f"{first.unit} and mask the loss, or pass {_spec(leaves)} to replicate "
        f"{'them' if others else 'it'}."
    )


def _of_microbatches(leaves: Sequence[Uneven]) -> str:
    """What to do if rows are in the next dimension, as those of microbatches are."""
    if not all(leaf.behind for leaf in leaves):
        return ""
    names = ", ".join(map(repr, leaves[0].axes))
    over = names if len(leaves[0].axes) == 1 else f"({names})"
    spec = _spec(leaves, f"jax.P(None, {over})")
    return f"If its rows are in dimension 1, behind microbatches, pass {spec}. Else:\n"


def of_many_rows(leaves: Sequence[Leaf], uneven: Sequence[Uneven]) -> list[str]:
    """Lines on arguments that cannot be a batch's, for their leaves have not the same
    number of rows, or not that of any other argument: parameters that are read only,
    but unlike the state."""
    rows: dict[ArgumentKey, set[int]] = {}
    for leaf in leaves:
        if leaf.aval.shape and (key := argument_of(leaf.path)):
            rows.setdefault(key, set()).add(leaf.aval.shape[0])
    wrong = {argument_of(x.path) for x in uneven}
    lines: list[str] = []
    for key, sizes in rows.items():
        others = set[int]().union(*(x for k, x in rows.items() if k != key))
        if key not in wrong or len(sizes) == 1 and (not others or sizes & others):
            continue
        next_to = f", those of others {_numbers(others)}" if others else ""
        lines.append(
            f"the leaves of argument '{key}' have {_numbers(sizes)} rows{next_to}. It "
            "is taken for a batch, since it does not come back, and has not the "
            "structure, shapes and dtypes of the state or a part of it. "
            + read_only_advice(key.name if key.by_name else key.idx)
        )
    return lines


def _numbers(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _spec(leaves: Sequence[Uneven], each: str = "jax.P()") -> str:
    """The `batch_spec` with `each` for these leaves, as it can be typed."""
    spec: Any = {}
    for leaf in leaves:
        inside = spec
        for key in ("root", *leaf.path):
            if not isinstance(key, str | DictKey | SequenceKey | ArgumentKey):
                return f"{each} for each such leaf in batch_spec"
            inside = inside.setdefault(key, {})
    return f"batch_spec={_written(spec['root'], each)}"


def _written(spec: dict[Any, Any], leaf: str) -> str:
    if not spec:
        return leaf
    if isinstance(next(iter(spec)), DictKey):
        items = (
            f"{key.key!r}: {_written(inside, leaf)}" for key, inside in spec.items()
        )
        return f"{{{', '.join(items)}}}"
    each = {key.idx: _written(inside, leaf) for key, inside in spec.items()}
    items = [each.get(i, "None") for i in range(max(each) + 1)]
    return f"({', '.join(items)}{',' * (len(items) == 1)})"
