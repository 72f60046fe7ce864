"""Translates a kernel's text to SPIR-V. Clang compiles C++ for OpenCL, and llvm-spirv translates clang's output.

A SIMD group becomes a subgroup, and a threadgroup becomes a work group. The headers of this folder replace some of
include/metal_sim/: operations across lanes, exp2 and similar functions, and products of matrices.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..build import language_flags
from ..errors import CheckError, ToolchainError
from ..signature import Parameter, Signature, matching
from ..source import KERNEL_ATTRIBUTE, preamble, translation_unit
from ..toolchain import cache_dir, key_of, publish
from .packages import Packages

HERE = Path(__file__).parent
ENTRY = "metal_kernel"
_SOURCES = ("lanes.h", "math.h", "matrix.h", "spirv.py")  # files on which cached results depend
_IDS = {
    "thread_position_in_grid": "uint(get_global_id({}))",
    "thread_position_in_threadgroup": "uint(get_local_id({}))",
    "threadgroup_position_in_grid": "uint(get_group_id({}))",
    "threads_per_threadgroup": "uint(get_local_size({}))",
    "dispatch_threads_per_threadgroup": "uint(get_local_size({}))",
    "threadgroups_per_grid": "uint(get_num_groups({}))",
    "threads_per_grid": "uint(get_global_size({}))",
    "grid_size": "uint(get_global_size({}))",
    "thread_index_in_threadgroup": "uint(get_local_linear_id())",
    "thread_index_in_simdgroup": "get_sub_group_local_id()",
    "simdgroup_index_in_threadgroup": "get_sub_group_id()",
    "simdgroups_per_threadgroup": "get_num_sub_groups()",
    "threads_per_simdgroup": "32u",
}
_TARGET = ["-O2", "-fno-vectorize", "-fno-slp-vectorize", "-w", "-target", "spir64", "-Xclang", "-cl-ext=+all"]
# If builtins are enabled, clang turns a loop that sets an array into a memset, and llvm-spirv adds a constant array.
_TARGET += ["-ffp-contract=on", "-fno-builtin"]
# Version 1.4 is the first with a select of vectors by a scalar condition.
_TRANSLATE = ["--spirv-max-version=1.4"]


def _id(p: Parameter) -> str:
    """Return the declaration of a thread attribute as a variable. Raises ToolchainError for an unknown attribute."""
    expression = _IDS.get(p.attribute or "")
    if not expression:
        raise ToolchainError(f"agx/spirv.py does not know the thread attribute {p.attribute}")
    base = p.type.replace("const", "").strip()
    width = int(base[-1]) if base[-1] in "23" else 1
    values = ", ".join(expression.format(i) for i in range(width))
    return f"const {base} {p.name} = {base}({values});"


def _entry(threadgroup: tuple[int, int, int]) -> Callable[[Signature, str], str]:
    """Return a function that makes an OpenCL entry: buffers become parameters, thread attributes variables."""

    def made(signature: Signature, text: str) -> str:
        parameters, variables = [], []
        for p in signature.parameters:
            if p.attribute:
                variables.append(_id(p))
            elif p.type.endswith("&"):
                parameters.append(f"{p.type[:-1]}* ms_{p.name}")
                variables.append(f"{p.type} {p.name} = *ms_{p.name};")
            else:
                parameters.append(f"{p.type} {p.name}")
        closing = matching(text, text.index("(", re.match(KERNEL_ATTRIBUTE, text).end()))  # type: ignore[union-attr]
        body = text[text.index("{", closing) + 1 :]
        size = ", ".join(map(str, threadgroup))
        head = f"kernel void __attribute__((reqd_work_group_size({size}))) {ENTRY}({', '.join(parameters)})"
        return f"{head} {{ {' '.join(variables)} {body}"

    return made


def unit_of(
    text: str,
    kernel: str,
    template_arguments: list[str],
    threadgroup: tuple[int, int, int],
    include: str | None = None,
    function_constants: dict[str, object] | None = None,
) -> str:
    """Return the translation unit of one kernel in MLX's generated source."""
    include = f"#define METAL_SIM_AGX 1\n{preamble() if include is None else include}"
    unit, _ = translation_unit(
        text, kernel, template_arguments, function_constants, include=include, entry=_entry(threadgroup)
    )
    return unit


def spirv_of(unit: str, name: str, packages: Packages) -> Path:
    """Return a SPIR-V file of a translation unit, from the cache if possible.

    Raises:
        CheckError: the unit does not compile.
        ToolchainError: clang rejects its own output.
    """
    sources = [(HERE / name).read_text() for name in _SOURCES]
    kept = cache_dir() / f"{key_of('spirv', unit, packages.key, *sources)}.spv"
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        source, ir, bitcode, made = (Path(tmp) / n for n in ("kernel.clcpp", "kernel.ll", "kernel.bc", "kernel.spv"))
        source.write_text(unit)
        done = packages.run_clang([*language_flags(), *_TARGET, "-emit-llvm", "-S", str(source), "-o", str(ir)])
        if done.returncode:
            raise CheckError(f"{name} does not compile for OpenCL:\n{done.stderr}")
        text = re.sub(r"^!opencl.cxx.version = .*\n", "", ir.read_text(), flags=re.M)
        ir.write_text(re.sub(r", !llvm.loop !\d+", "", text))
        flags = ["-target", "spir64", "-Xclang", "-disable-llvm-passes", "-w"]
        done = packages.run_clang(["-x", "ir", str(ir), *flags, "-emit-llvm", "-c", "-o", str(bitcode)])
        if done.returncode:
            raise ToolchainError(f"clang rejects its own IR of {name}:\n{done.stderr}")
        done = packages.run("usr/bin/llvm-spirv-19", [*_TRANSLATE, str(bitcode), "-o", str(made)])
        if done.returncode:
            raise CheckError(f"{name} does not become SPIR-V:\n{done.stderr}")
        publish(made.read_bytes(), kept)
    return kept
