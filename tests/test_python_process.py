"""Other Python processes import nothing from the current folder."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import metal_engine
from metal_engine import python_process
from metal_engine.grammars.compiler import GrammarCompiler
from metal_engine.python_process import start_python
from metal_engine.sampling_params import StructuredOutputsParams
from tests.support.engine_child import started
from tools.fixtures.fake_engine import VOCAB_SIZE, tiny_tokenizer


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "msgspec", "numpy", "metal_engine"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    engine = started("fake")
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE)
    try:
        compiler.compile(StructuredOutputsParams(regex="a"))
    finally:
        compiler.close()
        engine.shutdown()


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_process_has_a_socket_and_a_session_of_its_own(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS, it must not be forked: see :func:`start_python`."""
    forked: list[object] = []
    fork_exec = python_process.subprocess._fork_exec  # type: ignore[attr-defined]
    monkeypatch.setattr(python_process.subprocess, "_fork_exec", lambda *a: (forked.append(a), fork_exec(*a))[1])
    monkeypatch.setattr(python_process.sys, "platform", system)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start_python("tests.support.socket_child", theirs, stderr=None)
        theirs.close()
        answer = ours.makefile().read()
    assert process.wait() == 0
    assert answer == f"session {process.pid}, empty standard input: ''"
    assert bool(forked) == (system != "darwin")


def test_every_process_is_started_so() -> None:
    root = Path(metal_engine.__file__).parent
    starts = [path.name for path in root.rglob("*.py") if "[sys.executable" in path.read_text(encoding="utf-8")]
    assert not starts
