"""Lazy packages have the same names as packages that were imported as usual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Package -> names that its submodules define, and a name that needs its ``__init__``.
NAMES = {
    "transformers": (
        "AutoConfig AutoTokenizer PreTrainedTokenizer PreTrainedTokenizerBase PreTrainedTokenizerFast __version__",
        "LlamaConfig",
    ),
    "gguf": ("constants quants", "GGUFWriter"),
    "mlx_lm": ("tokenizer_utils", "stream_generate"),
}


def run(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", NAMES)
def test_a_lazy_package_has_the_names_of_the_package(package: str) -> None:
    early, late = NAMES[package]
    run(f"""
import importlib, sys
from metal_engine.lazy_packages import LazyPackage, make_packages_lazy
make_packages_lazy()
import {package}
early = {{name: getattr({package}, name) for name in {early.split()!r}}}
lazy = sys.modules["{package}"]
assert isinstance(lazy, LazyPackage) and "{late}" not in vars(lazy)
from {package} import {late}
again = importlib.import_module("{package}")
assert {package}.{late} is again.{late} is {late}
assert all(getattr(again, name) == value == getattr(lazy, name) for name, value in early.items())
for module in lazy, again:
    assert not hasattr(module, "no_such_name") and not hasattr(module, "__no_such_name__")
""")


def test_the_process_of_an_engine_needs_no_init() -> None:
    run("""
import sys
from metal_engine.lazy_packages import LazyPackage, make_packages_lazy
make_packages_lazy()
from metal_engine.cli.engine_worker import _set_up
from metal_engine.engine.process.wire import Start
_set_up(Start([], "info", "text"))[0]()
for name, one in {"transformers": "LlamaConfig", "gguf": "GGUFWriter", "mlx_lm": "stream_generate"}.items():
    assert isinstance(sys.modules[name], LazyPackage) and one not in vars(sys.modules[name]), name
""")


def test_an_init_that_fails_runs_again(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").write_text("raise ImportError('a library is missing')")
    run(f"""
import importlib.util, sys
from metal_engine.lazy_packages import LazyPackage
sys.path.insert(0, {str(tmp_path)!r})
sys.modules["planted"] = planted = LazyPackage(importlib.util.find_spec("planted"), {{}})
for _ in range(2):
    try:
        planted.name
    except ImportError as error:
        assert "a library is missing" in str(error)
""")


def test_a_name_missing_from_the_listed_module_comes_from_the_init() -> None:
    run("""
import importlib.util, sys
from metal_engine.lazy_packages import LazyPackage
names = {"GGUFWriter": "no_such_module", "GGUFReader": "quants"}
sys.modules["gguf"] = gguf = LazyPackage(importlib.util.find_spec("gguf"), names)
assert gguf.GGUFWriter.__name__ == "GGUFWriter" and gguf.GGUFReader.__name__ == "GGUFReader"
""")
