"""Other Python processes import nothing from the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import metal_engine
from metal_engine.grammars.compiler import GrammarCompiler
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


def test_every_process_is_started_so() -> None:
    root = Path(metal_engine.__file__).parent
    starts = [path.name for path in root.rglob("*.py") if "[sys.executable" in path.read_text(encoding="utf-8")]
    assert not starts
