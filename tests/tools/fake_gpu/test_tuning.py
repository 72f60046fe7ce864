"""Attention tuning in a whole engine on the fake GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.fake_gpu.conftest import OnDevice


def test_later_starts_reuse_the_attention_tuning_of_the_first_start(
    on_device: OnDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start measures and writes a file. The second start reads it.

    On this GPU a kernel's time depends on the bytes that it writes, so fewer splits are faster.
    """
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path / "cache"))
    folder = str(tmp_path)
    first = on_device("tune", folder=folder, setting="auto", start=1)
    assert first["tokens"] == 8
    (kept,) = (tmp_path / "cache" / "attention").iterdir()
    content = kept.read_bytes()
    assert "4 threadgroups a core" in first["banner"] and first["cuts"] and first["tuned"]
    later = on_device("tune", folder=folder, setting="auto", start=2)
    assert later["kernels"] < first["kernels"] / 2  # nothing is measured
    assert kept.read_bytes() == content
    assert (later["cuts"], later["banner"], later["tuned"]) == (first["cuts"], first["banner"], first["tuned"])


@pytest.mark.full
def test_attention_tuning_can_be_disabled(on_device: OnDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path / "cache"))
    never = on_device("tune", folder=str(tmp_path), setting="never", start=1)
    assert never["cuts"] == [] and never["banner"] is None and never["tokens"] == 8
    assert never["tuned"] == []
