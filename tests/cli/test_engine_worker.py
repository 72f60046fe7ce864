"""The process of a server whose engine has a process of its own."""

from __future__ import annotations

import subprocess
import sys


def test_the_server_loads_no_mlx() -> None:
    """The parsers of mlx-lm run without MLX."""
    code = """
import sys
from metal_engine.cli.engine_worker import keep_mlx_out
keep_mlx_out()
from metal_engine.checkpoints.answer_formats import _tool_parser, find_answer_format
import metal_engine.cli.banner, metal_engine.server.run
from tools.fixtures.fake_engine import tiny_tokenizer
find_answer_format(tiny_tokenizer().hf_tokenizer)
assert _tool_parser("kimi_k2").tool_call_start
assert not [name for name in sys.modules if name.split(".")[0] == "mlx"]
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
