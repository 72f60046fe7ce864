"""README.md and docs/getting-started.md are true: their commands run as written and print what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_docs import ANYTHING, ROOT, Terminal, as_pattern, commands

README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
# Minutes under load, and the tests run it at a smaller size.
LONG = "tools/repro_block_exhaustion.py"


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def all_commands(text: str) -> list[tuple[str, str]]:
    return [pair for block in blocks(text, "console") for pair in commands(block)]


def test_the_commands_run(demo_path: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    num_commands = 0
    try:
        for command, expected in all_commands(README) + all_commands(START):
            if LONG in command:
                continue
            terminal.run(command, expected)
            num_commands += 1
            # The chat and the benchmark use this server by default.
            terminal.env["METAL_ENGINE_URL"] = terminal.env["METAL_ENGINE_BASE_URL"] = terminal.local(
                "http://127.0.0.1:8000"
            )
        terminal.stop()
    finally:
        terminal.kill()
    assert num_commands >= 12


def test_the_program_prints_what_it_says(demo_path: Path, tmp_path: Path) -> None:
    (program,) = blocks(START, "python")
    (expected,) = blocks(START, "text")
    terminal = Terminal(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=terminal.env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


@pytest.mark.full
def test_the_long_command_runs(demo_path: Path, tmp_path: Path) -> None:
    ((command, expected),) = [pair for pair in all_commands(START) if LONG in pair[0]]
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    Terminal(tmp_path).run(command, expected)


def test_a_python_without_the_engine_finds_the_one_that_has_it(tmp_path: Path) -> None:
    """The tool uses the checkout's .venv. If that folder is missing, the tool prints the command for creating it."""
    tool = tmp_path / "tools" / "repro_block_exhaustion.py"
    tool.parent.mkdir()
    tool.write_text((ROOT / LONG).read_text())
    bare = [sys.executable, "-S", "-I", str(tool)]  # without site-packages
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "run `make serve` once" in done.stderr and len(done.stderr.splitlines()) == 1
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\necho "with $2 $3"\n')
    own.chmod(0o755)
    done = subprocess.run([*bare, "--seed", "3"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "with --seed 3\n", done.stderr


def test_other_models_are_served_by_make() -> None:
    (command,) = re.findall(r"`(make serve MODEL=\S+)`", START)
    assert Terminal.recipe(command) == ["metal-engine serve Qwen/Qwen3-0.6B --host 127.0.0.1 --port 8000"]
    (command,) = re.findall(r"`(make serve PORT=\S+)`", START)
    assert Terminal.recipe(command) == ["metal-engine serve demo --host 127.0.0.1 --port 8001"]


def test_wrong_output_is_noticed() -> None:
    assert all(as_pattern(text).search("a\nb") for text in ("a", f"a{ANYTHING}b"))
    assert not as_pattern("b…a").search("a\nb")
