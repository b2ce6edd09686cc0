"""In: rows that `stationary.py` has measured. Out: its tables, in Markdown."""

from collections.abc import Iterator, Mapping
from typing import Any

from stationary_cases import Case
from stationary_llama import CACHE_BY_ROWS, MEGATRON

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""By program."""

COLUMNS = ("gathered", "chosen", "by use", "asked", "jit", "jit asked")
OF_DECODING = (
    "program",
    "sent",
    "of the least",
    "collectives per layer",
    "peak temporary",
    "predicted",
    "of Megatron's",
    "with the cache alike",
)
OF_ROWS = (
    "case",
    "chip",
    "program",
    "planned",
    "sent",
    "largest array moved",
    "collectives",
    "peak temporary",
    "predicted",
)


def mib(size: float) -> str:
    return f"{size / 2**20:,.2f} MiB"


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.2f} ms"


def table(header: tuple[str, ...], lines: Iterator[list[str]]) -> str:
    marks = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(row)} |" for row in ([*header], marks, *lines))


def failure(row: Row) -> str:
    full = "RESOURCE_EXHAUSTED" in row["error"]
    return "does not fit" if full else row["error"]


def cases_table(measured: Mapping[tuple[str, str], Rows], cases: Mapping[str, Case]):
    """What a device sends, and the predicted step, by case and chip."""

    def cell(row: Row | None) -> str:
        if row is None or "error" in row:
            return failure(row) if row else ""
        return ", ".join(filter(None, (mib(row["wire"]), ms(row["seconds"]))))

    def lines() -> Iterator[list[str]]:
        for (name, chip), rows in measured.items():
            cells = (cell(rows.get(program)) for program in COLUMNS)
            yield [name, chip, *cells, mib(cases[name].least)]

    return table(("case", "chip", *COLUMNS, "least"), lines())


def decoding_table(rows: Rows, case: Case) -> str:
    """Of a decoded token: every program beside Megatron by hand, as fast as that is,
    and with a cache that is split as the program's."""
    by_hand = {n: s for n in MEGATRON if n in rows and (s := rows[n]["seconds"])}
    by_rows = [s for n, s in by_hand.items() if n == CACHE_BY_ROWS]
    by_heads = [s for n, s in by_hand.items() if n != CACHE_BY_ROWS]

    def of(best: list[float], seconds: float | None) -> str:
        return f"{seconds / min(best):.2f}" if best and seconds else ""

    def lines() -> Iterator[list[str]]:
        for program, row in rows.items():
            if "error" in row:
                yield [program, failure(row)]
                continue
            yield [
                program,
                mib(row["wire"]),
                f"{row['wire'] / case.least:,.2f}",
                f"{row['per_layer']:.0f}",
                mib(row["temporary"]),
                ms(row["seconds"]),
                of([*by_hand.values()], row["seconds"]),
                of(by_heads if is_by_heads(program) else by_rows, row["seconds"]),
            ]

    return table(OF_DECODING, lines())


def is_by_heads(program: str) -> bool:
    """Whether a program's cache is split by heads."""
    by_hand = program in MEGATRON and program != CACHE_BY_ROWS
    return by_hand or program.endswith(", cache by heads")


def rows_table(measured: Mapping[tuple[str, str], Rows]) -> str:
    """Every figure."""

    def lines() -> Iterator[list[str]]:
        for (name, chip), rows in measured.items():
            for program, row in rows.items():
                if "error" in row:
                    yield [name, chip, program, failure(row)]
                    continue
                planned = mib(row["planned"]) if "planned" in row else ""
                yield [
                    name,
                    chip,
                    program,
                    planned + ("" if row.get("as_planned", True) else " (*)"),
                    mib(row["wire"]),
                    mib(row["largest"]),
                    f"{row['collectives']:,.0f}",
                    mib(row["temporary"]),
                    ms(row["seconds"]),
                ]

    return table(OF_ROWS, lines()) + "\n\n(*): the compiler moves something else."
