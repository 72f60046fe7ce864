"""``metal-engine serve`` in its own process, with the probes of :mod:`tests.support.probes`.

``python -m tests.support.probed_server serve MODEL ...`` runs the unchanged command. The first line of output has the
port. After that, the process reads the commands ``reset``, ``trim``, ``read`` and ``in use``, one per line, and answers
each with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0


@dataclass
class ProbedServer:
    """Process of a server, as a test uses it.

    Attributes:
        log: file that receives the process's log.
    """

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self, *, trim: bool = True) -> None:
        self._ask("trim" if trim else "reset")

    def read(self) -> dict[str, float]:
        return self._ask("read")

    def _ask(self, command: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the server has ended:\n{self.log.read_text()[-4000:]}"
        return json.loads(answer)

    @property
    def resident(self) -> int:
        """Return the resident memory of the process in bytes (Linux)."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def bytes_in_use(self) -> dict[str, int]:
        """Return the result of :func:`tests.support.probes.bytes_in_use` in the process."""
        return self._ask("in use")

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health", timeout=DEADLINE).raise_for_status().json()

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits and no block is in use."""
        deadline = time.monotonic() + DEADLINE
        while any((health := self.health())[name] for name in ("running", "waiting", "kv_cache_usage")):
            assert time.monotonic() < deadline, f"something is left: {health}"
            time.sleep(0.02)


@contextmanager
def probed_server(model: Path, folder: Path, *flags: str) -> Iterator[ProbedServer]:
    """Yield a server on a checkpoint. On exit, SIGINT must end it with status 0 and no traceback in its log.

    Args:
        folder: folder for the log.
    """
    log = folder / "server.log"
    command = [sys.executable, "-m", "tests.support.probed_server", "serve", str(model), "--port", "0", *flags]
    command += ["--no-engine-process"]  # the probes are in the process of the command
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, log.read_text()
        yield ProbedServer(process, json.loads(first), log)
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and "Traceback" not in log.read_text(), log.read_text()[-4000:]


def main() -> None:
    # Standard output carries the answers to the test. The command's own output goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from metal_engine.cli.main import app
    from metal_engine.server.run import Server
    from tests.support.probes import Probes, bytes_in_use

    probes = Probes()
    probes.install()
    startup = Server.startup
    ticks: list[asyncio.Task[None]] = []

    def obey() -> None:
        for line in sys.stdin:
            command = line.strip()
            if command in ("reset", "trim"):
                probes.reset(trim=command == "trim")
            print(json.dumps(bytes_in_use() if command == "in use" else probes.read()), file=answers)
        os._exit(1)  # the test ended without stopping the server

    async def watched_startup(self: Server, sockets: Any = None) -> None:
        await startup(self, sockets)
        ticks.append(asyncio.ensure_future(probes.watch_loop()))
        print(self.port if self.servers[0].sockets else sockets[0].getsockname()[1], file=answers)
        threading.Thread(target=obey, name="obey", daemon=True).start()

    Server.startup = watched_startup  # type: ignore[method-assign]
    app()


if __name__ == "__main__":
    main()
