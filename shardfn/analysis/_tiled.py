"""Sums that libtpu makes of whole tiles: it pads the part that each device keeps, and
sends rows on to the devices that they belong to.

In: lines of a plan and collectives of a compiled program that are left. Out: which
reduce-scatter is which line, with the permutations behind it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardfn._core import compat
from shardfn._core.moves import Permute, ReduceScatter
from shardfn._core.reading_limits import TILED_MORE
from shardfn._core.tile_limits import TPU_TILE
from shardfn.analysis._hlo import HloCollective
from shardfn.analysis._line_check import TILED
from shardfn.analysis._needs import Need, Supply, has_width, is_between, is_op


@dataclass(slots=True)
class _Tiled:
    """A line that is summed in padded parts.

    Attributes:
      need: the line.
      row: elements of a row of it.
      part: of what the reduce-scatter leaves on a device.
      left: elements that may still be sent on: as many as it sums, at most.
    """

    need: Need
    row: int
    part: int
    left: int


def match_tiled(
    needs: Sequence[Need], supplies: Sequence[Supply], platform: str
) -> None:
    """Gives reduce-scatters of padded parts to the lines whose parts they are, and the
    permutations of their rows; on platforms whose compiler makes such."""
    if not compat.scatters_tiles(platform):
        return
    left = [s for s in supplies if s.runs]
    tiled: list[_Tiled] = []
    for supply in left:
        for need in needs:
            runs = min(need.runs, supply.runs)
            row = runs and _row_of(need, supply.collective)
            if row:
                summed = supply.collective.elements
                part = summed // need.devices
                tiled.append(_Tiled(need, row, part, summed * runs))
                _credit(need, supply, runs)
                need.runs -= runs
                need.status.add(TILED)
    for supply in left:
        for line in tiled:
            runs = min(supply.runs, line.left // supply.collective.elements)
            if runs and _sends_on(line, supply.collective):
                line.left -= runs * supply.collective.elements
                _credit(line.need, supply, runs)


def _row_of(need: Need, found: HloCollective) -> int:
    """Elements of a row of a sum, if `found` is the sum with more rows in each part of
    it; 0 if it is not. A vector has none."""
    is_sum = need.line.op == ReduceScatter.op and is_op(need, found)
    if not is_sum or not is_between(need, found) or not has_width(need, found):
        return 0
    return max(_rows_of(need, found.elements), default=0)


def _rows_of(need: Need, elements: int) -> Iterator[int]:
    """The same for each dimension that the sum might be split on."""
    line = need.line
    for size in line.shape[-2:] if len(line.shape) > 1 else ():
        row = line.elements // size
        kept, uneven = divmod(size, need.devices)
        filled, rest = divmod(elements, row * need.devices)
        most = kept + max(TPU_TILE[0] - 1, int(TILED_MORE * kept))
        if not rest and not uneven and kept < filled <= most:
            yield row


def _sends_on(line: _Tiled, found: HloCollective) -> bool:
    """Whether it sends rows of a part, between devices that sum it."""
    if found.op != Permute.op or not has_width(line.need, found):
        return False
    return (
        found.elements % line.row == 0
        and found.elements <= line.part
        and any(
            all(any(set(ring) <= group for group in groups) for ring in found.groups)
            for groups in line.need.over
        )
    )


def _credit(need: Need, supply: Supply, runs: int) -> None:
    need.found.append(replace(supply.collective, times=runs))
    supply.runs -= runs
