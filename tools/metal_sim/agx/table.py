"""Rows of measured kernels as a table."""

from __future__ import annotations

from collections.abc import Iterable

from .measure import Row

COLUMNS = (
    "kernel, shape",
    "registers",
    "spills in loops",
    "spills outside",
    "threads",
    "instructions",
    "code",
    "largest loop",
    "threadgroup memory",
)


def cells(row: Row, generation: int) -> list[str]:
    way = f", {row.way}" if row.way else ""
    name = f"{row.kernel} {row.dtype}: {row.label}{way}"
    made = row.made.get(generation)
    if not made:
        return [name, "does not compile", *([""] * (len(COLUMNS) - 2))]
    outside = made.stores - made.loop_stores, made.fills - made.loop_fills
    return [
        name,
        f"{made.registers}",
        f"{made.loop_stores}:{made.loop_fills}",
        f"{outside[0]}:{outside[1]}",
        f"{made.threads}",
        f"{made.instructions:,}",
        f"{made.code_size:,}",
        f"{made.loop_size:,}",
        f"{made.threadgroup_memory:,}",
    ]


def plain(rows: Iterable[Row], generation: int) -> str:
    """A table for a terminal."""
    lines = [list(COLUMNS), *(cells(row, generation) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
