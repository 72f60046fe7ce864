"""Measures this machine and writes ``mac-report.md`` and ``mac-report.json``: what ``make mac`` runs.

    python -m tools.mac_report demo Qwen/Qwen3-0.6B

On a Mac, this is ``metal-engine doctor --full``. Elsewhere, the simulator runs the kernels, MLX's CPU backend runs all
other computations, and the sizes are small.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from metal_engine.doctor.full import fetch_models, run_full
from metal_engine.doctor.plan import Plan


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", default=["demo"], help="models to measure (default: demo)")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="folder for the report (default: .)")
    args = parser.parse_args()
    plan = Plan() if sys.platform == "darwin" else Plan.short(simulator="tools.metal_sim")
    fetch_models(args.model)
    return int(not run_full(args.model, plan, args.out, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
