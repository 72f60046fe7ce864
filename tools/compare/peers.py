"""Servers to compare with, each in its own virtual environment. They can be started with the BLAS of metal-engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from metal_engine.device.blas.openblas_copy import find_packaged, standard_copy
from metal_engine.device.cache_dir import cache_dir
from tools.fixtures.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
# Importing torch can take a minute on a busy machine.
_START_SECONDS = 240.0
_STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Peer:
    """Server to compare with.

    Attributes:
        name: package name of the server.
        requirements: packages to install.
        command: command that serves ``{model}`` on ``{port}``; ``{bin}`` is the folder of the environment's programs.
    """

    name: str
    requirements: tuple[str, ...]
    command: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return cache_dir() / "peers" / self.name

    @property
    def version(self) -> str:
        """Version that is installed in the peer's environment."""
        code = f"import importlib.metadata as m; print(m.version({self.name!r}))"
        return subprocess.run(
            [str(self.folder / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()


OURS = "metal-engine"

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "mlx-lm",
            ("mlx-lm", "mlx[cpu]; sys_platform == 'linux'"),
            ("{bin}/mlx_lm.server", "--model", "{model}", "--port", "{port}", "--log-level", "WARNING"),
        ),
        Peer(
            "vllm-mlx",
            ("vllm-mlx", "mlx[cpu]; sys_platform == 'linux'"),
            ("{bin}/vllm-mlx", "serve", "{model}", "--port", "{port}", "--continuous-batching"),
        ),
        Peer(
            "rapid-mlx",
            ("rapid-mlx", "mlx[cpu]; sys_platform == 'linux'"),
            # Without disk caches: a round would otherwise find the prompts of the previous round.
            (
                *("{bin}/rapid-mlx", "serve", "{model}", "--port", "{port}"),
                *("--yes", "--no-preflight", "--disable-disk-caches"),
            ),
        ),
    )
}


def install(peer: Peer) -> None:
    """Make the peer's environment with the newest version from PyPI, unless it exists."""
    done = peer.folder / ".installed"
    if done.exists():
        return
    print(f"installing {peer.name} into {peer.folder} ...", file=sys.stderr, flush=True)
    venv.create(peer.folder, with_pip=True)
    pip = [str(peer.folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *peer.requirements]
    subprocess.run(pip, check=True)
    done.touch()


@dataclass(frozen=True)
class PeerServer:
    """Running server. ``command`` is the command that started it."""

    name: str
    url: str
    command: tuple[str, ...]
    log: Path
    pid: int


def command_of(
    name: str, model: Path | str, port: int, extra: Sequence[str] = (), module: str = "metal_engine"
) -> tuple[str, ...]:
    if name == OURS:
        # -P: the package is imported from PYTHONPATH instead of the current folder.
        command = (sys.executable, "-P", "-m", module, "serve", str(model), "--port", str(port))
    else:
        peer = PEERS[name]
        values = {"bin": peer.folder / "bin", "model": model, "port": port}
        command = tuple(part.format_map(values) for part in peer.command)
    return (*command, *extra)


@contextmanager
def running(
    name: str,
    model: Path | str,
    *,
    same_blas: bool,
    extra: Sequence[str] = (),
    root: Path = ROOT,
    module: str = "metal_engine",
) -> Iterator[PeerServer]:
    """Yield a server on a free port. At the end, the server is stopped with all its processes.

    Args:
        same_blas: True to preload metal-engine's OpenBLAS in peers. Otherwise, peers start as installed.
        extra: more arguments for the command.
        root: checkout from which metal-engine's server runs.
        module: main module of metal-engine's server.

    Raises:
        RuntimeError: the server did not start. The message has the end of its log.
    """
    port = free_port()
    command = command_of(name, model, port, extra, module)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    env["PYTHONPATH"] = str(root) if name == OURS else ""
    if same_blas and name != OURS and sys.platform == "linux":
        env["LD_PRELOAD"] = str(standard_copy(find_packaged(), cache_dir() / "blas"))
    # A random name, so that no other user can have placed a link there.
    descriptor, log_path = tempfile.mkstemp(prefix=f"compare-{name}-{port}-", suffix=".log")
    log = Path(log_path)
    with open(descriptor, "wb") as output:
        # A new session, so that the child processes are killed together with the server.
        # The server runs in `root`, because Python looks for the engine process's modules in the current folder first.
        process = subprocess.Popen(
            command, cwd=root, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(name, process, url, log)
        yield PeerServer(name, url, command, log, process.pid)
    finally:
        stop(process)


def wait_until_up(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"{name} did not come up:\n{tail}") from None
            time.sleep(0.3)


def stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
