"""Sizes, shapes, times and tables as text.

In: numbers and rows of cells. Out: lines for a terminal.
"""

from collections.abc import Sequence

from shardfn.analysis.collective import Collective


def subject(line: Collective) -> str:
    """What a line is for: a state leaf, or else the user's source line."""
    name = line.path or line.place
    return f"{name}  (no rule for {line.fallback})" if line.fallback else name


def shape_text(shape: Sequence[int]) -> str:
    """`512x1536`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def join_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]
) -> str:
    """Lines of aligned columns; those in `right` are aligned to the right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def size_text(size: float) -> str:
    """Bytes in binary units, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """`12.3 ms`, `4.56 s`."""
    if seconds < 1e-9:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError
