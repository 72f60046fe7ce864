"""Measures this machine and writes ``mac-report.md`` and ``mac-report.json``. ``make mac`` runs this module.

    python -m tools.mac_report demo Qwen/Qwen3-0.6B

On a Mac, this is ``metal-engine doctor --full``. Elsewhere, the simulator runs the kernels, MLX's CPU backend runs all
other computations, and the sizes are small.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from metal_engine.doctor.full import choose_plan, fetch_models, run_full


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", default=["demo"], help="models to measure (default: demo)")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="folder for the report (default: .)")
    args = parser.parse_args()
    fetch_models(args.model)
    return int(not run_full(args.model, choose_plan("tools.metal_sim"), args.out, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
