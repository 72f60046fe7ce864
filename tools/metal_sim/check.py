"""The check pass: is this legal Metal?

Clang parses the kernel as C++ for OpenCL for a SPIR target, where device, constant, threadgroup and thread
memory are address spaces of their own, with warnings as errors. What that language allows and Metal does not is
looked up in the IR it writes: recursion, and pointers that name no address space.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from .build import language_flags
from .errors import CheckError
from .toolchain import cache_dir, key_of, publish, run_clang

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    # Style, or noise from generated signatures (MLX passes every attribute and shape that the text mentions).
    "-Wno-unused-parameter",
    "-Wno-unused-variable",
    "-Wno-unused-const-variable",
    "-Wno-unused-but-set-variable",
    "-Wno-unused-function",
    "-Wno-unused-local-typedef",
    "-Wno-sign-compare",
    "-Wno-missing-braces",
    "-Wno-missing-field-initializers",
    "-Wno-pass-failed",
]


def check(unit: str, name: str, *, own_files: bool = True) -> None:
    """Raise CheckError if the kernel would not compile for Metal.

    ``own_files``: hold the text to the rule that every pointer names its address space.
    """
    mark = cache_dir() / f"{key_of('check', unit, own_files)}.checked"
    if mark.exists():
        return
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        source, ir = Path(tmp) / "kernel.cl", Path(tmp) / "kernel.ll"
        source.write_text(_quiet_headers(unit))
        done = run_clang(
            [*language_flags(), *_WARNINGS, "-target", "spir64", "-O0", "-g"]
            # Metal has no double, no function pointers and no variadic functions.
            + ["-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64", "-emit-llvm", "-S", str(source), "-o", str(ir)]
        )
        if done.returncode:
            raise CheckError(f"{name} is not legal Metal:\n{done.stderr}")
        text = ir.read_text()
    problems = _recursion(text)
    if own_files:
        problems += _unqualified_pointers(text)
    if problems:
        raise CheckError(f"{name} is not legal Metal:\n" + "\n".join(problems))
    publish("", mark)


def _quiet_headers(unit: str) -> str:
    """Warnings count in the kernel's own text, not in MLX's headers."""
    lines = unit.split("\n")
    for i, line in enumerate(lines):
        if line.startswith("#include"):
            lines[i] = (
                "#pragma clang diagnostic push\n#pragma clang diagnostic ignored \"-Weverything\"\n"
                f"{line}\n#pragma clang diagnostic pop\n#line {i + 2}"
            )
    return "\n".join(lines)


def _recursion(ir: str) -> list[str]:
    """A cycle in the call graph."""
    calls: dict[str, set[str]] = {}
    current = ""
    for line in ir.split("\n"):
        if found := re.match(r"define .*?@([\w.$]+)\(", line):
            current = found[1]
            calls[current] = set()
        elif current and (found := re.search(r"\bcall .*?@([\w.$]+)\(", line)):
            calls[current].add(found[1])
    state: dict[str, int] = {}

    def visit(f: str) -> str | None:
        state[f] = 1
        for callee in sorted(calls.get(f, ())):
            if state.get(callee) == 1:
                return callee
            if callee in calls and callee not in state and (bad := visit(callee)):
                return bad
        state[f] = 2
        return None

    for f in calls:
        if f not in state and (bad := visit(f)):
            return [f"error: recursion through {bad}: Metal's GPU functions cannot call themselves"]
    return []


def _unqualified_pointers(ir: str) -> list[str]:
    """Variables and parameters of pointer type in the generic address space, in the kernel's own text."""
    # Unnamed address spaces are those of <name>:source and <name>:header, the files that #line names.
    files = {m[1]: m[2] for m in re.finditer(r'^(!\d+) = !DIFile\(filename: "([^"]+)"', ir, re.M)}
    generic = set(re.findall(r"(%[\w.]+) = alloca ptr addrspace\(4\)", ir))
    declared = re.findall(r"@llvm\.dbg\.declare\(metadata ptr (?:addrspace\(\d+\) )?(%[\w.]+), metadata (!\d+)", ir)
    variables = {
        m[1]: m[2] for m in re.finditer(r"^(!\d+) = !DILocalVariable\((.*)\)$", ir, re.M)
    }
    problems = []
    for slot, number in declared:
        fields = variables.get(number, "")
        where = re.search(r"file: (!\d+), line: (\d+)", fields)
        name = re.search(r'name: "([^"]+)"', fields)
        if slot not in generic or "DIFlagArtificial" in fields or not where or not name:
            continue
        file = files.get(where[1], "")
        if re.search(r":(source|header)$", file):
            problems.append(
                f"{file}:{where[2]}: error: the pointer or reference {name[1]!r} names no address space "
                "(device, constant, threadgroup or thread)"
            )
    return sorted(set(problems))
