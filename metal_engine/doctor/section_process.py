"""Runs one section of the full report. Run as a program, so that the section has a process of its own.

A crash of Metal or MLX then ends only one section, and each section starts with its own limits of command buffers. The
program reads a JSON object from standard input, with the section's module, the plan, the model and a path. It appends
each fact and figure to the file at that path, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from metal_engine.doctor.figures import Figure
from metal_engine.doctor.plan import Plan

# A fact is a pair of a label and a text.
Item = Figure | tuple[str, str]


def run_section(module: str, plan: Plan, model: str, on_item: Callable[[Item], None]) -> None:
    """Run a section in this process.

    Args:
        module: module in ``metal_engine.doctor.sections``.
        model: name of the model; empty if the section needs no model.
        on_item: callback that receives each fact and figure.
    """
    from metal_engine.checkpoints.known_config import limit_command_buffers
    from metal_engine.device.blas.load import load_optimized_blas
    from metal_engine.settings.args import EngineArgs

    limit_command_buffers([EngineArgs(model=model or "demo")])
    load_optimized_blas()  # before the section imports MLX
    measure: Callable[[Plan, str], Iterator[Item]] = import_module(f"metal_engine.doctor.sections.{module}").measure
    for item in measure(plan, model):
        on_item(item)


def main() -> None:
    """Run the section that standard input describes."""
    given: dict[str, Any] = json.load(sys.stdin)
    with Path(given["path"]).open("a", encoding="utf-8") as file:

        def write(item: Item) -> None:
            file.write(json.dumps(asdict(item) if isinstance(item, Figure) else item) + "\n")
            file.flush()

        run_section(given["module"], Plan.of(given["plan"]), given["model"], write)


if __name__ == "__main__":
    main()
