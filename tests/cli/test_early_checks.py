"""Tests that errors in settings appear before MLX and transformers are imported, which takes seconds."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from metal_engine.checkpoints.model_names import is_ollama_name
from metal_engine.checkpoints.path_settings import check_model_name
from metal_engine.cli.main import _transport
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.errors import ModelLoadError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.server_args import ServerArgs

ROOT = Path(__file__).resolve().parents[2]
# Runs commands, and prints the exit status, the errors, and the slow packages that were imported so far, after each.
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from metal_engine.cli.main import app
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    slow = [name for name in ("mlx", "transformers", "fastapi") if name in sys.modules]
    print(json.dumps([done.exit_code, " ".join(done.stderr.split()), slow]))
"""
WRONG = [
    (["serve", "demo", "--dtype", "int3"], "--dtype must be one of"),
    (["serve", "nowhere/model.gguf"], "no such file: nowhere/model.gguf"),
    (["serve", "./nowhere"], "./nowhere is neither a directory nor a .gguf file"),
    (["serve", "~no-such-user/model"], "~no-such-user/model is neither a directory nor a .gguf file"),
    (["serve", "./" + "n" * 5_000], "is neither a directory nor a .gguf file"),
    (["serve", "demo", "--kv-cache-dir", "~no-such-user/kv"], "--kv-cache-dir: '~no-such-user/kv' is not a path"),
    (["serve", "demo", "--tokenizer", "~no-such-user/x"], "~no-such-user/x is not a directory (--tokenizer)"),
    (["serve", "demo", "--chat-template", "~no-such-user/x"], "cannot read --chat-template"),
    (["serve", "--models-dir", "~no-such-user/x"], "cannot read --models-dir"),
    (["serve", "qwen3:8b"], "qwen3:8b is a name from Ollama's registry"),
    (["serve", "demo", "--chat-template", "nowhere.jinja"], "cannot read --chat-template"),
    (["serve", "demo", "--speculative-config", "{}"], "--speculative-config needs 'method'"),
    (["serve", "demo", "--kv-transfer-config", "{}"], "--kv-transfer-config needs 'kv_connector'"),
    (["serve", "demo", "--ssl-certfile", "no", "--ssl-keyfile", "no"], "--ssl-certfile, --ssl-keyfile"),
    (["serve", "demo", "--lora-modules", "a=./nowhere"], "nowhere is not a directory"),
    (["serve", "demo", "--lora-modules", "a=./" + "n" * 300], "--lora-modules: "),  # the system refuses to look it up
    (["serve", "demo", "--enable-lora", "--lora-dir", "./nowhere"], "--lora-dir ./nowhere is not a directory"),
    (["serve", "demo", "--lora-dir", "."], "--lora-dir needs --enable-lora"),
    (["serve", "demo", "--tokenizer", "./nowhere"], "./nowhere is not a directory (--tokenizer)"),
    (["serve", "demo", "--generation-config", "./nowhere"], "nowhere has no generation_config.json"),
    (["serve", "--models-dir", "./nowhere"], "cannot read --models-dir"),
    (["serve", "demo", "demo"], "a MODEL is given twice"),
    (["serve", "demo", "./nowhere"], "./nowhere is neither a directory nor a .gguf file"),
    (["serve", "demo", "other", "--no-engine-process"], "--no-engine-process works with one model"),
    (["serve", "demo", "other", "--chat-template", "nowhere.jinja"], "cannot read --chat-template"),
    (["chat", "nowhere.gguf", "--port", "9"], "no such file: nowhere.gguf"),
    (["chat", "demo", "--port", "9", "--top-p", "7"], "--top-p must be in (0, 1]"),
    (["bench", "throughput", "nowhere.gguf"], "no such file: nowhere.gguf"),
    (["bench", "latency", "nowhere.gguf"], "no such file: nowhere.gguf"),
    (["pull", "nowhere.gguf"], "nowhere.gguf is a path"),
    (["pull", "qwen3:8b"], "qwen3:8b is a name from Ollama's registry"),
]


def run(commands: list[list[str]]) -> list[tuple[int, str, list[str]]]:
    """Return each command's exit status, its errors, and the slow packages that have been imported."""
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_wrong_settings_are_refused_before_slow_imports() -> None:
    commands = [[*arguments, *(["--port", "0"] if arguments[0] == "serve" else [])] for arguments, _ in WRONG]
    for (arguments, message), (status, error, slow) in zip(WRONG, run(commands), strict=True):
        assert status == 1 and message in error, (arguments, error)
        assert slow == [], arguments


def test_paths_that_are_no_models_are_refused_before_anything_slow_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights_only").mkdir()
    (tmp_path / "weights_only" / "model.gguf").touch()
    (tmp_path / "no_type").mkdir()
    (tmp_path / "no_type" / "config.json").write_text("{}")
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    wrong = {
        "empty": "has no config.json: not a model directory",
        "weights_only": "name the file itself",
        "no_type": "names no model_type",
        "text.gguf": "text.gguf is not a GGUF file",
        "cut.gguf": "cut.gguf is truncated or corrupted",
    }
    done = run([["serve", str(tmp_path / name), "--port", "0"] for name in wrong])
    for (name, message), (status, error, slow) in zip(wrong.items(), done, strict=True):
        assert status == 1 and message in error, (name, error)
        assert slow == [], name


def test_a_taken_port_is_noticed_before_anything_slow_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        commands = [["serve", *models, "--port", port] for models in (["demo"], ["demo", "other/model"])]
        for status, error, slow in run(commands):
            assert status == 1 and f"--port {port} is in use" in error, error
            assert slow == []


def test_names_from_ollamas_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen3:8b", "llama3.2:latest", "qwen3@main:8b"):
        assert is_ollama_name(name)
    for name in ("gpt2", "org/model:Q4_K_M", "model:Q4_K_M", "model:BF16", "org/model:8b", "demo"):
        assert not is_ollama_name(name)
    with pytest.raises(ModelLoadError, match="OWNER/NAME:Q4_K_M"):
        check_model_name("qwen3:8b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3:8b").mkdir()
    (tmp_path / "qwen3:8b" / "config.json").write_text('{"model_type": "qwen3"}')
    check_model_name("qwen3:8b")  # a folder may have such a name


def test_imports_print_no_warning_about_missing_pytorch() -> None:
    """Importing the package and transformers prints nothing, not even a warning about PyTorch."""
    program = "import metal_engine, transformers; import metal_engine.llm"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_command_without_standard_streams(tmp_path: Path) -> None:
    """The null device takes their place: a socket with the descriptor of a stream would get its output."""
    result = tmp_path / "result"
    code = f"""
import os, sys
import metal_engine.cli.main as command
def app():
    null = os.stat(os.devnull).st_rdev
    found = [os.fstat(number).st_rdev == null for number in range(3)]
    print("lost")
    print("lost", file=sys.stderr, flush=True)
    open({str(result)!r}, "w").write(f"{{found}} {{sys.stdin.read()!r}}")
command.app = app
command.main()
"""
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(closing, cwd=ROOT, timeout=60).returncode == 0
    assert result.read_text() == "[True, True, True] ''"


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
