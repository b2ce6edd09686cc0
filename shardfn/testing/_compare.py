"""Comparing two pytrees leaf by leaf, and saying where they differ.

In: pytrees of arrays. Out: their leaves on the host, and one line for every leaf that
has another value, shape or dtype.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn._core import compat
from shardfn._core.leaves import path_name
from shardfn._core.reading_limits import SMALLEST_NORM

NO_NOISE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """One leaf on the host, and the aval that JAX gave it."""

    value: np.ndarray
    aval: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pytree on the host: its structure, and its leaves by path."""

    structure: Any
    leaves: tuple[tuple[str, HostLeaf], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A leaf that differs, and how."""

    path: str
    text: str


def snapshot(tree: Any) -> Snapshot:
    """Copies `tree` to the host; typed keys become their words."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = tuple((path_name(path), _host_leaf(x)) for path, x in flat)
    return Snapshot(structure, leaves)


def _host_leaf(x: Any) -> HostLeaf:
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    shape = "x".join(map(str, x.shape)) or "scalar"
    if compat.is_key(x.dtype):
        return HostLeaf(np.array(jax.random.key_data(x)), f"{x.dtype} {shape}")
    weak = " weak" if getattr(x, "weak_type", False) else ""
    return HostLeaf(np.array(x), f"{x.dtype} {shape}{weak}")


def differences(
    plain: Snapshot,
    sharded: Snapshot,
    tol: float,
    ignore: Sequence[str | re.Pattern[str]] = (),
    weak_types: bool = True,
    allowed: Mapping[str, float] = NO_NOISE,
) -> Iterator[Difference]:
    """The leaves of two pytrees that differ, in order.

    Args:
      plain: what the values should be.
      sharded: what they are.
      tol: largest relative norm of the difference of a floating-point leaf; other
        leaves have to be equal.
      ignore: patterns, searched in the paths of leaves whose values may differ.
      weak_types: whether weak types have to be the same too.
      allowed: larger tolerances of some leaves, by path.

    Yields:
      One difference per leaf, or one of the whole if the structures differ.
    """
    if plain.structure != sharded.structure:
        yield Difference(
            "", f"plain is {plain.structure},\n  sharded is {sharded.structure}"
        )
        return
    for (path, a), (_, b) in zip(plain.leaves, sharded.leaves, strict=True):
        avals = [x.aval if weak_types else x.aval.split(" weak")[0] for x in (a, b)]
        if avals[0] != avals[1]:
            yield Difference(path, f"plain is {avals[0]}, sharded is {avals[1]}")
        elif not any(re.search(pattern, path) for pattern in ignore):
            loose = max(tol, allowed.get(path, 0.0))
            text = describe_difference(a.value, b.value, loose)
            if text is not None:
                yield Difference(path, f"({a.aval}): {text}")


def describe_difference(a: np.ndarray, b: np.ndarray, tol: float) -> str | None:
    """None if `b` is `a`; otherwise how far off it is, and the worst element."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        wrong = np.flatnonzero(a != b)
        if not len(wrong):
            return None
        return f"{len(wrong)} of {a.size} values differ, first {_element(a, b, wrong)}"
    wrong = np.flatnonzero(np.isfinite(a) != np.isfinite(b))
    if len(wrong):
        return f"not finite in {len(wrong)} other places, first {_element(a, b, wrong)}"
    gap, norm = _gap(a, b)
    error = float(np.linalg.norm(gap)) / norm
    if error <= tol:
        return None
    worst = np.argsort(-gap, axis=None)
    off = int((gap > tol * norm / a.size**0.5).sum())
    return (
        f"relative error {error:.2e} > {tol:.0e}, {off} of {a.size} values off, "
        f"worst {_element(a, b, worst)}"
    )


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the finite differences of two arrays, relative to that of `a`."""
    gap, norm = _gap(a, b)
    return float(np.linalg.norm(gap[np.isfinite(gap)])) / norm


def _gap(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """How far the elements of two floating-point arrays are apart, and the norm that
    this is relative to."""
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    x, y = a.astype(wide), b.astype(wide)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    gap = np.abs(np.subtract(x, y, out=np.zeros_like(x), where=~same))
    return gap, max(float(np.linalg.norm(x[np.isfinite(x)])), SMALLEST_NORM)


def _element(a: np.ndarray, b: np.ndarray, flat: np.ndarray) -> str:
    index = tuple(int(i) for i in np.unravel_index(flat[0], a.shape))
    return f"[{', '.join(map(str, index))}]: plain {a[index]}, sharded {b[index]}"
