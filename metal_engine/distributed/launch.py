"""What a launcher tells a process of its group, and how the other ranks are started on this machine without one.

The variables are those of ``mlx.launch``: ``MLX_RANK``, and ``MLX_HOSTFILE`` (ring) or ``MLX_IBV_DEVICES`` and
``MLX_JACCL_COORDINATOR`` (JACCL).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from metal_engine.distributed.rendezvous import Watched
from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs

RANK, HOSTFILE, COORDINATOR = "MLX_RANK", "MLX_HOSTFILE", "MLX_JACCL_COORDINATOR"
_DEVICES = "MLX_IBV_DEVICES"
LOOPBACK = "127.0.0.1"
# The program of a rank that this process starts.
_PROGRAM = "metal_engine.rank_worker"
# Their standard inputs, which end when this process does, however it ends.
_life_lines: list[IO[str]] = []
# Of this process, if it is such a rank: the descriptor of its standard input.
_leader_lines: list[int] = []
# For a rank to end as rank 0 tells it, which may be the last that rank 0 does.
_LAST_SECONDS = 1.0
# Time for a rank to end after rank 0 has told it to. The server waits for rank 0 for longer (10 s).
_OWN_END_SECONDS = 5.0


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, if a launcher has started it; else None."""
    rank = environment.get(RANK)
    return int(rank) if rank is not None and rank.isdigit() else None


def refuse_ranks_without_size(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where a launcher has started several processes: each would be an engine of its own."""
    rank = launched_rank(environment)
    if rank is None:
        return
    try:
        path = environment.get(HOSTFILE) or environment[_DEVICES]
        size = len(json.loads(Path(path).read_text()))
    except (KeyError, OSError, ValueError, TypeError):
        size = None
    if size != 1:
        of_size = "" if size is None else f" of {size}"
        raise ConfigError(
            "--tensor-parallel-size",
            f"(or --pipeline-parallel-size) is missing: a launcher has started this process as rank {rank}{of_size} "
            f"({RANK}), and each would be an engine of its own",
        )


def is_follower(args: EngineArgs) -> bool:
    """Whether this process is to compute what another one serves."""
    return args.num_ranks > 1 and bool(launched_rank())


def leader_host(flag: str, environment: Mapping[str, str] = os.environ) -> str:
    """The address of rank 0 as the group knows it.

    Raises:
        ConfigError: the environment does not tell it.
    """
    try:
        if path := environment.get(HOSTFILE):
            address = json.loads(Path(path).read_text())[0][0]
        else:
            address = environment[COORDINATOR]
        return str(address).rpartition(":")[0].strip("[]")
    except (KeyError, OSError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(
            flag, f"needs {HOSTFILE} or {COORDINATOR} beside {RANK}, as mlx.launch sets them ({error!r})"
        ) from error


def host_name() -> str:
    """What tells this machine from others."""
    return socket.gethostname()


@dataclass
class LocalRanks:
    """Ranks 1 and up, started on this machine by rank 0."""

    processes: list[subprocess.Popen[str]]
    # Descriptors of pipes, each of which ends with its process.
    ends: list[int]
    hostfile: Path

    def watched(self) -> list[Watched]:
        """These ranks, as they are watched while they join."""
        both = enumerate(zip(self.processes, self.ends, strict=True), 1)
        return [Watched(f"rank {rank} ({LOOPBACK})", process.pid, end) for rank, (process, end) in both]

    def stop(self) -> None:
        """End those that have not joined; those that have are told by rank 0."""
        for process in self.processes:
            process.terminate()
        self.kill_left()

    def kill_left(self) -> None:
        """Wait ``_OWN_END_SECONDS`` at most for the ranks to exit. Kill the remaining ranks, such as stopped ones."""
        deadline = time.monotonic() + _OWN_END_SECONDS
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        """Kill the ranks that have not ended: a stopped one would stay, with its memory, when rank 0 has gone."""
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        """Remove what they were started with. They end when rank 0 tells them, or has gone."""
        for end in self.ends:
            os.close(end)
        self.ends = []
        self.hostfile.unlink(missing_ok=True)
        for name in (RANK, HOSTFILE):
            os.environ.pop(name, None)


def start_local_ranks(args: EngineArgs) -> LocalRanks:
    """Start the other ranks of a group on this machine, as its rank 0; they speak over the loopback interface."""
    ports = _free_ports(args.num_ranks)
    descriptor, name = tempfile.mkstemp(prefix="metal-engine-ranks-", suffix=".json")
    with os.fdopen(descriptor, "w") as file:
        json.dump([[f"{LOOPBACK}:{port}"] for port in ports], file)
    os.environ[HOSTFILE] = name
    os.environ[RANK] = "0"
    told = json.dumps({"args": asdict(args), "log_level": logging.getLogger().getEffectiveLevel()})
    processes, ends = [], []
    for rank in range(1, args.num_ranks):
        end, held = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=2,  # what this process prints may be data
            env=os.environ | {RANK: str(rank)},
            pass_fds=[held],  # which it holds until it ends, and knows nothing of
            text=True,
        )
        os.close(held)
        ends.append(end)
        assert process.stdin is not None
        process.stdin.write(told + "\n")
        process.stdin.flush()
        _life_lines.append(process.stdin)
        processes.append(process)
    return LocalRanks(processes, ends, Path(name))


def end_with(life_line: int) -> None:
    """End this process soon after rank 0, which has started it, has: it may be where it would not notice that.

    Args:
        life_line: the descriptor of a pipe that ends when rank 0 does.
    """

    def wait() -> None:
        while os.read(life_line, 1):  # not through a file, which would be locked when Python ends
            pass
        if path := os.environ.get(HOSTFILE):
            Path(path).unlink(missing_ok=True)
        time.sleep(_LAST_SECONDS)
        os._exit(1)

    _leader_lines.append(life_line)
    threading.Thread(target=wait, name="life line", daemon=True).start()


def started_here() -> bool:
    """Whether rank 0 has started this rank, on its machine."""
    return bool(_leader_lines)


def ignore_signals() -> None:
    """Leave the end of this process to rank 0, which has requests to answer first; in a program's main thread alone.

    A terminal, and whatever ends a process group, sends them to all ranks.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _free_ports(count: int) -> list[int]:
    listening = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in listening]
    for one in listening:
        one.close()
    return ports
