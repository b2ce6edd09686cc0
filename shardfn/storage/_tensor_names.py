"""Which tensors of files a state's leaves are made of.

In: tensors, the leaves of a state, and the caller's mapping of names. Out: for every
leaf its tensors, each for the whole leaf or for one index of its first dimensions, with
their axes; and a line for everything that does not fit.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from shardfn._core.errors import call_site
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.path_patterns import advice, matches
from shardfn.storage._boxes import Shape
from shardfn.storage._key_words import words_of
from shardfn.storage._tensor_axes import (
    Rearrangement,
    parse,
    sizes_of,
    unchanged,
)
from shardfn.storage._tensor_files import READ, LoadError, Tensor

Target = str | tuple[str, str]
"""A leaf's path, and how the tensor's axes become the leaf's if they are others."""

Targets = Target | list[Target] | None
Names = Mapping[str, Targets] | Callable[[str], Targets]

_PLACE = re.compile(r"(?P<path>[^\[\]]*)(?:\[(?P<at>[\d, ]*)\])?")
"""A path, and an index of the leaf's first dimensions."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that a leaf is made of.

    Attributes:
      tensor: the tensor.
      at: the index of the leaf's first dimensions that it is for; () for all of it.
      how: how its axes become those of the rest of the leaf.
      sizes: of these axes.
    """

    tensor: Tensor
    at: tuple[int, ...]
    how: Rearrangement
    sizes: Mapping[str, int]


