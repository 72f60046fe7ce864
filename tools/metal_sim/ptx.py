"""Kernels for a CUDA GPU from the same text: PTX from clang, assembled by ptxas if available.

A SIMD group becomes a warp and a threadgroup a block. The kernel runs with real concurrency and unrolled loops, and
NVIDIA's compute-sanitizer can check it. Most headers of include/metal_sim/ are used unchanged. cuda/ replaces
operations across lanes and a few functions. Writing PTX needs neither a GPU nor a CUDA toolkit. A driver compiles PTX
for its GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .build import language_flags
from .errors import CheckError, ToolchainError
from .signature import Parameter, Signature, matching
from .source import KERNEL_ATTRIBUTE, id_expression, preamble, translation_unit
from .toolchain import cache_dir, key_of, publish, run_clang

ENTRY = "metal_kernel"
ARCHITECTURE = "sm_80"  # oldest supported target; newer GPUs accept its PTX too
_TARGET = [
    *("-target", "nvptx64-nvidia-cuda", "-nocudalib", "-Wno-unknown-cuda-version", "-w"),
    *("-Xclang", "-target-cpu", "-Xclang", ARCHITECTURE, "-Xclang", "-target-feature", "-Xclang", "+ptx71"),
]


def cuda_entry(signature: Signature, text: str) -> str:
    """Return the kernel with its buffers and the grid as parameters, and its thread attributes as variables."""
    parameters, variables = [], []
    for p in signature.parameters:
        if p.attribute:
            variables.append(f"const {p.type.replace('const', '').strip()} {p.name} = {id_expression(p)};")
        elif p.type.endswith("&"):
            parameters.append(f"{p.type[:-1]}* ms_{p.name}")
            variables.append(f"{p.type} {p.name} = *ms_{p.name};")
        else:
            parameters.append(f"{p.type} {p.name}")
    parameters += [f"uint ms_grid_{axis}" for axis in "xyz"]
    closing = matching(text, text.index("(", re.match(KERNEL_ATTRIBUTE, text).end()))  # type: ignore[union-attr]
    start = "uint ids[54]; if (!ms_ids(ids, ms_this_place(), ms_grid_x, ms_grid_y, ms_grid_z)) return; "
    body = text[text.index("{", closing) + 1 :]
    return f"kernel void {ENTRY}({', '.join(parameters)}) {{ {start}{' '.join(variables)} {body}"


@dataclass(frozen=True)
class Ptx:
    """Kernel as PTX. Its entry, ENTRY, takes the buffers' addresses in order, then the sizes of Metal's grid."""

    text: str
    buffers: tuple[Parameter, ...]


def ptx_of(text: str, kernel: str, template_arguments: list[str]) -> Ptx:
    """Return the PTX of one kernel in MLX's generated source.

    Raises:
        CheckError: the kernel does not compile, or calls a function missing in PTX and cuda/.
    """
    include = f"#define METAL_SIM_CUDA 1\n{preamble()}"
    unit, signature = translation_unit(text, kernel, template_arguments, include=include, entry=cuda_entry)
    kept = cache_dir() / f"{key_of('ptx', unit)}.ptx"
    if kept.exists():
        return Ptx(kept.read_text(), signature.buffers)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        source, raw, ir, made = (Path(tmp) / n for n in ("kernel.cl", "raw.ll", "kernel.ll", "kernel.ptx"))
        source.write_text(unit)
        flags = ["-O3", *_TARGET]
        parse = ["-Xclang", "-cl-ext=+all", "-Xclang", "-disable-llvm-passes", "-emit-llvm", "-S"]
        done = run_clang([*language_flags(), *flags, *parse, str(source), "-o", str(raw)])
        if done.returncode:
            raise CheckError(f"{kernel} does not compile for CUDA:\n{done.stderr}")
        # Metal's constant memory can hold any buffer. In PTX it is a bank of 64 KiB for data known at compile time.
        ir.write_text(raw.read_text().replace("addrspace(4)", "addrspace(1)"))
        done = run_clang(["-x", "ir", str(ir), *flags, "-S", "-o", str(made)])
        if done.returncode:
            raise CheckError(f"clang makes no PTX of {kernel}:\n{done.stderr}")
        ptx = made.read_text()
    if missing := re.findall(r"^\.extern \.func .*?(\w+)\s*$", ptx, re.M):
        raise CheckError(f"{kernel} calls {', '.join(missing)}, which tools/metal_sim/cuda lacks")
    publish(ptx, kept)
    return Ptx(ptx, signature.buffers)


@dataclass(frozen=True)
class Assembled:
    """Figures from ptxas for a kernel, for ARCHITECTURE."""

    registers: int  # 32-bit registers per thread
    spilled: int  # bytes stored because of missing registers
    shared: int  # bytes of threadgroup memory


@cache
def ptxas() -> str | None:
    """Return the path of NVIDIA's assembler; None if it is not installed.

    Tried in this order: METAL_SIM_PTXAS, the PATH, a CUDA toolkit, and the package nvidia-cuda-nvcc-cu12.
    """
    package = importlib.util.find_spec("nvidia")
    folders = [Path(p) / "cuda_nvcc" / "bin" for p in (package.submodule_search_locations or ())] if package else []
    candidates = [os.environ.get("METAL_SIM_PTXAS"), "ptxas", "/usr/local/cuda/bin/ptxas"]
    for name in [*candidates, *(str(folder / "ptxas") for folder in folders)]:
        if name and (path := shutil.which(name)):
            return path
    return None


def assemble(ptx: str, name: str) -> Assembled:
    """Assemble PTX with ptxas. Return the figures that ptxas prints.

    Raises:
        CheckError: ptxas rejects the PTX.
        ToolchainError: there is no ptxas.
    """
    program = ptxas()
    if not program:
        raise ToolchainError("no ptxas found: install CUDA's compiler, or set METAL_SIM_PTXAS")
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        source = Path(tmp) / "kernel.ptx"
        source.write_text(ptx)
        command = [program, f"-arch={ARCHITECTURE}", "-v", str(source), "-o", str(Path(tmp) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        raise CheckError(f"ptxas refuses {name}:\n{said}")

    def number(pattern: str) -> int:
        found = re.search(pattern, said)
        return int(found[1]) if found else 0

    return Assembled(number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes smem"))
