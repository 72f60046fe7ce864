"""Importing the control plane does not load MLX, so it can be tested without MLX."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import import_module

# The last three import MLX later, after the BLAS is set up.
PURE = [
    "server", "engine", "scheduling", "kv_transfer.scheduler_side", "kv_transfer.stores", "step", "request",
    "sampling_params", "settings", "answers", "errors", "llm", "cli.main", "loading.build",
]  # fmt: skip


def submodules(name: str) -> list[str]:
    found = pkgutil.walk_packages(getattr(import_module(name), "__path__", []), name + ".")
    return [name, *(info.name for info in found)]


def test_no_layer_loads_mlx() -> None:
    modules = [module for layer in PURE for module in submodules(f"metal_engine.{layer}")]
    # Separate processes would take minutes. In one process, the first module that loads MLX is reported.
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    loaded = [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')]\n"
        "    assert not loaded, (name, loaded)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
