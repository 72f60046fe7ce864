"""``python -m tools.metal_sim report [--write]``, ``... doctor``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "docs" / "kernel_bytes.md"


def report(write: bool) -> int:
    from metal_engine.device.blas.load import load_optimized_blas

    load_optimized_blas()
    from .report import table

    text, lines = table()
    print(text)
    if write:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(text)
    bad = [line.shape.name for line in lines if line.ratio > line.shape.allowed]
    for name in bad:
        print(f"over the bound: {name}", file=sys.stderr)
    return bool(bad)


def doctor() -> int:
    """Is everything there that the simulator needs?"""
    from .errors import ToolchainError
    from .source import mlx_headers, mlx_version
    from .toolchain import cache_dir, clang, runtime_library, symbolizer

    try:
        print(f"clang       {clang()}")
        print(f"symbolizer  {symbolizer()[0]}")
        print(f"runtime     {runtime_library()}")
        print(f"MLX         {mlx_version()}, headers {mlx_headers()}")
        print(f"cache       {cache_dir()}")
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.metal_sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("report", help="bytes that the attention kernel moves, beside the lower bound")
    sub.add_argument("--write", action="store_true", help="also write docs/kernel_bytes.md")
    commands.add_parser("doctor", help="is everything there that the simulator needs")
    options = parser.parse_args()
    return report(options.write) if options.command == "report" else doctor()


if __name__ == "__main__":
    sys.exit(main())
