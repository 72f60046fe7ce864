"""``pull``, ``list``, ``show`` and ``rm``, against a hub on the loopback interface."""

from __future__ import annotations

import json
import pwd
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from gguf import GGUFWriter
from huggingface_hub import constants
from typer.testing import CliRunner

from metal_engine.cli.main import app
from tests.support.checkpoint_files import CONFIG, write_checkpoint
from tests.support.fake_hub import FakeHub, Repo, asked_hub
from tests.support.gguf_files import finish


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repo]:
    folder = tmp_path_factory.mktemp("repos")
    unknown = write_checkpoint(folder / "unknown")
    (unknown / "config.json").write_text(json.dumps({**CONFIG, "model_type": "nonesuch"}))
    return {"org/tiny": Repo(write_checkpoint(folder / "tiny", bits=4)), "org/unknown": Repo(unknown)}


@pytest.fixture
def hub(repos: dict[str, Repo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with asked_hub(repos, monkeypatch) as server:
        monkeypatch.setenv("METAL_ENGINE_DOWNLOAD_DIR", str(tmp_path / "hub"))
        monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path / "own"))
        yield server


def run(*command: str, answer: str = "") -> Result:
    return CliRunner().invoke(app, list(command), input=answer)


def test_from_pull_to_rm(hub: FakeHub, tmp_path: Path) -> None:
    assert json.loads(run("list", "--json").stdout) == []
    pulled = run("pull", "org/tiny")
    assert pulled.exit_code == 0 and pulled.stdout.startswith(f"org/tiny is here: {tmp_path / 'hub'}")
    assert Path(pulled.stdout.split()[-1], "model.safetensors").is_file()

    (row,) = json.loads(run("list", "--json").stdout)
    expected = {"name": "org/tiny", "architecture": "llama", "quantization": "4-bit", "runs_here": True}
    assert {key: row[key] for key in expected} == expected
    assert row["context_length"] == CONFIG["max_position_embeddings"] and row["size"] > 10_000
    table = run("list").stdout
    heads = ["NAME", "SIZE", "ARCHITECTURE", "CONTEXT", "QUANTIZATION", "RUNS", "HERE", "LAST", "USED"]
    assert table.splitlines()[0].split() == heads
    assert "org/tiny" in table and "metal-engine pull demo" in table

    shown = json.loads(run("show", "org/tiny", "--json").stdout)
    kv_bytes = 2 * 2 * 2 * 16 * 4  # K and V of two layers, two heads of 16 numbers each, in float32
    assert shown["kv_bytes_per_token"] == kv_bytes and shown["kv_cache_tokens"] > 1000
    assert f"KV of a token: {kv_bytes} bytes" in run("show", "org/tiny").stdout

    assert run("rm", "org/tiny").exit_code == 1, "nobody can be asked"
    assert run("list", "--json").stdout != "[]\n"
    removed = run("rm", "org/tiny", "--yes")
    assert removed.exit_code == 0 and removed.stdout.startswith("removed org/tiny: ")
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_show_describes_a_hub_model_without_a_download(hub: FakeHub, tmp_path: Path) -> None:
    shown = json.loads(run("show", "org/tiny", "--json").stdout)
    assert shown["path"] is None and shown["runs_here"] and shown["kv_cache_tokens"] > 1000
    other = json.loads(run("show", "org/unknown", "--json").stdout)
    assert not other["runs_here"] and "no architecture 'nonesuch'" in other["problem"]
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize(("command", "message"), [
    (("pull", "org/unknown"), "org/unknown: mlx-lm has no architecture 'nonesuch'"),
    (("pull", "org/none"), "no repository org/none"),
    (("pull", "./somewhere"), "./somewhere is a path"),
    (("show", "org/none"), "no repository org/none"),
    (("show", "demo"), "demo is not in the cache"),
    (("rm", "demo", "--yes"), "the demo model is not in the cache"),
    (("rm", "org/none", "--yes"), "org/none is not in the cache"),
])  # fmt: skip
def test_errors_are_one_line(hub: FakeHub, command: tuple[str, ...], message: str) -> None:
    result = run(*command)
    assert result.exit_code == 1 and result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], result.stderr


def test_pull_with_force_downloads_a_model_that_cannot_run(hub: FakeHub) -> None:
    assert run("pull", "org/unknown", "--force").exit_code == 0
    (row,) = json.loads(run("list", "--json").stdout)
    assert not row["runs_here"] and "nonesuch" in row["problem"]
    assert "no: " in run("list").stdout


def test_a_file_that_is_no_model_does_not_end_the_list(hub: FakeHub, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--odd"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    (repo / "snapshots" / "c0ffee").mkdir(parents=True)
    writer = GGUFWriter(repo / "snapshots" / "c0ffee" / "odd-Q4_0.GGUF", "llama")
    writer.add_string("llama.attention.head_count", "two")
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    finish(writer, repo)
    (row,) = json.loads(run("list", "--json").stdout)
    assert row["name"] == "org/odd:Q4_0" and "not a valid model" in row["problem"]
    assert "not a valid model" in run("show", "org/odd").stdout


@pytest.mark.parametrize("command", [("list",), ("show", "org/tiny"), ("rm", "demo", "--yes")])
def test_without_a_home_directory(hub: FakeHub, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "METAL_ENGINE_CACHE", "METAL_ENGINE_DOWNLOAD_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    result = run(*command)
    assert result.exit_code == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "no home directory" in line and "METAL_ENGINE_CACHE" in line
