"""The tests' compiler of MLX's kernels uses the header that was compiled in advance."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.compiler import FLAGS, HEADER, PRECOMPILED


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="MLX compiles no CPU kernels")
def test_the_header_fits_mlx_s_command(tmp_path: Path) -> None:
    mlx = Path(mx.__file__).parent
    command = re.search(rb"g\+\+ (-std=[\w +=-]+-shared)", (mlx / "lib" / "libmlx.so").read_bytes())
    assert command and tuple(command[1].decode().split()) == FLAGS
    source = tmp_path / "kernel.cpp"
    source.write_text(f'#include "{HEADER}"\n')
    done = subprocess.run(
        ["g++", *FLAGS, "-H", f"-I{mlx / 'include'}", str(source), "-o", str(tmp_path / "kernel.so")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [path.name for path in tmp_path.iterdir() if path != source] == ["kernel.so"]
    assert re.search(rf"^! \S+/{re.escape(str(PRECOMPILED))}$", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="MLX compiles no CPU kernels")
def test_mlx_finds_the_compiler() -> None:
    assert subprocess.run(["g++", "--version"], capture_output=True).returncode == 0
