"""``serve`` with several models, and ``ps``."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from metal_engine.cli.main import app
from metal_engine.cli.models_dir import find_several, models_in
from metal_engine.errors import ConfigError
from metal_engine.settings.args import GIB, EngineArgs
from metal_engine.settings.config import MARGIN_BYTES, DeviceInfo
from metal_engine.settings.fields import format_size
from metal_engine.settings.multi_model import RegistryArgs, models_memory, per_model_args
from metal_engine.settings.server_args import ServerArgs
from tests.support.checkpoint_files import write_checkpoint
from tests.support.engine_child import is_running
from tests.support.ranked_server import children_of
from tests.support.serving import serve, wait_until
from tools.fixtures.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DRAFT_MODEL = '{"method": "draft_model", "model": "demo", "num_speculative_tokens": 2}'
SMALL = ["--kv-cache-dtype", "int8", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8"]
SMALL += ["--max-num-batched-tokens", "64"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "org/two"):
        write_checkpoint(folder / name, config={"head_dim": 64})
    return folder


@pytest.fixture(scope="module")
def process(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Yield URL and process id of a server with one model named in a file of settings, and the models of a folder.

    SIGINT ends it with status 0, and no process of an engine stays.
    """
    config = tmp_path_factory.mktemp("config") / "config.yaml"
    config.write_text(f"model: [{folder / 'one'}]\nmodels-dir: {folder}\nmodels-memory: 64MiB\n")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "metal_engine", "serve", "--config", str(config), "--port", str(port), *SMALL]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def is_up() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return is_ready(url)

    wait_until(is_up, "the server")
    yield url, process.pid
    left = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in log, log
    assert left
    wait_until(lambda: not any(map(is_running, left)), "the ends of the processes")
    assert re.search(
        rf"loaded:       {folder / 'one'} \([\d.]+ MiB, KV cache in int8, temperature 1, top_p 1\)", log
    ), log
    assert "on demand:    one, org/two" in log, log


@pytest.fixture(scope="module")
def server(process: tuple[str, int]) -> str:
    return process[0]


def test_ps(server: str, folder: Path) -> None:
    assert [(row["name"], row["state"]) for row in json.loads(run("ps", "--url", server, "--json").stdout)] == [
        (str(folder / "one"), "loaded"),
        ("one", "unloaded"),
        ("org/two", "unloaded"),
    ]
    body = {"model": "org/two", "prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{server}/v1/completions", json=body, timeout=60).status_code == 200
    heads, *lines = run("ps", "--url", server).stdout.splitlines()
    assert heads.split() == ["NAME", "STATE", "MEMORY", "CONTEXT", "REQUESTS", "IDLE", "PROBLEM"]
    assert [line.split()[1] for line in lines] == ["loaded", "unloaded", "loaded"]
    assert "MiB" in lines[2] and "1,024" in lines[2]


def test_ps_of_a_server_with_one_model() -> None:
    with serve(names=("m", "other")) as served:
        rows = json.loads(run("ps", "--url", served.url, "--json").stdout)
        assert [(row["name"], row["state"], row["requests"]) for row in rows] == [
            ("m", "loaded", 0),
            ("other", "loaded", 0),
        ]
        memory = served.engine.config.peak_bytes
        assert [row["memory_bytes"] for row in rows] == [memory, memory]
        assert format_size(memory) in run("ps", "--url", served.url).stdout.splitlines()[1]
    result = run("ps", "--url", served.url)
    assert result.exit_code == 1 and "no server responds" in result.stderr


def test_serve_refuses_invalid_combinations_of_models_and_flags(folder: Path, tmp_path: Path) -> None:
    one, two = str(folder / "one"), str(folder / "org" / "two")
    for arguments, problem in [
        ([one, two, "--served-model-name", "x"], "--served-model-name is for one model"),
        (["a\u202eb"], "choose another name with --served-model-name"),
        ([one, "a\u202eb"], "MODEL 'a\\u202eb' has the character U+202E"),
        (["--models-dir", str(tmp_path)], "contains no model, and no MODEL is given"),
        ([one, two, "--speculative-config", DRAFT_MODEL], "method draft_model is for one model"),
        ([one, two, "--enable-lora"], "--enable-lora is for one model"),
        ([one, two, "--lora-modules", "sql=/nowhere"], "--lora-modules is for one model"),
        ([one, two, "--models-memory", "900TiB"], "--models-memory"),
        ([], "give a MODEL"),
    ]:
        result = run("serve", *arguments, "--port", "0")
        assert result.exit_code == 1 and problem in " ".join(result.stderr.split()), (arguments, result.stderr)


