"""Models from the Hugging Face hub, against a hub on the loopback interface.

``huggingface_hub`` reads its environment when it is imported, so each environment is a process of its own that
tries several models in turn.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_files import VOCAB_SIZE, write_checkpoint
from tests.support.fake_hub import TOKEN, FakeHub, Repo

_SCRIPT = """
import json, sys
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.errors import ModelLoadError
from metal_engine.checkpoints.loader import load
device = DeviceInfo(kind="cpu", name="test", compute="test", memory_bytes=1 << 30)
for case in json.loads(sys.argv[1]):
    try:
        loaded = load(EngineArgs(**case), device)
        print(json.dumps(["loaded", loaded.config["vocab_size"], loaded.config.get("rope_theta")]))
    except ModelLoadError as error:
        print(json.dumps(["error", str(error)]))
"""


def load_all(cases: list[dict[str, Any]], endpoint: str, home: Path, **env: str) -> list[list[Any]]:
    """What loading gives for the arguments of each case, in a fresh process: ["loaded", ...] or ["error", text]."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    clean |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **env}
    command = [sys.executable, "-c", _SCRIPT, json.dumps(cases)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def closed_port() -> str:
    """An address where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repo]:
    folder = tmp_path_factory.mktemp("repos")
    plain = write_checkpoint(folder / "plain", num_shards=2)
    (plain / "README.md").write_text("not fetched")
    (plain / "pytorch_model.bin").write_text("not fetched")
    half = write_checkpoint(folder / "half", num_shards=3)
    (half / "model-00002-of-00003.safetensors").unlink()
    only_tokenizer = write_checkpoint(folder / "tokenizer")
    (only_tokenizer / "model.safetensors").unlink()
    return {
        "org/plain": Repo(plain, revisions=("main", "v2")),
        "org/gated": Repo(plain, gated=True),
        "org/half": Repo(half),
        "org/broken": Repo(plain, status=500),
        "org/tokenizer": Repo(only_tokenizer),
    }


LOADED = ["loaded", VOCAB_SIZE, 10000.0]


def test_errors_say_what_is_wrong_and_what_to_do(repos: dict[str, Repo], tmp_path: Path) -> None:
    cases = [
        {"model": "org/nothing"},
        {"model": "org/gated"},
        {"model": "org/plain", "revision": "v3"},
        {"model": "org/half"},
        {"model": "org/broken"},
        {"model": "not a name"},
        {"model": "org/plain", "tokenizer": "org/nothing"},
    ]
    expected = [
        ["no repository org/nothing", "HF_TOKEN", "local directory"],
        ["org/gated is gated", "accept its terms", "HF_TOKEN"],
        ["no revision 'v3'", "--revision"],
        ["incomplete on the hub: 1 of 3 weight files", "model-00002-of-00003.safetensors"],
        ["hub says", "500", "local directory"],
        ["'not a name' names no model", "demo"],
        ["no repository org/nothing"],
    ]
    with FakeHub(repos) as hub:
        results = load_all(cases, hub.url, tmp_path)
    for (kind, text), words in zip(results, expected, strict=True):
        assert kind == "error"
        assert "\n" not in text
        assert all(word in text for word in words), text


def test_fetched_once_then_found_without_a_network(repos: dict[str, Repo], tmp_path: Path) -> None:
    model = {"model": "org/plain"}
    with FakeHub(repos) as hub:
        assert load_all([model, {**model, "revision": "v2"}], hub.url, tmp_path) == [LOADED, LOADED]
        assert not any("README" in path or ".bin" in path for path in hub.requests)
        downloads = [path for path in hub.requests if path.endswith(".safetensors")]
        assert downloads
        hub.requests.clear()
        assert load_all([model], hub.url, tmp_path) == [LOADED]
        assert not any("/resolve/" in path for path in hub.requests)
    # The cache serves where the hub cannot be reached, and where it must not be asked.
    other = {"model": "org/other"}
    unreachable = load_all([model, other], closed_port(), tmp_path)
    assert unreachable[0] == LOADED
    assert "cannot be reached" in unreachable[1][1]
    assert "give a local directory" in unreachable[1][1]
    offline = load_all([model, other], hub.url, tmp_path, HF_HUB_OFFLINE="1")
    assert offline[0] == LOADED
    assert "HF_HUB_OFFLINE" in offline[1][1]
    # A download that was cut off.
    for shard in tmp_path.rglob("model-00001-of-00002.safetensors"):
        shard.unlink()
    cut = load_all([model], closed_port(), tmp_path)
    assert cut[0][0] == "error"
    assert "half-downloaded" in cut[0][1]


def test_token_download_dir_and_tokenizer(repos: dict[str, Repo], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    cases = [
        {"model": "org/gated", "download_dir": str(kept)},
        {"model": str(repos["org/plain"].folder), "tokenizer": "org/tokenizer", "download_dir": str(kept)},
    ]
    with FakeHub(repos) as hub:
        assert load_all(cases, hub.url, tmp_path / "home", HF_TOKEN=TOKEN) == [LOADED, LOADED]
        assert TOKEN in hub.tokens
    assert list(kept.rglob("config.json"))
    assert not list((tmp_path / "home").rglob("config.json"))
