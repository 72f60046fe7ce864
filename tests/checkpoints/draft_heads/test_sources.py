"""Draft heads from the hub: the files that are downloaded, the cache, and the commands ``pull`` and ``show``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants
from mlx.utils import tree_flatten
from typer.testing import CliRunner, Result

from metal_engine.checkpoints.draft_heads.names import head_files
from metal_engine.checkpoints.draft_heads.sources import find_sidecar
from metal_engine.checkpoints.draft_heads.weights import read_head
from metal_engine.cli.main import app
from metal_engine.errors import ModelLoadError
from tests.support.checkpoint_files import CONFIG, write_checkpoint
from tests.support.draft_heads import random_head
from tests.support.fake_hub import FakeHub, Repo, asked_hub
from tools.fixtures.tiny_models import tiny_model

MODEL = tiny_model(**CONFIG)


def head_weights() -> dict[str, mx.array]:
    return {f"mtp.{name}": array for name, array in tree_flatten(random_head(MODEL).parameters())}


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repo]:
    """Heads alone, in files of their own beside a model, and in one of a model's files."""
    folder, weights = tmp_path_factory.mktemp("repos"), head_weights()
    num_bytes = 2 * sum(array.nbytes for array in weights.values())
    alone, beside, within = folder / "alone", folder / "beside", folder / "within"
    alone.mkdir()
    mx.save_safetensors(str(alone / "model.safetensors"), weights)
    (alone / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    (write_checkpoint(beside) / "mtp").mkdir()
    mx.save_safetensors(str(beside / "mtp" / "head.safetensors"), weights)
    files = {f"model-0000{i + 1}-of-00003.safetensors": mx.zeros((num_bytes,)) for i in range(2)}
    within.mkdir()
    for file, array in files.items():
        mx.save_safetensors(str(within / file), {f"model.{file}": array})
    last = "model-00003-of-00003.safetensors"
    mx.save_safetensors(str(within / last), weights)
    weight_map = {f"model.{file}": file for file in files} | dict.fromkeys(weights, last)
    (within / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (within / "config.json").write_text(json.dumps(CONFIG))
    plain, gguf = write_checkpoint(folder / "plain"), folder / "gguf"
    gguf.mkdir()
    (gguf / "x-Q4_K_M.gguf").touch()
    mx.save_safetensors(str(gguf / "mtp.safetensors"), weights)
    return {
        "org/alone": Repo(alone, revisions=("main", "v2")),
        "org/beside": Repo(beside),
        "org/within": Repo(within),
        "org/plain": Repo(plain),
        "org/gguf": Repo(gguf),
    }


@pytest.fixture
def hub(repos: dict[str, Repo], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with asked_hub(repos, monkeypatch) as server:
        yield server


def fetched(hub: FakeHub) -> set[str]:
    """Return the names of the safetensors files whose content was sent, beyond a header."""
    return {path.rpartition("/")[2] for path, num in hub.sent.items() if "safetensors" in path and num > 30_000}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/alone", {"model.safetensors"}),
        ("org/beside", {"head.safetensors"}),
        ("org/within", {"model-00003-of-00003.safetensors"}),
    ],
)
def test_only_files_with_the_head_are_fetched(
    name: str, files: set[str], hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = find_sidecar(name, None, str(tmp_path))
    assert fetched(hub) == files == {path.name for path in head_files(place)}
    assert read_head(place, MODEL).layers == (1,)
    num_bytes = hub.file_bytes
    assert find_sidecar(name, None, str(tmp_path)) == place
    assert hub.file_bytes - num_bytes < 30_000
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    num_requests = len(hub.requests)
    assert find_sidecar(name, None, str(tmp_path)) == place and len(hub.requests) == num_requests


def test_revisions(hub: FakeHub, tmp_path: Path) -> None:
    places = [
        find_sidecar("org/alone", None, str(tmp_path)),
        find_sidecar("org/alone", "v2", str(tmp_path)),
        find_sidecar("org/alone@v2", None, str(tmp_path)),
    ]
    assert [place.name for place in places] == [hub.repos["org/alone"].commit(name) for name in ("main", "v2", "v2")]
    with pytest.raises(ModelLoadError, match="no revision 'v3'"):
        find_sidecar("org/alone", "v3", str(tmp_path))


def test_a_repository_without_a_draft_head_is_refused_before_a_download(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="org/plain has no weights of a draft head"):
        find_sidecar("org/plain", None, str(tmp_path))
    with pytest.raises(ModelLoadError, match="no repository org/nothing"):
        find_sidecar("org/nothing", None, str(tmp_path))
    assert not fetched(hub)


def run(*command: str, cache: Path) -> Result:
    return CliRunner().invoke(app, [*command, "--download-dir", str(cache)])


def test_commands(hub: FakeHub, tmp_path: Path) -> None:
    """``pull`` fetches heads alone, and models with a head beside. ``show`` gives the memory of a model's head."""
    assert run("pull", "org/gguf", cache=tmp_path / "gguf").exit_code == 0
    assert list((tmp_path / "gguf").rglob("x-Q4_K_M.gguf"))
    pulled = run("pull", "org/alone", cache=tmp_path)
    assert pulled.exit_code == 0 and pulled.stdout.startswith("the draft head org/alone is here: ")
    num_bytes = sum(array.nbytes for array in head_weights().values())
    remote = json.loads(run("show", "org/beside", "--json", cache=tmp_path).stdout)
    assert run("pull", "org/beside", cache=tmp_path).exit_code == 0
    assert len(list(tmp_path.rglob("mtp/head.safetensors"))) == 1
    local = json.loads(run("show", "org/beside", "--json", cache=tmp_path).stdout)
    assert remote["draft_head_bytes"] == local["draft_head_bytes"] == num_bytes
    assert "draft head:" in run("show", "org/beside", cache=tmp_path).stdout
    assert run("pull", "org/plain", cache=tmp_path).exit_code == 0
    assert "draft_head_bytes" not in json.loads(run("show", "org/plain", "--json", cache=tmp_path).stdout)
    rows = {row["name"]: row for row in json.loads(run("list", "--json", cache=tmp_path).stdout)}
    assert rows["org/beside"]["runs_here"] and not rows["org/alone"]["runs_here"]
    assert rows["org/alone"]["problem"].startswith("a draft head without a model")