def test_models_in_processes_of_their_own(process: tuple[str, int], folder: Path) -> None:
    """The server loads no MLX. A stream survives the death of its engine. The other model answers meanwhile."""
    url, pid = process
    first = children_of(pid)[0]  # the oldest has the model that is named in the settings
    body = {"model": str(folder / "one"), "prompt": "a", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    body["stream"] = True
    whole = [line for line in httpx.post(f"{url}/v1/completions", json=body, timeout=60).iter_lines() if line]
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        received = [next(lines)]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: '"restarting":true' in httpx.get(f"{url}/health").text, "the restart")
        other = {**body, "model": "org/two", "stream": False}
        assert httpx.post(f"{url}/v1/completions", json=other, timeout=60).is_success
        received += lines
    assert text_of(received) == text_of(whole)
    assert httpx.get(f"{url}/ready").status_code == 200
    assert first not in children_of(pid)
    maps = Path(f"/proc/{pid}/maps")
    assert not maps.exists() or "libmlx" not in maps.read_text()


def text_of(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_folder_of_models_alone_can_be_served(folder: Path) -> None:
    found = find_several((), EngineArgs(model=""), ServerArgs(), RegistryArgs(models_dir=str(folder)))
    assert found.keys() == {"one", "org/two"}


def test_folders_that_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Invalid names and unreadable folders are logged once. The other models are served."""
    bad = (b"bad\nname", b"caf\xe9", b"caf\xe8 org/in", b"closed/in", b"half/closed")
    for name in (b"good", b"org/in", b"half/in", *bad):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / os.fsdecode(b"caf\xe9.gguf")).touch()
    for file in ("upper.GGUF", "good.gguf", "mmproj-F16.gguf", "x-00001-of-00002.gguf", "x-00002-of-00002.gguf"):
        (tmp_path / file).touch()
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        """Fail for content of such a folder. The folder's own permissions do not restrict root."""
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    found = models_in(tmp_path)
    assert found.keys() == {"good", "org/in", "half/in", "upper", "x-00001-of-00002"}
    assert found["good"] == tmp_path / "good"
    (line,) = caplog.messages
    assert line.isascii() and line.isprintable()
    wanted = ["caf\\udce9'", "caf\\udce9.gguf'", "caf\\udce8 org/in'", "/closed'", "half/closed'", "Permission denied"]
    wanted.append("good.gguf': ")
    for part in (*wanted, "bad\\nname' has the character U+000A"):
        assert line.count(part) >= 1, part
    assert models_in(tmp_path, warns=False) and len(caplog.messages) == 1


@pytest.mark.full
def test_one_that_is_named_and_cannot_be_loaded_ends_the_command(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"nothing")
    command = [sys.executable, "-m", "metal_engine", "serve", str(folder / "one"), str(tmp_path / "broken"), *SMALL]
    done = subprocess.run([*command, "--port", "0"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error:") and "safetensors" in last and "Traceback" not in done.stderr, done.stderr


def device(kind: str) -> DeviceInfo:
    return DeviceInfo(kind=kind, name="x", compute="x", memory_bytes=64 * GIB)


def test_memory() -> None:
    args = EngineArgs(model="m")
    assert models_memory(args, RegistryArgs(), device("cpu")) == 48 * GIB
    assert models_memory(args, RegistryArgs(), device("metal")) == int(0.9 * 64 * GIB) - MARGIN_BYTES
    assert models_memory(args, RegistryArgs(models_memory=GIB), device("metal")) == GIB
    with pytest.raises(ConfigError, match="--models-memory"):
        models_memory(args, RegistryArgs(models_memory=60 * GIB), device("metal"))
    assert per_model_args(args, 48 * GIB, device("metal")).kv_cache_memory_bytes == 6 * GIB
    assert per_model_args(args, 48 * GIB, device("cpu")).kv_cache_memory_bytes == 2 * GIB
    given = EngineArgs(model="m", kv_cache_memory_bytes=GIB)
    assert per_model_args(given, 48 * GIB, device("cpu")) == given
