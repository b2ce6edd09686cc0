"""Which devices an HLO collective connects.

In: any notation of its groups. Out: the devices of each.

Raises `ValueError` where guessing would give a wrong size.
"""

from __future__ import annotations

import math
import re

import numpy as np

from shardfn.analysis._hlo.parse import Instruction, integers

Groups = tuple[tuple[int, ...], ...]


def device_groups(instr: Instruction, num_devices: int) -> Groups:
    """Which devices talk to each other: `replica_groups` in any of its notations.

    `{{0,1},{2,3}}`, `{}` (all), `[2,4]<=[4,2]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}`, and
    the cycles of `source_target_pairs`.
    """
    if pairs := re.search(r"source_target_pairs=(\{[{}\d, ]*\})", instr.attributes):
        return _cycles(_explicit(pairs[1]))
    rest = instr.attributes.partition("replica_groups=")[2]
    if rest.startswith("mesh["):
        return _mesh_groups(rest)
    if iota := re.match(r"\[[\d,]+\]<=\[[\d,]+\](T\([\d,]+\))?", rest):
        return _rows(_iota(iota[0]))
    if explicit := re.match(r"\{[{}\d, ]*\}", rest):
        return _explicit(explicit[0]) or (tuple(range(num_devices)),)
    raise ValueError(f"cannot read the device groups of '{instr.name}': {rest[:80]!r}.")


def _explicit(text: str) -> Groups:
    return tuple(tuple(integers(g)) for g in re.findall(r"\{([\d, ]+)\}", text))


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: arange reshaped to the right, transposed, then the left."""
    left, _, right = text.partition("<=")
    return _transposed(right).reshape(integers(left))


def _transposed(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: arange reshaped, then transposed."""
    sizes, _, order = text.partition("T")
    ids = np.arange(math.prod(integers(sizes))).reshape(integers(sizes))
    return ids.transpose(integers(order)) if order else ids


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(d) for d in row) for row in ids.reshape(-1, ids.shape[-1]))


def _mesh_groups(text: str) -> Groups:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`, or without device ids.

    `'b':(2)2` is the part of axis b that has 2 before it and 2 itself.
    """
    match = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", text)
    if not match:
        raise ValueError(f"cannot read the mesh of a collective: {text[:80]!r}.")
    sizes = {n: int(s) for n, s in re.findall(r"'?([^',=]+)'?=(\d+)", match[1])}
    ids = np.arange(math.prod(sizes.values()))
    if listed := match[2]:
        ids = _transposed(listed) if "[" in listed else np.array(integers(listed))
    shape, grouped = _split_axes(sizes, match[3])
    order = [d for d in range(len(shape)) if d not in grouped] + grouped
    size = math.prod(shape[d] for d in grouped)
    return _rows(ids.reshape(shape).transpose(order).reshape(-1, size))


def _split_axes(sizes: dict[str, int], axes: str) -> tuple[list[int], list[int]]:
    """Mesh shape with sub-axes split off, and the dimensions that form a group."""
    named = re.findall(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", axes)
    shape: list[int] = []
    at: dict[tuple[str, int], int] = {}
    for axis, size in sizes.items():
        cuts = {1, size}
        for name, pre, sub in named:
            if name == axis and pre:
                cuts |= {int(pre), int(pre) * int(sub)}
        edges = sorted(cuts)
        pieces = [b // a for a, b in zip(edges, edges[1:], strict=False)] or [1]
        for edge, piece in zip(edges, pieces, strict=False):
            at[axis, edge] = len(shape)
            shape.append(piece)
    return shape, [
        d
        for name, pre, sub in named
        for (axis, edge), d in at.items()
        if axis == name and (not pre or int(pre) <= edge < int(pre) * int(sub))
    ]


def _cycles(pairs: Groups) -> Groups:
    """Devices that a permutation connects, each set once, in order of travel."""
    after = {source: target for source, target in pairs}
    groups: list[tuple[int, ...]] = []
    seen: set[int] = set()
    heads = [d for d in after if d not in after.values()] + list(after)
    for head in heads:
        group = []
        device: int | None = head
        while device is not None and device not in seen:
            seen.add(device)
            group.append(device)
            device = after.get(device)
        if group:
            groups.append(tuple(group))
    return tuple(groups)
