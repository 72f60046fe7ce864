"""Makes the table and the chart of docs/benchmarks.md from the figures in docs/dev/benchmark-notes.md.

python -m tools.docs.benchmarks    # needs the extra `plots`
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, NOTES, CHART = DOCS / "benchmarks.md", DOCS / "dev" / "benchmark-notes.md", DOCS / "images" / "benchmarks.png"
BEGIN, END = "<!-- servers: made by tools/docs/benchmarks.py -->\n", "<!-- end -->"
SECTION = "## Beside other servers"
HIGHLIGHT, GREY = "#2463b0", "#b9bec6"


@dataclass(frozen=True)
class Figure:
    """A row of the notes' table, and its description on the page.

    Attributes:
        scenario: number of the scenario, with which the row's first cell begins.
        measure: text of the row's second cell.
        title: scenario in words.
        unit: unit and kind of the row's values.
        more_is_better: True if larger values are better, False if smaller values are.
    """

    scenario: str
    measure: str
    title: str
    unit: str
    more_is_better: bool


FIGURES = (
    Figure("1", "tok/s", "16 chats at once", "tokens/s", True),
    Figure("2", "tok/s", "8 long documents at once", "tokens/s", True),
    Figure("4", "tok/s, cold", "8 chats, a long common instruction", "tokens/s", True),
    Figure("6", "tok/s of the eight", "8 answers while 2 long prompts arrive", "tokens/s", True),
    Figure("1", "median TTFT, s", "16 chats at once", "s to the first token", False),
    Figure("2", "median TTFT, s", "8 long documents at once", "s to the first token", False),
    Figure("3", "median TTFT, s", "One chat alone", "s to the first token", False),
    Figure("5", "TTFT, s", "A short question behind 4 long prompts", "s to the first token", False),
)


@dataclass(frozen=True)
class Row:
    """Values of a row, as written in the notes.

    Attributes:
        values: one for each server, metal-engine's first.
        ratio: metal-engine's value divided by the best value of the other servers.
    """

    values: tuple[str, ...]
    ratio: str


def rows_of(notes: str) -> tuple[list[str], dict[tuple[str, str], Row]]:
    """Return the servers' names, and the rows by scenario and measure, e.g. ``("1", "tok/s")``.

    Rows without a value for a server are skipped.
    """
    lines = [line for line in notes[notes.index(SECTION) :].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    servers = cells[0][2:6]
    rows: dict[tuple[str, str], Row] = {}
    scenario = ""
    for line in itertools.takewhile(lambda line: len(line) == 8, cells[2:]):
        scenario = line[0].partition(":")[0] or scenario
        if all(line[2:6]):
            rows[scenario, line[1]] = Row(tuple(line[2:6]), line[6])
    return servers, rows


def chosen(notes: str) -> tuple[list[str], list[tuple[Figure, Row]]]:
    """Return the servers' names, and each of :data:`FIGURES`, which the page shows, with its row of the notes."""
    servers, rows = rows_of(notes)
    return servers, [(figure, rows[figure.scenario, figure.measure]) for figure in FIGURES]


def table(notes: str) -> str:
    """Return the figures as a Markdown table."""
    servers, figures = chosen(notes)
    lines = [f"| | | {' | '.join(servers)} | against the best of the others |", f"|{' --- |' * 7}"]
    for figure, row in figures:
        lines.append(f"| {figure.title} | {figure.unit} | {' | '.join(row.values)} | {row.ratio} |")
    return "\n".join(lines)


def with_table(page: str, notes: str) -> str:
    """Return the page with its table replaced by a new one."""
    before, found, rest = page.partition(BEGIN)
    assert found, f"{PAGE} has no place for the table"
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}{table(notes)}\n{end}{after}"


def draw(notes: str, path: Path) -> None:
    """Draw a bar chart for each figure, each with its own scale.

    Longer bars are better in the upper row of charts, shorter bars in the lower row.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    servers, figures = chosen(notes)
    figure, axes = plt.subplots(2, 4, figsize=(13, 5.2), layout="constrained")
    for axis, (one, row) in zip(axes.flat, figures, strict=True):
        draw_bars(axis, one, servers, row.values, named=axis in axes[:, 0])
    figure.suptitle("The demo model on two CPU cores. Above: longer bars are better. Below: shorter bars.", fontsize=11)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_bars(axis: Any, figure: Figure, servers: list[str], spelled: tuple[str, ...], *, named: bool) -> None:
    """Draw a bar with its value for each server. metal-engine's bar comes first and is coloured."""
    values = [float(value) for value in spelled]
    bars = axis.barh(range(len(values)), values, color=[HIGHLIGHT, *[GREY] * (len(values) - 1)])
    axis.bar_label(bars, spelled, padding=3, fontsize=10)
    axis.set_yticks(range(len(values)), servers if named else [""] * len(values), fontsize=10)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.22 * max(values))
    axis.set_xticks([])
    axis.set_title(f"{figure.title}\n{figure.unit}", fontsize=10, loc="left")
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


if __name__ == "__main__":
    notes = NOTES.read_text(encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), notes), encoding="utf-8")
    draw(notes, CHART)
