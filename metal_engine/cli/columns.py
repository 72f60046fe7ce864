"""Prints tables on a terminal."""

from __future__ import annotations


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Print rows of cells, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
