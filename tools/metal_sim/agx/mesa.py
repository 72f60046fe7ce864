"""Compiles SPIR-V for an Apple GPU with Mesa, over a stand-in for the kernel driver."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ..errors import CheckError, ToolchainError
from ..toolchain import cache_dir, publish, run_clang
from .listing import Compiled, Loop, read
from .packages import Packages

HERE = Path(__file__).parent
GENERATIONS = (13, 14)  # generations of Apple GPUs: M1, M2
_ICD = "libRusticlOpenCL.so.1"
# Files on which the cached results of this module depend.
_SOURCES = ("device.h", "device.c", "compile.c", "mesa.py", "listing.py")


def _key(packages: Packages, *parts: object) -> str:
    h = hashlib.sha256(packages.key.encode())
    for name in _SOURCES:
        h.update((HERE / name).read_bytes())
    h.update(repr(parts).encode())
    return h.hexdigest()[:32]


@cache
def _program(packages: Packages) -> Path:
    """Return the program that compiles SPIR-V with Mesa. Build the program at first use."""
    out = cache_dir() / f"agx-compile-{_key(packages)}"
    if out.exists():
        return out
    headers = [f"-I{packages.root / 'usr/include'}", f"-I{packages.root / 'usr/include/libdrm'}"]
    libraries = [f"-L{packages.libraries}", "-l:libOpenCL.so.1", "-ldl"]
    # The packages' libraries need a newer C library than this machine may have. They find it when the program runs, so
    # their unresolved symbols are ignored here.
    link = ["-rdynamic", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        made = Path(tmp) / "compile"
        sources = [str(HERE / name) for name in ("device.c", "compile.c")]
        done = run_clang(["-O1", *headers, *link, "-x", "c", *sources, "-x", "none", *libraries, "-o", str(made)])
        if done.returncode:
            raise ToolchainError(f"the stand-in for the GPU's driver does not compile:\n{done.stderr}")
        os.replace(made, out)
    return out


def _printed_by(spirvs: Sequence[Path], generation: int, packages: Packages) -> tuple[dict[Path, str], str]:
    """Run the compiler. Return its output for each kernel before the first refused kernel, and its standard error."""
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        environment = {
            **os.environ,
            "AGX_ROOT": str(packages.root),
            "AGX_MESA_DEBUG": "shaderdb,shaders",
            "MESA_SHADER_CACHE_DISABLE": "true",
            "OCL_ICD_VENDORS": str(packages.libraries / _ICD),
            "RUSTICL_DEBUG": "no_variants",
            "RUSTICL_ENABLE": "asahi",
            "XDG_CACHE_HOME": tmp,
        }
        done = packages.run(str(_program(packages)), [str(generation), *map(str, spirvs)], environment)
    found: dict[Path, str] = {}
    for spirv in spirvs:
        pattern = re.compile(rf"^kernel {re.escape(str(spirv))}\n(.*?)^done ", re.M | re.S)
        statistics, code = pattern.search(done.stderr), pattern.search(done.stdout)
        if not (statistics and code):
            break
        found[spirv] = statistics[1] + code[1]
    return found, done.stderr


def printed(spirv: Path, generation: int, packages: Packages) -> str:
    """Return the compiler's output for a kernel: statistics and machine code, in the format that listing.py parses.

    Raises:
        CheckError: the compiler refuses the kernel.
    """
    found, errors = _printed_by([spirv], generation, packages)
    if spirv not in found:
        raise CheckError(f"Mesa refuses {spirv} for G{generation}:\n{errors[-2000:]}")
    return found[spirv]


def _kept(spirv: Path, generation: int, packages: Packages) -> Path:
    return cache_dir() / f"agx-{_key(packages, hashlib.sha256(spirv.read_bytes()).hexdigest(), generation)}.json"


def compile_together(spirvs: Sequence[Path], generation: int, packages: Packages) -> None:
    """Compile kernels and cache the results. One process for all kernels saves time. Refused kernels are skipped."""
    missing = [spirv for spirv in dict.fromkeys(spirvs) if not _kept(spirv, generation, packages).exists()]
    while missing:
        found, _ = _printed_by(missing, generation, packages)
        for spirv, text in found.items():
            publish(json.dumps(dataclasses.asdict(read(text))), _kept(spirv, generation, packages))
        missing = missing[len(found) + 1 :]


def compiled(spirv: Path, generation: int, packages: Packages) -> Compiled:
    """Return a kernel's figures for a generation of GPU, from the cache if possible.

    Raises:
        CheckError: the compiler refuses the kernel.
    """
    kept = _kept(spirv, generation, packages)
    if not kept.exists():
        publish(json.dumps(dataclasses.asdict(read(printed(spirv, generation, packages)))), kept)
    fields = json.loads(kept.read_text())
    return Compiled(**{**fields, "loops": tuple(Loop(**loop) for loop in fields["loops"])})
