"""The same kernel text as SPIR-V: C++ for OpenCL from clang, translated by llvm-spirv.

A SIMD group is a subgroup and a threadgroup a work group. The headers of include/metal_sim/ stay, except for the files
of this folder: operations across lanes, exp2 and its like, and a stand-in for products of matrices.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from ..build import language_flags
from ..errors import CheckError, ToolchainError
from ..signature import Parameter, Signature, matching
from ..source import KERNEL_ATTRIBUTE, preamble, translation_unit
from ..toolchain import cache_dir, key_of, publish
from .packages import Packages

HERE = Path(__file__).parent
ENTRY = "metal_kernel"
_SOURCES = ("lanes.h", "math.h", "matrix.h", "spirv.py")  # files that shape what the cache keeps
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
_TARGET += ["-ffp-contract=on", "-fno-builtin"]
# SPIR-V 1.4 is the newest that Mesa takes.
_TRANSLATE = ["--spirv-max-version=1.4"]


def _id(p: Parameter) -> str:
    """The value of a thread attribute."""
    expression = _IDS.get(p.attribute or "")
    if not expression:
        raise ToolchainError(f"the chain to an Apple GPU's compiler has no {p.attribute}: add it to agx/spirv.py")
    base = p.type.replace("const", "").strip()
    width = int(base[-1]) if base[-1] in "23" else 1
    values = ", ".join(expression.format(i) for i in range(width))
    return f"const {base} {p.name} = {base}({values});"


def _entry(threadgroup: tuple[int, int, int]):  # type: ignore[no-untyped-def]
    """An entry with the kernel's buffers as parameters, and its thread attributes as variables."""

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
    """The translation unit of one kernel of MLX's generated source."""
    include = f"#define METAL_SIM_AGX 1\n{preamble() if include is None else include}"
    unit, _ = translation_unit(
        text, kernel, template_arguments, function_constants, include=include, entry=_entry(threadgroup)
    )
    return unit


def spirv_of(unit: str, name: str, packages: Packages) -> Path:
    """A SPIR-V file of a translation unit, out of the cache if it is there.

    Raises:
        CheckError: the unit does not compile.
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
            raise ToolchainError(f"clang takes not its own IR of {name}:\n{done.stderr}")
        done = packages.run("usr/bin/llvm-spirv-19", [*_TRANSLATE, str(bitcode), "-o", str(made)])
        if done.returncode:
            raise CheckError(f"{name} does not become SPIR-V:\n{done.stderr}")
        publish(made.read_bytes(), kept)
    return kept
