"""Models from the Hugging Face hub, with a fake hub on the loopback interface.

``huggingface_hub`` reads its environment when it is imported. Two child processes test the environment. The other tests
change the values that it read.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from metal_engine.checkpoints.hub import repository as hub
from metal_engine.checkpoints.loader import load
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.loading.load_checks import check_before_loading
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tests.support.checkpoint_files import CONFIG, VOCAB_SIZE, write_checkpoint, write_sparse_weights
from tests.support.fake_hub import TOKEN, FakeHub, Repo, asked_hub, use_endpoint
from tests.support.serving import wait_until
from tools.fixtures.architectures import configuration

Address = tuple[str, int]


def load_all(cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Load each case. Return the results: ["loaded", ...] or ["error", text]."""
    results: list[list[Any]] = []
    for case in cases:
        kind, gib = case.get("_device", ("cpu", 1))
        device = DeviceInfo(kind=kind, name="test", compute="test", memory_bytes=gib << 30)
        args = EngineArgs(**{name: value for name, value in case.items() if name != "_device"})
        try:
            loaded = load(
                args, device, lambda facts, args=args, device=device: check_before_loading(args, facts, device)
            )
            results.append(["loaded", loaded.config["vocab_size"], loaded.config.get("rope_theta")])
        except (ConfigError, ModelLoadError) as error:
            results.append(["error", str(error)])
    return results


def load_in_a_child(cases: list[dict[str, Any]], **env: str) -> list[list[Any]]:
    """Load each case in a new process with these variables."""
    code = "import json, sys; from tests.checkpoints.hub.test_repository import load_all; "
    code += "print(json.dumps(load_all(json.loads(sys.argv[1]))))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    command = [sys.executable, "-c", code, json.dumps(cases)]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the hub's cache in this test."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(hub, "CONNECT_SECONDS", 3.0)
    return tmp_path / "home"


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


@pytest.fixture
def asked(repos: dict[str, Repo], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with asked_hub(repos, monkeypatch) as server:
        yield server


LOADED = ["loaded", VOCAB_SIZE, 10000.0]
ERRORS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model": "org/nothing"}, ["no repository org/nothing", "HF_TOKEN", "local directory"]),
    ({"model": "org/gated"}, ["org/gated is gated", "accept its terms", "HF_TOKEN"]),
    ({"model": "org/plain", "revision": "v3"}, ["no revision 'v3'", "--revision"]),
    ({"model": "org/half"}, ["incomplete on the hub: 1 of 3 weight files", "model-00002-of-00003.safetensors"]),
    ({"model": "org/broken"}, ["hub says", "500", "local directory"]),
    ({"model": "not a name"}, ["'not a name' names no model", "demo"]),
    ({"model": "org/plain", "tokenizer": "org/nothing"}, ["no repository org/nothing"]),
]


def check_errors(results: list[list[Any]], cases: list[tuple[dict[str, Any], list[str]]]) -> None:
    for (kind, text), (case, words) in zip(results, cases, strict=True):
        assert kind == "error" and "\n" not in text
        assert all(word in text for word in words), (case, text)


@pytest.mark.usefixtures("asked")
def test_load_errors_name_the_problem_and_the_remedy() -> None:
    check_errors(load_all([case for case, _ in ERRORS]), ERRORS)


NEAR_MISSES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model": "demoo"}, ["did you mean demo?"]),
    ({"model": "org/plian"}, ["did you mean org/plain?"]),
    ({"model": "plain"}, ["did you mean org/plain?"]),
    ({"model": "something/else"}, ["give a local directory"]),
]


