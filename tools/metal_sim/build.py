"""Run pass: compiles a translation unit to a library in which every memory access calls the runtime.

Clang writes unoptimised LLVM IR. In it, threadgroup variables are internal globals with undefined contents, from which
an optimiser would draw wrong conclusions. They are moved into one arena, each between two gaps. Optimisation comes
before instrumentation, so that optimised code is counted.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import CheckError, ToolchainError
from .source import mlx_headers, preamble
from .toolchain import INCLUDE, cache_dir, host_features, key_of, publish, run_clang

LANGUAGE = [
    "-x",
    "clcpp",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-cl-single-precision-constant",
    "-ffp-contract=off",
    "-Wno-unknown-attributes",
]
GAP = 128  # bytes on both sides of a threadgroup variable
# Pragmas that request unrolling are removed: unrolled loops take minutes to instrument and give the same results. The
# check pass (check.py) keeps the pragmas.
_UNROLLING = re.compile(r"^[ \t]*#pragma clang loop unroll.*$", re.M)
# The smallest normal half is 2^-14; the IR spells numbers as doubles.
_FLUSHED = """
define internal float @ms_flushed(float %x) alwaysinline {
  %below = fcmp olt float %x, 0x3F10000000000000
  %above = fcmp ogt float %x, 0xBF10000000000000
  %small = and i1 %below, %above
  %result = select i1 %small, float 0.0, float %x
  ret float %result
}
"""
_NO_VECTORS = ["-fno-vectorize", "-fno-slp-vectorize"]


# Unoptimised LLVM IR as text.
_TO_IR = ("-Xclang", "-disable-llvm-passes", "-emit-llvm", "-S")


def language_flags() -> list[str]:
    return [*LANGUAGE, f"-I{INCLUDE}", f"-I{mlx_headers()}"]


@cache
def _precompiled(text: str, flags: tuple[str, ...]) -> Path | None:
    """Return the precompiled header of a preamble for a command's flags. Compiles it at first use.

    None if clang cannot compile it.
    """
    # The header names its files by path, and clang refuses it for other flags.
    header = cache_dir() / f"{key_of('precompiled', text, flags)}.pch"
    if header.exists():
        return header
    source = header.with_suffix(".cl")  # must exist as long as the header
    publish(text, source)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        made = Path(tmp) / "preamble.pch"
        # Without times of files: a checkout changes them, and the contents are part of the key.
        emit = ["-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp"]
        if run_clang([*flags, "-S", *emit, str(source), "-o", str(made)]).returncode:
            return None
        os.replace(made, header)
    return header


def ir_of(
    unit: str, flags: list[str], folder: Path, out: Path, prepared: Callable[[str], str]
) -> subprocess.CompletedProcess[str]:
    """Compile a translation unit to LLVM IR without optimisation. Return the finished process of clang.

    Most of the time would be spent on the preamble, so it is precompiled. A unit that fails is compiled again without
    the precompiled preamble, whose messages are returned.

    Args:
        flags: flags besides the language's.
        folder: folder for the source file.
        out: path of the IR.
        prepared: function that returns the text to compile for the unit, or for a part of it.
    """
    source = folder / "kernel.cl"
    flags = [*language_flags(), *flags]
    command = [*_TO_IR, str(source), "-o", str(out)]
    if unit.startswith(preamble()) and (header := _precompiled(prepared(preamble()), tuple(flags))):
        source.write_text(prepared("\n" + unit.removeprefix(preamble())))
        done = run_clang([*flags, "-include-pch", str(header), *command])
        if not done.returncode:
            return done
    source.write_text(prepared(unit))
    return run_clang([*flags, *command])


@dataclass(frozen=True)
class Built:
    """Compiled kernel."""

    library: Path
    variables: tuple[str, ...]  # names of its threadgroup variables, in the order of the arena


def _arena(ir: str) -> tuple[str, list[str]]:
    """Move the threadgroup variables of a module into an arena. Return the new IR and their names."""
    pattern = re.compile(r"^(@[^\s=]+) = internal global (.+?) undef, align \d+(.*)$", re.M)
    found = list(pattern.finditer(ir))
    gap = f"[{GAP} x i8]"
    fields = ", ".join([gap, *(f"{m[2]}, {gap}" for m in found)])
    arena = f"%ms_arena = type {{ {fields} }}\n@ms_arena = global %ms_arena zeroinitializer, align 128\n"
    place = "ptr getelementptr (%ms_arena, ptr @ms_arena, i32 0, i32 {})"
    rows = []
    for i, m in enumerate(found):
        arena += f"{m[1]} = weak hidden alias {m[2]}, {place.format(2 * i + 1)}\n"
        size = f"i64 ptrtoint (ptr getelementptr ({m[2]}, ptr null, i32 1) to i64)"
        rows.append(f"{{ ptr, i64 }} {{ {place.format(2 * i + 1)}, {size} }}")
    table = f"@ms_variables = constant [{len(rows)} x {{ ptr, i64 }}] [{', '.join(rows)}]\n"
    # An optimiser that merges two calls would hide that threads wait at different barriers.
    ir = re.sub(
        r"^( +(?:%\S+ = )?(?:tail )?call [^\n]*@(?!llvm\.)[^\n]*?\))((?: #\d+)?(?:, !.*)?)$",
        r"\1 nomerge\2",
        ir,
        flags=re.M,
    )
    # The IR verifier expects debug information only on definitions, and an alias is not a definition.
    ir = pattern.sub("", ir)
    if found:
        ir += f"\n{arena}{table}"  # at the end, because an address within a type needs the type's definition before it
    names = [re.sub(r'^@"?_ZZ.*?E(\d+)(\w+?)"?$', lambda m: m[2][: int(m[1])], m[1]) for m in found]
    return ir, names


def _flush_half(ir: str) -> str:
    """Make every conversion from float to half return zero instead of a subnormal number.

    Takes IR before its optimisation.
    """
    count = itertools.count()

    def flushed(found: re.Match[str]) -> str:
        number = f"%ms_flushed{next(count)}"
        return f"{found[1]}{number} = call float @ms_flushed(float {found[3]})\n{found[1]}{found[2]}{number} to half"

    return re.sub(r"^( +)(%\S+ = fptrunc float )(\S+) to half", flushed, ir, flags=re.M) + _FLUSHED


def build(unit: str, name: str, *, flushes_half: bool = False) -> Built:
    """Compile for the host, or return the cached library.

    Args:
        unit: text of the translation unit.
        name: name of the kernel for error messages.
        flushes_half: True to round subnormal numbers to zero in conversions to half, as some GPUs do.

    Raises:
        CheckError: the unit does not compile.
        ToolchainError: clang cannot optimise or link its output.
    """
    key = key_of("run", unit, *(["flushes half"] if flushes_half else []))
    library = cache_dir() / f"{key}.so"
    listing = cache_dir() / f"{key}.variables"
    if library.exists() and listing.exists():
        return Built(library, tuple(listing.read_text().split()))
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        raw, ir, optimised, made = (str(Path(tmp) / n) for n in ("raw.ll", "kernel.ll", "optimised.ll", "kernel.so"))
        checks = "-fsanitize=kernel-address,array-bounds,alignment,shift-exponent,integer-divide-by-zero"
        flags = ["-O2", "-gline-tables-only", "-fPIC", *host_features(), "-w"]
        done = ir_of(unit, [*flags, checks], Path(tmp), Path(raw), lambda text: _UNROLLING.sub("", text))
        if done.returncode:
            raise CheckError(f"{name} does not compile:\n{done.stderr}")
        text, names = _arena(Path(raw).read_text())
        if flushes_half:
            text = _flush_half(text)
        Path(ir).write_text(text)
        instrument = []
        for option in (
            "asan-instrumentation-with-call-threshold=0",
            "asan-globals=0",
            "asan-stack=0",
            "asan-opt=0",
            "asan-kernel-mem-intrinsic-prefix=1",
        ):
            instrument += ["-mllvm", f"-{option}"]
        # The linker takes as long for C++'s library, which no kernel uses, as clang for a small kernel.
        libraries = ["-nodefaultlibs", "-lm", "-lgcc"]
        if os.uname().sysname == "Darwin":
            libraries = ["-undefined", "dynamic_lookup", "-lm"]
        done = run_clang(
            [
                *("-x", "ir", ir, *flags, *_NO_VECTORS, "-fsanitize=kernel-address,local-bounds", *instrument),
                *("-emit-llvm", "-S", "-o", optimised),
            ]
        )
        if done.returncode:
            raise ToolchainError(f"cannot optimise {name} for the host:\n{done.stderr}")
        # Calls that local-bounds inserts where an access leaves an array of the thread.
        trap = r"call void @llvm\.(?:trap\(\)|ubsantrap\(i8 \d+\))"  # depends on clang's version
        text = re.sub(trap, "call void @__ms_thread_bounds()", Path(optimised).read_text())
        Path(optimised).write_text(text + "\ndeclare void @__ms_thread_bounds() noreturn nounwind\n")
        done = run_clang(
            [*("-x", "ir", optimised, *flags, "-Xclang", "-disable-llvm-passes"), *("-shared", *libraries, "-o", made)]
        )
        if done.returncode:
            raise ToolchainError(f"cannot build {name} for the host:\n{done.stderr}")
        listing.write_text("\n".join(names))
        os.replace(made, library)
    return Built(library, tuple(names))
