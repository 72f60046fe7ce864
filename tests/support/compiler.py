"""Compiler of MLX's kernels for the CPU, with MLX's header compiled in advance.

MLX compiles hundreds of kernels during the tests, and two thirds of that time are spent on the same header. The machine
code is the same with the precompiled header.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from metal_engine.device.cache_dir import cache_dir
from metal_engine.device.private_folder import private_folder

# Flags of MLX's command. The compiler ignores a header that was compiled with other flags.
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared")
HEADER = Path("mlx", "backend", "cpu", "compiled_preamble.h")
# A library appears when it is complete, because another process may load it at once. Its path is the last argument.
_PROGRAM = """\
#!/bin/sh
for last; do :; done
case $last in
  *.so) {compiler} -I{folder} "$@" -o "$last.$$" && mv "$last.$$" "$last" ;;
  *) exec {compiler} -I{folder} "$@" ;;
esac
"""
PRECOMPILED = HEADER.with_name(f"{HEADER.name}.gch")


def use_precompiled_header() -> None:
    """Put a program named ``g++`` in front of PATH, which passes the folder of the precompiled header to g++.

    The program also makes each library visible only when it is complete. Compiles the header at first use. PATH stays
    as it is on other systems than Linux, without g++, and on errors.
    """
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None:
        return
    if (Path(compiler).parent / PRECOMPILED).exists():
        return  # a parent process has set PATH
    try:
        folder = _folder(private_folder(cache_dir() / "precompiled"), compiler)
    except (OSError, subprocess.CalledProcessError):
        return
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def _folder(place: Path, compiler: str) -> Path:
    """Return the folder of the program and the header, which depends on the compiler and on MLX."""
    spec = find_spec("mlx")
    assert spec is not None and spec.submodule_search_locations
    include = Path(spec.submodule_search_locations[0]) / "include"
    compilers_version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = (_PROGRAM, compiler, compilers_version, version("mlx"), (include / HEADER).read_text(), FLAGS)
    folder = place / hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        made = Path(temporary, "made")
        header = made / PRECOMPILED
        header.parent.mkdir(parents=True)
        command = [compiler, *FLAGS, f"-I{include}"]
        compile_header = [*command, "-x", "c++-header", str(include / HEADER), "-o", str(header)]
        subprocess.run(compile_header, capture_output=True, check=True)
        use = [*command, f"-I{made}", "-include", str(HEADER), "-x", "c++", os.devnull, "-o", str(made / "tried.so")]
        subprocess.run(use, capture_output=True, check=True)
        program = made / "g++"
        program.write_text(_PROGRAM.format(compiler=shlex.quote(compiler), folder=shlex.quote(str(folder))))
        program.chmod(0o700)
        if not folder.exists():  # another process may have been faster
            made.rename(folder)
    return folder
