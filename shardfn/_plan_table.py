"""A plan as a table: one row per kind of collective, then totals.

In: a `Plan`. Out: text that fits a terminal.
"""

from collections.abc import Sequence

from shardfn._plan import Collective, Plan

HEADER = ("phase", "operation", "axis", "shape", "dtype", "times", "wire", "for")


def table(plan: Plan) -> str:
    """Rows of equal collectives are merged, their times added."""
    merged: dict[tuple[object, ...], list[Collective]] = {}
    for line in plan.collectives:
        key = (line.phase, line.op, line.axis, line.shape, line.dtype, subject(line))
        merged.setdefault(key, []).append(line)
    rows = [_row(lines) for lines in merged.values()]
    return "\n".join([join_columns(HEADER, rows, {5, 6}), "", *_totals(plan)])


def subject(line: Collective) -> str:
    """What a line is for: a state leaf, or else the user's source line."""
    name = line.path or line.place
    return f"{name}  (no rule for {line.fallback})" if line.fallback else name


def _row(lines: Sequence[Collective]) -> tuple[str, ...]:
    first = lines[0]
    times = (
        "loop" if first.times is None else str(sum(line.times or 1 for line in lines))
    )
    return (
        first.phase,
        first.op,
        first.axis,
        shape_text(first.shape),
        first.dtype,
        times,
        size_text(sum(line.total_bytes for line in lines)),
        subject(first),
    )


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


def _totals(plan: Plan) -> list[str]:
    devices = " x ".join(
        f"{n}={s}" for n, s in zip(plan.axes.names, plan.axes.sizes, strict=True)
    )
    total, m = plan.wire_bytes, plan.parameter_bytes
    lines = [
        f"mesh {devices}",
        f"each device sends {size_text(total)} per step"
        + (f" = {total / m:.2f} M" if m else ""),
        f"M = {size_text(m)}: the gathered parameters in their compute dtype",
    ]
    for phase in ("forward", "backward", "update"):
        part = sum(c.total_bytes for c in plan.collectives if c.phase == phase)
        lines.append(f"  {phase:<9}{size_text(part)}")
    if plan.fallbacks:
        part = sum(c.total_bytes for c in plan.fallbacks)
        lines.append(f"  of which {size_text(part)} only for want of a rule")
    if any(c.times is None for c in plan.collectives):
        lines.append("  while loops are counted as one iteration")
    return [*lines, *str(plan.control).splitlines()]


def size_text(size: float) -> str:
    """Bytes in binary units, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
