"""Compiles SPIR-V for an Apple GPU with Mesa, over a stand-in for the kernel driver."""

from __future__ import annotations

import contextlib
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
GENERATIONS = (13, 14)  # of the GPU: M1, M2
_ICD = "libRusticlOpenCL.so.1"
# Files that shape what this module keeps in the cache.
_SOURCES = ("device.h", "device.c", "compile.c", "mesa.py", "listing.py")


def _key(packages: Packages, *parts: object) -> str:
    h = hashlib.sha256(packages.key.encode())
    for name in _SOURCES:
        h.update((HERE / name).read_bytes())
    h.update(repr(parts).encode())
    return h.hexdigest()[:32]


@cache
def _program(packages: Packages) -> Path:
    """The program that compiles."""
    out = cache_dir() / f"agx-compile-{_key(packages)}"
    if out.exists():
        return out
    headers = [f"-I{packages.root / 'usr/include'}", f"-I{packages.root / 'usr/include/libdrm'}"]
    libraries = [f"-L{packages.libraries}", "-l:libOpenCL.so.1", "-ldl"]
    # Those libraries want a newer C library than this machine's, and get it when the program runs.
    link = ["-rdynamic", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        made = Path(tmp) / "compile"
        sources = [str(HERE / name) for name in ("device.c", "compile.c")]
        done = run_clang(["-O1", *headers, *link, "-x", "c", *sources, "-x", "none", *libraries, "-o", str(made)])
        if done.returncode:
            raise ToolchainError(f"the stand-in for the GPU's driver does not compile:\n{done.stderr}")
        os.replace(made, out)
    return out


def _printed_by(spirvs: Sequence[Path], generation: int, packages: Packages) -> dict[Path, str]:
    """What one process of the compiler prints of each kernel.

    Raises:
        CheckError: it refuses one of them.
    """
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
        parts = [re.search(rf"^kernel {re.escape(str(spirv))}\n(.*?)^done ", text, re.M | re.S)
                 for text in (done.stderr, done.stdout)]  # fmt: skip
        if not all(parts):
            raise CheckError(f"Mesa refuses {spirv} for G{generation}: {done.stderr[-2000:]}")
        found[spirv] = "".join(part[1] for part in parts if part)
    return found


def printed_of(spirv: Path, generation: int, packages: Packages) -> str:
    """All that the compiler prints of a kernel: statistics, intermediate forms, machine code.

    Raises:
        CheckError: it refuses the kernel.
    """
    return _printed_by([spirv], generation, packages)[spirv]


def _kept(spirv: Path, generation: int, packages: Packages) -> Path:
    return cache_dir() / f"agx-{_key(packages, hashlib.sha256(spirv.read_bytes()).hexdigest(), generation)}.json"


def compile_together(spirvs: Sequence[Path], generation: int, packages: Packages) -> None:
    """Compile kernels in one process, which is quicker, into the cache. One that is refused is left to ``compiled``."""
    missing = [spirv for spirv in dict.fromkeys(spirvs) if not _kept(spirv, generation, packages).exists()]
    if not missing:
        return
    with contextlib.suppress(CheckError):
        for spirv, printed in _printed_by(missing, generation, packages).items():
            publish(json.dumps(dataclasses.asdict(read(printed))), _kept(spirv, generation, packages))


def compiled(spirv: Path, generation: int, packages: Packages) -> Compiled:
    """A kernel compiled for a generation of GPU, out of the cache if it is there.

    Raises:
        CheckError: the compiler refuses it.
    """
    kept = _kept(spirv, generation, packages)
    if not kept.exists():
        publish(json.dumps(dataclasses.asdict(read(printed_of(spirv, generation, packages)))), kept)
    fields = json.loads(kept.read_text())
    return Compiled(**{**fields, "loops": tuple(Loop(**loop) for loop in fields["loops"])})
