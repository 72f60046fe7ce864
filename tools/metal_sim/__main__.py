"""``python -m tools.metal_sim``: ``report``, ``emit``, ``agx``, ``undef``, ``time``, ``cuda``, ``doctor``.

Each has --help.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "dev" / "kernel_bytes.md"
BUILD = ROOT / "build" / "metal"
REGISTERS = ROOT / "docs" / "dev" / "kernel_registers.md"
TIMES = ROOT / "docs" / "dev" / "kernel_times.md"
DTYPES = ("float16", "bfloat16", "float32")
GENERATIONS = (13, 14)  # generations of Apple GPUs: M1, M2


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
    """Compile kernels with Mesa for M1 and M2, and print their registers and spills.

    Return the exit status: 1 if a kernel does not compile or Mesa is missing, 2 for options that exclude each other.
    """
    import mlx.core as mx

    from .agx.measure import jobs_for, measure, to_json
    from .agx.packages import packages
    from .agx.table import page, plain
    from .errors import ToolchainError
    from .shapes import layers_by_model
    from .variants import record_variants

    if options.write and (options.pattern or options.ways or options.dtype or options.generation):
        print("--write takes every variant: leave out patterns, --ways, --dtype and --generation", file=sys.stderr)
        return 2
    say = (lambda text: print(text, file=sys.stderr)) if sys.stderr.isatty() else (lambda text: None)
    try:
        found = packages()
        recorder = record_variants(layers_by_model(), [getattr(mx, name) for name in options.dtype or DTYPES])
        jobs = jobs_for(recorder.variants.values(), options.ways)
        jobs = [job for job in jobs if all(re.search(pattern, job.row.description) for pattern in options.pattern)]
        generations = options.generation or GENERATIONS
        rows = measure(jobs, options.processes, generations, say)
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    for generation in generations:
        print(f"G{generation} (M{generation - 12})\n{plain(rows, generation)}")
    if options.json:
        options.json.write_text(to_json(rows))
    if options.write:
        REGISTERS.write_text(page(rows, found))
    for row in rows:
        if row.error:
            print(f"{row.description}: {row.error}", file=sys.stderr)
    return any(row.error for row in rows)


def undef(options: argparse.Namespace) -> int:
    """Search for values that loops carry although they are never set. Return the exit status: 1 if any was found."""
    import mlx.core as mx

    from .errors import CheckError, ToolchainError
    from .shapes import layers_by_model
    from .undef import undef_in
    from .variants import record_variants

    try:
        recorder = record_variants(layers_by_model(), [getattr(mx, name) for name in options.dtype or DTYPES])
        variants = [v for v in recorder.variants.values() if all(re.search(p, v.name) for p in options.pattern)]
        bad = 0
        for variant in variants:
            if found := undef_in(variant):
                bad += 1
                print(f"{variant.name}: {found}")
    except (CheckError, ToolchainError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{bad} of {len(variants)} variants carry undefined values through loops")
    return bool(bad)


def predict_times(write: bool) -> int:
    """Print the predicted times of attention on Apple GPUs.

    Args:
        write: True to also write docs/dev/kernel_times.md.

    Returns:
        Exit status: 1 if the kernels cannot be compiled.
    """
    from .errors import CheckError, ToolchainError
    from .times.kernels import compile_kernels
    from .times.page import page

    try:
        text = page(compile_kernels())
    except (CheckError, ToolchainError) as error:
        print(error, file=sys.stderr)
        return 1
    print(text)
    if write:
        TIMES.write_text(text)
    return 0


def cuda() -> int:
    """Run every kernel on a CUDA GPU and compare with float64. Return the exit status: 1 if a kernel is wrong."""
    from .cases import CASES
    from .errors import CheckError, ToolchainError
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
    except (CheckError, ToolchainError) as error:
        print(error, file=sys.stderr)
        return 1
    return bool(wrong)


def doctor() -> int:
    """Print the programs and folders that the simulator uses. Return the exit status: 1 if a program is missing."""
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
        print(f"ptxas       {ptxas() or 'none: PTX is written but not assembled'}")
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.metal_sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("report", help="compare the bytes that the attention kernel moves with the lower bound")
    sub.add_argument("--write", action="store_true", help="also write docs/dev/kernel_bytes.md")
    sub = commands.add_parser("emit", help="write every kernel variant as Metal source, for Apple's compilers")
    sub.add_argument("--out", type=Path, default=BUILD, metavar="FOLDER", help="output folder (default: build/metal)")
    sub.add_argument("--write-list", action="store_true", help="also write .github/metal-kernels.txt")
    dtype = argparse.ArgumentParser(add_help=False)
    dtype.add_argument("--dtype", action="append", choices=DTYPES, help="dtype of kernels; repeatable (default: all)")
    sub = commands.add_parser(
        "agx", parents=[dtype], help="print registers and spills of kernels on M1 and M2, by Mesa's compiler"
    )
    sub.add_argument(
        "pattern",
        nargs="*",
        help='regular expressions; "KERNEL DTYPE SHAPE" must match all of them (default: everything)',
    )
    sub.add_argument("--ways", action="store_true", help="compile paged_attention's direct and staged way separately")
    sub.add_argument(
        "--generation", action="append", type=int, choices=GENERATIONS, help="13: M1; 14: M2 (default: both)"
    )
    sub.add_argument("--processes", type=int, default=2, metavar="N", help="compilers at a time (default: 2)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    sub.add_argument("--write", action="store_true", help="also write docs/dev/kernel_registers.md")
    sub = commands.add_parser(
        "undef", parents=[dtype], help="find values that kernels carry through loops but never set"
    )
    sub.add_argument("pattern", nargs="*", help="regular expressions; a variant's name must match all of them")
    sub = commands.add_parser("time", help="predict times of attention on M1, M2, M4 Max and M3 Ultra with a model")
    sub.add_argument("--write", action="store_true", help="also write docs/dev/kernel_times.md")
    commands.add_parser("cuda", help="run the engine's kernels on a CUDA GPU and compare with float64")
    commands.add_parser("doctor", help="check that everything the simulator needs is installed")
    options = parser.parse_args()
    match options.command:
        case "report":
            return report(options.write)
        case "emit":
            return emit_files(options.out, options.write_list)
        case "agx":
            return agx(options)
        case "undef":
            return undef(options)
        case "time":
            return predict_times(options.write)
        case "cuda":
            return cuda()
        case _:
            return doctor()


if __name__ == "__main__":
    sys.exit(main())
