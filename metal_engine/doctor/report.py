"""Writes the full report as Markdown for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from metal_engine.doctor.figures import Figure, SectionResult, Verdict, format_number

MARKDOWN, JSON = "mac-report.md", "mac-report.json"
# Version of the JSON format.
_FORMAT = 1
_HEAD = "| figure | measured | promised | verdict | if worse |\n| --- | ---: | ---: | --- | --- |\n"
_NO_FLAG = "no flag helps"
_SEND = f"""## Send this report

Open an issue in the project's repository, and attach `{JSON}` and this file. Both contain the names of the models,
facts about the machine, and the settings and folders of metal-engine. Keys are left out, and your home folder is `~`.
"""


def write_report(results: Sequence[SectionResult], folder: Path) -> tuple[Path, Path]:
    """Write ``mac-report.md`` and ``mac-report.json`` to a folder. Return their paths."""
    paths = folder / MARKDOWN, folder / JSON
    paths[0].write_text(markdown(results), encoding="utf-8")
    paths[1].write_text(json.dumps(to_json(results), indent=1) + "\n", encoding="utf-8")
    return paths


def to_json(results: Sequence[SectionResult]) -> dict[str, Any]:
    """Return the report as JSON values."""
    sections = []
    for result in results:
        figures = [
            {**asdict(figure), "value": _finite(figure.value), "verdict": figure.verdict} for figure in result.figures
        ]
        facts: dict[str, str] = {}
        for label, text in result.facts:  # several facts may have the same label, such as one for each type of KV
            facts[label] = f"{facts[label]}; {text}" if label in facts else text
        sections.append({**asdict(result), "facts": facts, "figures": figures})
    return {"format": _FORMAT, "verdicts": dict(count_verdicts(results)), "sections": sections}


def _finite(value: float | None) -> float | str | None:
    """Return a number, or ``nan``, ``inf`` or ``-inf`` as text, because JSON lacks these numbers."""
    return value if value is None or abs(value) < float("inf") else str(value)


def count_verdicts(results: Sequence[SectionResult]) -> Counter[Verdict]:
    """Return the number of figures with each verdict."""
    return Counter(figure.verdict for result in results for figure in result.figures)


def summary(results: Sequence[SectionResult]) -> list[str]:
    """Return lines about the whole report: counts of verdicts, failures, and what is worse than promised."""
    counts = count_verdicts(results)
    lines = [", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict) + "."]
    for result in results:
        if result.error:
            lines.append(f"**{_title(result)} failed**: {result.error}")
        for figure in result.figures:
            if figure.verdict is Verdict.WORSE and figure.promise is not None:
                kind = "wrong" if figure.is_failure else "worse"
                remedy = figure.promise.flag or _NO_FLAG
                lines.append(
                    f"{kind}: {_title(result)}, {figure.name}: {_value(figure)}, promised {figure.promise}; {remedy}"
                )
    return lines


def markdown(results: Sequence[SectionResult]) -> str:
    """Return the report as Markdown."""
    simulated = any(figure.is_simulated for result in results for figure in result.figures)
    parts = ["# metal-engine on this machine\n"]
    if simulated:
        parts.append("There is no Metal here. Figures marked *simulated* come from the simulator of the kernels.\n")
    parts.append("\n".join(f"- {line}" for line in summary(results)) + "\n")
    for result in results:
        parts.append(f"## {_title(result)}\n")
        if result.facts:
            parts.append("\n".join(f"- {label}: {text}" for label, text in result.facts) + "\n")
        if result.figures:
            parts.append(_HEAD + "".join(map(_row, result.figures)))
        if result.error:
            parts.append(f"**Failed:** {result.error}\n")
        parts.append(f"Took {result.seconds:.0f} s.\n")
    return "\n".join([*parts, _SEND])


def _title(result: SectionResult) -> str:
    return f"{result.name}: {result.model}" if result.model else result.name


def _row(figure: Figure) -> str:
    promise, verdict, remedy = figure.promise, str(figure.verdict), ""
    if promise is not None and figure.verdict is Verdict.WORSE:
        verdict, remedy = "**wrong**" if figure.is_failure else "**worse**", promise.flag or _NO_FLAG
    name = f"{figure.name}, *simulated*" if figure.is_simulated else figure.name
    cells = (name, _value(figure), "" if promise is None else str(promise), verdict, remedy)
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def _value(figure: Figure) -> str:
    if figure.value is None:
        return figure.note
    unit = f" {figure.unit}" if figure.unit else ""
    note = f" ({figure.note})" if figure.note else ""
    return f"{format_number(figure.value)}{unit}{note}"
