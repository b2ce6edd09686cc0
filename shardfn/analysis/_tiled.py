"""Sums that libtpu makes of whole tiles: it pads the part that each device keeps, and
sends rows on to the devices that they belong to.

In: lines of a plan and collectives of a compiled program that are left. Out: which
reduce-scatter is which line, with the permutations behind it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardfn._core.moves import Permute, ReduceScatter
from shardfn._core.reading_limits import TILED_MORE
from shardfn._core.tile_limits import TPU_TILE
from shardfn.analysis._line_check import TILED
from shardfn.analysis._needs import Need, Supply


def match_tiled(needs: Sequence[Need], supplies: Sequence[Supply]) -> None:
    """Gives reduce-scatters of padded parts to the lines whose parts they are, and the
    permutations of their rows."""
    left = [s for s in supplies if s.runs]
    rows: dict[int, Need] = {}
    for supply in left:
        if supply.collective.op != ReduceScatter.op:
            continue
        for need in needs:
            inner = set(_rows_of(need, supply.collective.elements))
            if inner and supply.runs and need.runs:
                _credit(need, supply, min(need.runs, supply.runs))
                need.status.add(TILED)
                rows |= dict.fromkeys(inner, need)
    for supply in left:
        sent_on = (r for r in rows if supply.collective.elements % r == 0)
        row = max(sent_on, default=0)
        if row and supply.collective.op == Permute.op:
            _credit(rows[row], supply, supply.runs)


def _rows_of(need: Need, elements: int) -> Iterator[int]:
    """Elements of a row of a sum, if so many are the sum with more rows in each part of
    it; for each dimension that it might be split on."""
    line = need.line
    if line.op != ReduceScatter.op or not need.runs:
        return
    for size in line.shape[-2:]:
        row = line.elements // size
        kept, uneven = divmod(size, need.devices)
        filled, rest = divmod(elements, row * need.devices)
        most = kept + max(TPU_TILE[0] - 1, int(TILED_MORE * kept))
        if not rest and not uneven and kept < filled <= most:
            yield row


def _credit(need: Need, supply: Supply, runs: int) -> None:
    need.found.append(replace(supply.collective, times=runs))
    supply.runs -= runs
    if supply.collective.op == ReduceScatter.op:
        need.runs -= runs