@dataclass(slots=True)
class Wiring:
    """What a state's leaves are made of, and what does not fit.

    Attributes:
      sources: by the leaf's name and an index of its first dimensions, of which all
        indices of a leaf have as many.
      problems: lines for a message.
      unfit: leaves that are in one of these.
    """

    sources: dict[str, dict[Shape, Source]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unfit: set[str] = field(default_factory=set)

    def of(self, leaf: Leaf) -> list[Source]:
        """The tensors of a leaf; none if no tensor is for it."""
        return list(self.sources.get(leaf_name(leaf.path), {}).values())


def wiring(
    tensors: Sequence[Tensor],
    leaves: Sequence[Leaf],
    names: Names | None,
    allow_missing: Sequence[str],
) -> Wiring:
    """The tensors of every leaf.

    Args:
      tensors: all that the files have.
      leaves: of the state.
      names: from the name of a tensor to leaves; None if they are called as
        `write_safetensors` calls them.
      allow_missing: path patterns of the leaves that need none.

    Returns:
      The tensors, and lines for all that does not fit.

    Raises:
      LoadError: `names` cannot be read.
    """
    out, by_name = Wiring(), {leaf_name(leaf.path): leaf for leaf in leaves}
    _check_patterns(allow_missing, by_name)
    targets_of = _targets_of(names, by_name)
    called = Counter(leaf_name(leaf.path) for leaf in leaves)
    out.problems += [f"two leaves: '{x}'" for x, count in called.items() if count > 1]
    for tensor in tensors:
        found = targets_of(tensor.name)
        if found is None:
            out.problems.append(f"unused: {tensor}")
            continue
        for target in found:
            _add(out, tensor, by_name, *target)
    for name, leaf in by_name.items():
        sources = out.sources.get(name, {})
        allowed = not sources and any(matches(name, p) for p in allow_missing)
        if name not in out.unfit and not allowed:
            out.problems += _incomplete(name, leaf, sources)
    return out


Resolved = tuple[str, tuple[int, ...], Rearrangement | None]
"""A leaf's name, an index of its first dimensions, and the axes if they change."""


def _targets_of(
    names: Names | None, leaves: Mapping[str, Leaf]
) -> Callable[[str], list[Resolved] | None]:
    """What gives the leaves of a tensor: none if it is left out, None if it is not
    named."""
    if names is None:
        dotted = {name.replace("/", "."): name for name in leaves}
        return lambda name: [(dotted[name], (), None)] if name in dotted else None
    if not isinstance(names, Mapping):
        return lambda name: [_resolved(*_pair(t)) for t in _each(names(name))]
    patterns = [(_compiled(pattern), _each(to)) for pattern, to in names.items()]

    def of_patterns(name: str) -> list[Resolved] | None:
        for pattern, targets in patterns:
            if match := pattern.fullmatch(name):
                pairs = map(_pair, targets)
                return [_resolved(_expanded(to, match), axes) for to, axes in pairs]
        return None

    return of_patterns


def _each(targets: Targets) -> list[Target]:
    if targets is None:
        return []
    return targets if isinstance(targets, list) else [targets]


def _pair(target: Target) -> tuple[str, str | None]:
    match target:
        case str():
            return target, None
        case (str() as path, str() as axes):
            return path, axes
    raise _unreadable(f"has {target!r}, which is no path, nor a pair of path and axes")


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise _unreadable(f"has {pattern!r}, which is no regex ({error})") from error


def _expanded(path: str, match: re.Match[str]) -> str:
    try:
        return match.expand(path)
    except (re.error, IndexError) as error:
        raise _unreadable(f"has {path!r} for {match.re.pattern!r}: {error}") from error


def _resolved(path: str, axes: str | None) -> Resolved:
    how = None if axes is None else parse(axes)
    if axes is not None and how is None:
        raise _unreadable(
            f"has the axes {axes!r}, where such as '(h k) d -> d h k' belongs: the "
            "same names on both sides, each once"
        )
    found = _PLACE.fullmatch(path)
    if found is None:
        raise _unreadable(f"has {path!r}, which is no path, nor one with an index")
    at = filter(None, (found["at"] or "").replace(" ", "").split(","))
    return found["path"], tuple(map(int, at)), how


def _unreadable(reason: str) -> LoadError:
    return LoadError(
        f"names= {reason}.\n"
        f"  load_safetensors was called at {call_site()}\n"
        r"Pass a mapping such as {r'layers\.(\d+)\.mlp\.up_proj\.weight': "
        r"(r'params/mlp/up/kernel[\1]', 'f d -> d f')}."
    )


def _add(
    out: Wiring,
    tensor: Tensor,
    leaves: Mapping[str, Leaf],
    name: str,
    at: tuple[int, ...],
    how: Rearrangement | None,
) -> None:
    """Makes a tensor part of a leaf, or notes why it does not fit."""
    if name not in leaves:
        out.problems.append(f"no such leaf: '{name}', for {tensor}")
        return
    whole, dtype = stored_values(leaves[name])
    place = f"'{name}'{list(at) if at else ''}"
    shape = whole[len(at) :]
    what = f"{place} {dtype.name}{_sizes_text(shape)}"
    chosen = how or unchanged(len(shape))
    sizes = sizes_of(chosen, tensor.shape, shape)
    others = out.sources.setdefault(name, {})
    first = next(iter(others.values()), None)
    if len(at) > len(whole) or any(i >= n for i, n in zip(at, whole, strict=False)):
        problem = f"no such index: {place} of {_sizes_text(whole)}, for {tensor}"
    elif sizes is None or not _converts(tensor, dtype):
        by = f" by '{how}'" if how else ""
        problem = f"different: {tensor} cannot become {what}{by}"
    elif first and len(first.at) != len(at):
        other = f"'{name}'{list(first.at) or ''}"
        problem = f"another index: {place} for {tensor}, and {other} for {first.tensor}"
    elif at in others:
        problem = f"twice: {what}, for {others[at].tensor} and {tensor}"
    else:
        others[at] = Source(tensor, at, chosen, sizes)
        return
    out.unfit.add(name)
    out.problems.append(problem)


def _check_patterns(patterns: Sequence[str], leaves: Mapping[str, Leaf]) -> None:
    for pattern in patterns:
        if not any(matches(name, pattern) for name in leaves):
            raise LoadError(
                f"allow_missing names '{pattern}', which matches no leaf of the "
                f"state.\n  load_safetensors was called at {call_site()}\n"
                f"{advice(pattern, list(leaves))}"
            )


def stored_values(leaf: Leaf) -> tuple[Shape, jnp.dtype]:
    """Shape and dtype of what a file has of a leaf; of PRNG keys, their words."""
    aval = words_of(leaf.aval)
    return aval.shape, jnp.dtype(aval.dtype)


def _converts(tensor: Tensor, dtype: jnp.dtype) -> bool:
    """Whether its values can be those of a leaf: the same, or both floating."""
    if tensor.kind not in READ:
        return False
    both = tensor.dtype, dtype
    return tensor.dtype == dtype or all(jnp.issubdtype(d, jnp.floating) for d in both)


def _incomplete(
    name: str, leaf: Leaf, sources: Mapping[Shape, Source]
) -> Iterator[str]:
    """Lines for the indices of a leaf that no tensor is for."""
    shape, dtype = stored_values(leaf)
    what = f"{dtype.name}{_sizes_text(shape)}"
    if not sources:
        if 0 not in shape:
            yield f"missing: '{name}' {what}"
        return
    depth = len(next(iter(sources)))
    for at in itertools.product(*map(range, shape[:depth])):
        if at not in sources:
            yield f"missing: '{name}'{list(at)} of {what}"


def _sizes_text(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"
