"""``python -m tools.metal_sim``: ``report``, ``emit``, ``agx``, ``cuda``, ``doctor``; each has --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "kernel_bytes.md"
BUILD = ROOT / "build" / "metal"


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


def emit_files(folder: Path, write_list: bool) -> int:
    from .emit import LISTING, emit, write_listing
    from .errors import ToolchainError

    try:
        recorder = emit(folder)
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(recorder.variants)} variants in {folder}")
    if refused := dict.fromkeys(layer.split()[0] for _, layer, _ in recorder.refused):
        print(f"no kernel for {', '.join(refused)}: see its manifest.json")
    if write_list:
        write_listing(recorder)
        print(f"listed in {LISTING}")
    return 0


def agx(options: argparse.Namespace) -> int:
    """Compile kernels with Mesa for M1 and M2."""
    import mlx.core as mx

    from .agx.measure import WAYS, measure, selected, to_json
    from .agx.table import plain
    from .errors import ToolchainError
    from .shapes import layers_by_model
    from .variants import record_variants

    ways: list[str | None] = [*WAYS] if options.ways else [None]
    try:
        recorder = record_variants(layers_by_model(), [getattr(mx, name) for name in options.dtype])
        variants = selected(recorder.variants.values(), options.pattern)
        rows = measure(variants, ways, options.jobs, options.generation)
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    for generation in options.generation:
        print(f"G{generation} (M{generation - 12})\n{plain(rows, generation)}")
    if options.json:
        options.json.write_text(to_json(rows))
    for row in rows:
        if row.error:
            print(f"{row.kernel} {row.dtype}: {row.label}: {row.error}", file=sys.stderr)
    return any(row.error for row in rows)


def cuda() -> int:
    """Run every kernel on a CUDA GPU and compare with float64."""
    from .cases import CASES
    from .errors import ToolchainError
    from .nvidia import cuda_kernel, driver

    try:
        print(driver().name)
        wrong = 0
        for case in CASES:
            error = case.error(cuda_kernel)
            ok = error <= case.allowed
            wrong += not ok
            print(
                f"{case.name}: largest relative error {error:.1e}, allowed {case.allowed:.0e}{'' if ok else ': WRONG'}"
            )
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    return bool(wrong)


def doctor() -> int:
    """Is everything there that the simulator needs?"""
    from .errors import ToolchainError
    from .ptx import ptxas
    from .source import mlx_headers, mlx_version
    from .toolchain import cache_dir, clang, runtime_library, symbolizer

    try:
        print(f"clang       {clang()}")
        print(f"symbolizer  {symbolizer()[0]}")
        print(f"runtime     {runtime_library()}")
        print(f"MLX         {mlx_version()}, headers {mlx_headers()}")
        print(f"cache       {cache_dir()}")
        print(f"ptxas       {ptxas() or 'none: PTX is written, and not assembled'}")
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.metal_sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("report", help="bytes that the attention kernel moves, beside the lower bound")
    sub.add_argument("--write", action="store_true", help="also write docs/kernel_bytes.md")
    sub = commands.add_parser("emit", help="write every kernel variant as Metal source, for Apple's compilers")
    sub.add_argument("--out", type=Path, default=BUILD, metavar="FOLDER", help="where to (default: build/metal)")
    sub.add_argument("--write-list", action="store_true", help="also write .github/metal-kernels.txt")
    sub = commands.add_parser("agx", help="registers and spills of kernels on M1 and M2, by Mesa's compiler for them")
    sub.add_argument(
        "pattern",
        nargs="*",
        help='regular expressions, all of which "KERNEL DTYPE SHAPE" must match; all kernels if none',
    )
    sub.add_argument("--ways", action="store_true", help="compile paged_attention's direct and staged way separately")
    dtypes = ("float16", "bfloat16", "float32")
    sub.add_argument("--dtype", action="append", choices=dtypes, help="dtype to compile for; repeatable (default: all)")
    sub.add_argument("--generation", action="append", type=int, choices=(13, 14), help="13: M1; 14: M2 (default: both)")
    sub.add_argument("--jobs", type=int, default=2, metavar="N", help="processes side by side (default: 2)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    commands.add_parser("cuda", help="run the engine's kernels on a CUDA GPU, against float64")
    commands.add_parser("doctor", help="is everything there that the simulator needs")
    options = parser.parse_args()
    match options.command:
        case "report":
            return report(options.write)
        case "emit":
            return emit_files(options.out, options.write_list)
        case "agx":
            options.dtype, options.generation = options.dtype or list(dtypes), options.generation or [13, 14]
            return agx(options)
        case "cuda":
            return cuda()
        case _:
            return doctor()


if __name__ == "__main__":
    sys.exit(main())
