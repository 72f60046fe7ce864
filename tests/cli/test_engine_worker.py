"""The process of a server whose engine has a process of its own."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from metal_engine.cli.main import _transport
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.server_args import ServerArgs


def test_the_server_loads_no_mlx() -> None:
    """The parsers of mlx-lm run without MLX."""
    code = """
import sys
from metal_engine.lazy_packages import make_packages_lazy
make_packages_lazy()
from metal_engine.checkpoints.answer_formats import _tool_parser, find_answer_format
import metal_engine.cli.banner, metal_engine.server.run
from tools.fixtures.fake_engine import tiny_tokenizer
find_answer_format(tiny_tokenizer().hf_tokenizer)
assert _tool_parser("kimi_k2").tool_call_start
assert not [name for name in sys.modules if name.split(".")[0] == "mlx"]
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_log_says_that_ranks_of_a_launcher_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    with caplog.at_level(logging.INFO):
        assert isinstance(_transport(EngineArgs(model="m", tensor_parallel_size=2), ServerArgs()), EngineThread)
    (record,) = caplog.records
    assert "all 2 ranks" in record.message and "does not replace" in record.message
