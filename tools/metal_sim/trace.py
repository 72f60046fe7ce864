"""Returns the Metal source that MLX generates for a kernel call, by tracing in a child process. Stored on disk."""

from __future__ import annotations

import atexit
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from .errors import ToolchainError
from .source import mlx_version
from .toolchain import cache_dir, key_of, publish

_child: subprocess.Popen[str] | None = None


def _ask(request: dict[str, Any]) -> str:
    global _child
    if _child is None or _child.poll() is not None:
        _child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("trace_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(_child.kill)
    assert _child.stdin and _child.stdout
    _child.stdin.write(json.dumps(request) + "\n")
    _child.stdin.flush()
    line = _child.stdout.readline()
    if not line:
        raise ToolchainError("the process that traces MLX's kernels died")
    answer = json.loads(line)
    if "error" in answer:
        raise ToolchainError(f"MLX refused the kernel while tracing: {answer['error']}")
    return answer["source"]


def generated_source(request: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Return (source text, kernel name, template arguments) for a request in trace_child.py's format.

    Raises:
        ToolchainError: MLX refuses the kernel, or the child process has died.
    """
    text, name, arguments = _generated_source(json.dumps(request, sort_keys=True))
    return text, name, list(arguments)


@functools.lru_cache(maxsize=256)
def _generated_source(request: str) -> tuple[str, str, tuple[str, ...]]:
    version = mlx_version()
    path = cache_dir() / f"{key_of('trace', version, request)}.metal"
    if path.exists():
        printed = path.read_text()
    else:
        printed = _ask(json.loads(request))
        publish(printed, path)
    found = re.search(r"```\n(.*)\n```", printed, re.S)
    kernel = re.search(r"\[\[kernel\]\] void (custom_kernel_\w+)\(", printed)
    if not found or not kernel:
        raise ToolchainError(
            f"MLX {version} printed no Metal source while tracing; the simulator has to be adapted to it"
        )
    instance = re.search(rf"decltype\({kernel[1]}<([^>]*)>\)", printed)
    arguments = tuple(a.strip() for a in instance[1].split(",")) if instance else ()
    return found[1] + "\n", kernel[1], arguments