def test_fetched_once_then_found_without_a_network(
    asked: FakeHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near misses are named, with a network and without."""
    model, other = {"model": "org/plain"}, {"model": "org/other"}
    near = [case for case, _ in NEAR_MISSES]
    cut = {**model, "download_dir": str(tmp_path / "cut")}
    assert load_all([model, {**model, "revision": "v2"}, cut]) == [LOADED] * 3
    assert not any("README" in path or ".bin" in path for path in asked.requests)
    assert any(path.endswith(".safetensors") for path in asked.requests)
    asked.requests.clear()
    loaded, *online = load_all([model, *near])
    assert loaded == LOADED
    assert not any("/resolve/" in path for path in asked.requests if "org/plain" in path)
    # An interrupted download.
    for shard in (tmp_path / "cut").rglob("model-00001-of-00002.safetensors"):
        shard.unlink()
    # The cache is used if the hub cannot be reached, and if requests to the hub are forbidden.
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    use_endpoint(nowhere, monkeypatch)
    found, unreachable, interrupted = load_all([model, other, cut])
    assert found == LOADED
    assert "cannot be reached" in unreachable[1] and "give a local directory" in unreachable[1]
    assert interrupted[0] == "error" and "half-downloaded" in interrupted[1]
    env = {"HF_ENDPOINT": asked.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    num_requests = len(asked.requests)
    found, forbidden, *offline = load_in_a_child([model, other, *near], **env)
    assert found == LOADED and len(asked.requests) == num_requests
    assert "HF_HUB_OFFLINE" in forbidden[1]
    check_errors(online, NEAR_MISSES)
    check_errors(offline, NEAR_MISSES)


def test_a_download_dir_in_the_home_directory(asked: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands ``~`` in ``--download-dir ~/models``, but not in ``--download-dir=~/models``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = {"model": "org/plain", "download_dir": "~/models"}
    assert load_all([model]) == [LOADED]
    asked.requests.clear()
    assert load_all([model]) == [LOADED]
    assert not any("/resolve/" in path for path in asked.requests)
    assert list((tmp_path / "models").rglob("config.json"))


@pytest.fixture
def silent() -> Iterator[Address]:
    """Return the address of a server whose queue is full: connections hang, as where packets are dropped."""
    with socket.socket() as server, contextlib.ExitStack() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()


def test_a_hub_whose_connections_hang_is_reported_as_unreachable(
    silent: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "CONNECT_SECONDS", 0.2)
    use_endpoint(f"http://127.0.0.1:{silent[1]}", monkeypatch)
    ((kind, text),) = load_all([{"model": "org/plain"}])
    assert kind == "error" and "cannot be reached (" in text, text


def test_a_hub_is_reachable_if_one_of_its_addresses_is(silent: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some networks drop all packets of one family of addresses, mostly IPv6. Other addresses refuse a connection."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = closed.getsockname()
    monkeypatch.setattr(hub, "CONNECT_SECONDS", 1.0)
    addresses = [silent, refusing]

    def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

    with FakeHub({}) as server:
        use_endpoint(server.url, monkeypatch)
        monkeypatch.setattr(hub.socket, "getaddrinfo", getaddrinfo)
        for others, problem in (([silent, refusing], "refused"), ([silent], "no answer within 1 s")):
            addresses[:] = others
            with pytest.raises(hub.HubUnreachableError, match=problem):
                hub.check_reachable()
        addresses[:] = [silent, refusing, ("127.0.0.1", int(server.url.rpartition(":")[2]))]
        hub.check_reachable()


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "ALL_PROXY"])
def test_a_proxy_is_checked_in_place_of_the_hub(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv(variable, "http://proxy.invalid:8080")
    asked: list[Address] = []
    monkeypatch.setattr(hub.socket, "getaddrinfo", lambda *address, **_: asked.append(address))
    monkeypatch.setattr(hub, "_connect_to_any", lambda addresses, deadline: None)
    monkeypatch.setattr(hub, "_check_answers", lambda: None)
    hub.check_reachable()
    assert asked == [("proxy.invalid", 8080)]


def test_an_invalid_hub_host_name_is_reported_as_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    use_endpoint(f"http://{'x' * 70}.org", monkeypatch)
    with pytest.raises(hub.HubUnreachableError, match="label"):
        hub.check_reachable()


def test_a_hub_that_never_responds_times_out_after_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is given up after one request, which takes one time limit."""
    monkeypatch.setattr(hub, "CONNECT_SECONDS", 0.2)
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as waiting:

        def accept() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    received.append(waiting.enter_context(server.accept()[0]).recv(1 << 16))

        threading.Thread(target=accept, daemon=True).start()
        use_endpoint(f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch)
        ((kind, text),) = load_all([{"model": "org/plain"}])
        wait_until(lambda: any(received), "the thread to receive the request")
        server.shutdown(socket.SHUT_RDWR)
    assert kind == "error" and "cannot be reached (the hub does not answer: timed out)" in text, text
    requests = [data for data in received if data]  # the first connection is closed without a request
    assert len(requests) == 1 and requests[0].startswith(b"HEAD ")


def test_a_404_without_details_gives_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub({}, says_why=False) as server:
        use_endpoint(server.url, monkeypatch)
        results = load_all([{"model": "demoo"}, {"model": "org/nothing"}])
    for (kind, text), hint in zip(results, ("did you mean demo?", "give a local directory"), strict=True):
        assert kind == "error" and "404 Not Found" in text and hint in text, text
        assert "mozilla" not in text


# --- inspected before the download ---

BIG_LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
# 32.8 billion weights: 61.1 GiB in bfloat16.
BIG_TENSORS = {f"model.layers.{i}.mlp.up_proj.weight": ("BF16", (14336, 28672)) for i in range(80)}
# 4 MB of weights, and 640 KB of KV for 16 tokens: enough for a measurable download.
SMALL_TENSORS = {f"model.layers.{i}.weight": ("BF16", (128, 2048)) for i in range(80)}


def write_repo(folder: Path, config: dict[str, Any] | None, **weights: dict[str, Any]) -> Repo:
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in weights.items():
        write_sparse_weights(folder / f"{name}.safetensors", tensors)
    return Repo(folder)


def test_models_that_cannot_run_are_refused_without_a_weight_download(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is refused from its configuration and headers, without its weights, which have at least 5 MB here."""
    other = write_repo(tmp_path / "other", {**BIG_LLAMA}, adapter=SMALL_TENSORS)
    (other.folder / "pytorch_model.bin").write_bytes(bytes(5_000_000))
    gated = write_repo(tmp_path / "gated", BIG_LLAMA, model=SMALL_TENSORS)
    gated.gated = True
    gguf = write_repo(tmp_path / "gguf", None)
    for name in ("x-Q5_K_M.gguf", "x-q8_0.gguf", "x-Q2_K-00001-of-00002.gguf", "x-Q2_K-00002-of-00002.gguf"):
        (gguf.folder / name).write_bytes(bytes(5_000_000))
    blockwise = {**CONFIG, **configuration("phi3small")}
    repos = {
        "org/unknown": write_repo(tmp_path / "unknown", {**BIG_LLAMA, "model_type": "nonesuch"}, model=SMALL_TENSORS),
        "org/big": write_repo(tmp_path / "big", BIG_LLAMA, model=BIG_TENSORS),
        "org/gated": gated,
        "org/other": other,
        "org/gguf": gguf,
        "org/code": write_repo(tmp_path / "code", {**BIG_LLAMA, "model_file": "own.py"}, model=SMALL_TENSORS),
        "org/both": write_repo(tmp_path / "both", {**BIG_LLAMA, "is_causal": False}, model=SMALL_TENSORS),
        "org/blockwise": write_repo(tmp_path / "blockwise", blockwise, model=SMALL_TENSORS),
        "org/llama": write_repo(tmp_path / "llama", BIG_LLAMA, model=SMALL_TENSORS),
    }
    mac = {"_device": ("metal", 16)}
    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"model": "org/unknown"}, ["mlx-lm has no architecture 'nonesuch'"]),
        ({"model": "org/big", **mac}, ["take 61.", "has 16.0 GiB", "no quantized version", "--gpu-memory-util"]),
        (
            {"model": "org/big", "_device": ("metal", 32)},
            ["take 61.2 GiB", "a 5-bit version of about 21.1 GiB would fit"],
        ),
        ({"model": "org/big", "_device": ("cpu", 64)}, ["take 122.5 GiB", "64.0 GiB free", "14.6 billion parameters"]),
        ({"model": "org/gated"}, ["org/gated is gated", "HF_TOKEN"]),
        ({"model": "org/other"}, ["no weights", "adapter.safetensors, which cannot be read"]),
        ({"model": "org/gguf"}, ["no Q4_K_M GGUF file", "Q5_K_M (5 MiB)", "Q8_0 (5 MiB)"]),
        ({"model": "org/gguf:Q3_K_S"}, ["no Q3_K_S GGUF file", "Q5_K_M"]),
        ({"model": "org/gguf:q2_k"}, ["one of 2 parts"]),
        ({"model": "org/llama:Q4_K_M"}, ["no GGUF files"]),
        ({"model": "org/code"}, ["has its own code (own.py)", "--trust-remote-code"]),
        ({"model": "org/both"}, ["org/both is a bidirectional model"]),
        ({"model": "org/blockwise"}, ["architecture phi3small) cannot run here: "]),
        (
            {"model": "org/llama", "kv_cache_memory_bytes": 1000, **mac},
            ["one block", "takes 5 MiB", "1000 bytes are given"],
        ),
        ({"model": "org/llama", "kv_cache_memory_bytes": 17 << 30, **mac}, ["17.0 GiB exceeds the 16.0 GiB"]),
        (
            {"model": "org/llama", "kv_cache_memory_bytes": 1 << 30, "max_model_len": 4000, **mac},
            ["4000 does not fit into the KV cache of 3264 tokens", "--kv-cache-memory-bytes"],
        ),
        ({"model": "org/llama", "max_model_len": 200_000, **mac}, ["exceeds the 131072 tokens"]),
        ({"model": "org/llama@v2"}, ["no revision 'v2'"]),
        ({"model": "org/llama@v2", "revision": "v3"}, ["--revision is v3", "names v2"]),
    ]
    with asked_hub(repos, monkeypatch) as server:
        check_errors(load_all([case for case, _ in refused]), refused)
        assert server.file_bytes < 1_000_000
    assert not list(cache.rglob("*.safetensors"))


def test_token_download_dir_and_tokenizer(asked: FakeHub, repos: dict[str, Repo], cache: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    cases = [
        {"model": "org/gated", "download_dir": str(kept)},
        {"model": str(repos["org/plain"].folder), "tokenizer": "org/tokenizer", "download_dir": str(kept)},
    ]
    env = {"HF_ENDPOINT": asked.url, "HF_HOME": str(cache), "HF_TOKEN": TOKEN}
    assert load_in_a_child(cases, **env) == [LOADED, LOADED]
    assert TOKEN in asked.tokens
    assert list(kept.rglob("config.json")) and not list(cache.rglob("config.json"))
