"""Check pass: rejects code that is not legal Metal.

Clang parses the kernel as C++ for OpenCL for a SPIR target, with warnings as errors. In that language, device,
constant, threadgroup and thread memory are separate address spaces. Code that the language allows but Metal rejects is
found in the generated IR: recursion, and pointers without an address space.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from .build import ir_of
from .errors import CheckError
from .signature import matching
from .source import VECTOR
from .toolchain import cache_dir, key_of, publish

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    # Style, or noise from generated signatures: MLX passes every attribute and shape that the text mentions.
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

    A success is recorded in the cache, so that the same unit is checked only once.

    Args:
        unit: text of the translation unit.
        name: name of the kernel for error messages.
        own_files: True to require that every pointer in the text names its address space, and to reject code that has
            another meaning in Metal.
    """
    mark = cache_dir() / f"{key_of('check', unit, own_files)}.checked"
    if mark.exists():
        return
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        ir = Path(tmp) / "kernel.ll"
        flags = [
            *_WARNINGS,
            *("-target", "spir64", "-O0", "-g"),
            *("-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64"),  # Metal has no double
        ]
        done = ir_of(unit, flags, Path(tmp), ir, _quiet_headers)
        if done.returncode:
            raise CheckError(f"{name} is not legal Metal:\n{done.stderr}")
        text = ir.read_text()
    problems = _recursion(text) + _program_scope_variables(text)
    if own_files:
        problems += _unqualified_pointers(text) + _opencl_only(unit)
    if problems:
        raise CheckError(f"{name} is not legal Metal:\n" + "\n".join(problems))
    publish("", mark)


def _quiet_headers(unit: str) -> str:
    """Suppress warnings in included headers, so that warnings count only in the kernel's own text."""
    lines, number = unit.split("\n"), 0
    for i, line in enumerate(lines):
        number += 1
        if found := re.match(r"#line (\d+)", line):
            number = int(found[1]) - 1
        elif line.startswith("#include"):
            lines[i] = (
                '#pragma clang diagnostic push\n#pragma clang diagnostic ignored "-Weverything"\n'
                f"{line}\n#pragma clang diagnostic pop\n#line {number + 1}"
            )
    return "\n".join(lines)


def _files(ir: str) -> dict[str, str]:
    """Return metadata node of a file -> its name.

    Files of the kernel's own text are <name>:source and <name>:header.
    """
    return {m[1]: m[2] for m in re.finditer(r'^(!\d+) = !DIFile\(filename: "([^"]+)"', ir, re.M)}


def _described(ir: str, node: str) -> str:
    """Return "file:line: error: 'name'" from a function's or variable's debug information."""
    found = re.search(rf"^{node} = (?:distinct )?!DI\w+\((.*)\)$", ir, re.M)
    fields = found[1] if found else ""
    if expression := re.match(r"var: (!\d+)", fields):
        return _described(ir, expression[1])
    name, where = re.search(r'name: "([^"]+)"', fields), re.search(r"file: (!\d+), line: (\d+)", fields)
    at = f"{_files(ir).get(where[1], '?')}:{where[2]}: " if where else ""
    return f"{at}error: {name[1] if name else '?'!r}"


def _recursion(ir: str) -> list[str]:
    """Return an error if the call graph has a cycle."""
    calls: dict[str, set[str]] = {}
    nodes: dict[str, str] = {}
    current = ""
    for line in ir.split("\n"):
        if found := re.match(r"define .*?@([\w.$]+)\(", line):
            current = found[1]
            calls[current] = set()
            node = re.search(r"!dbg (!\d+)", line)
            nodes[current] = node[1] if node else "!none"
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
            return [f"{_described(ir, nodes[bad])} calls itself: recursion is not for Metal's GPU functions"]
    return []


def _program_scope_variables(ir: str) -> list[str]:
    """Return errors for variables outside functions, and static variables, that are not constant."""
    nodes = re.findall(r"^@[\w.$]+ = .*\baddrspace\(1\) (?:global|constant)\b.*!dbg (!\d+)", ir, re.M)
    return [f"{_described(ir, n)} lives outside functions, so its address space must be constant" for n in nodes]


def _opencl_only(unit: str) -> list[str]:
    """Return problems of code that clang accepts, but Metal rejects or interprets differently."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), unit, flags=re.S)
    problems = []
    for found in re.finditer(r"\blong\s+long\b", text):
        problems.append(f"{_place(unit, found.start())}: error: 'long long' is no type of Metal's; long has 64 bits")
    for found in re.finditer(rf"\(\s*{VECTOR}\s*\)\s*(?=\()", text):
        inside = text[found.end() + 1 : matching(text, found.end()) - 1]
        while inside != (inside := re.sub(r"\([^()]*\)", "", inside)):
            pass
        if "," in inside:
            what = f"{found[0].strip()}(..., ...) is a vector in OpenCL, and a cast of the last value in Metal"
            problems.append(f"{_place(unit, found.start())}: error: {what}")
    return problems


def _place(unit: str, at: int) -> str:
    """Return "file:line" of a position, from the #line directive before it."""
    lines = list(re.finditer(r'^#line (\d+) "([^"]+)"\n', unit[:at], re.M))
    if not lines:
        return "?"
    newlines = unit.count("\n", lines[-1].end(), at)
    return f"{lines[-1][2]}:{int(lines[-1][1]) + newlines}"


def _unqualified_pointers(ir: str) -> list[str]:
    """Return variables and parameters of pointer type in the generic address space, in the kernel's own text."""
    files = _files(ir)
    variables = {m[1]: m[2] for m in re.finditer(r"^(!\d+) = !DILocalVariable\((.*)\)$", ir, re.M)}
    problems = []
    generic: set[str] = set()
    for line in ir.split("\n"):
        if line.startswith("define "):
            generic = set()
        elif found := re.match(r"\s*(%[\w.]+) = alloca ptr addrspace\(4\)", line):
            generic.add(found[1])
        declared = re.search(r"dbg\.declare\(metadata ptr (?:addrspace\(\d+\) )?(%[\w.]+), metadata (!\d+)", line)
        if not declared or declared[1] not in generic:
            continue
        fields = variables.get(declared[2], "")
        where = re.search(r"file: (!\d+), line: (\d+)", fields)
        name = re.search(r'name: "([^"]+)"', fields)
        if "DIFlagArtificial" in fields or not where or not name:
            continue
        file = files.get(where[1], "")
        if re.search(r":(source|header)$", file):
            problems.append(
                f"{file}:{where[2]}: error: the pointer or reference {name[1]!r} names no address space "
                "(device, constant, threadgroup or thread)"
            )
    return sorted(set(problems))
