"""Reads the environment that a launcher sets, and starts the other ranks on this machine if there is no launcher.

``mlx.launch`` sets these variables: ``MLX_RANK``, and ``MLX_HOSTFILE`` (ring) or ``MLX_IBV_DEVICES`` and
``MLX_JACCL_COORDINATOR`` (JACCL).
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from metal_engine.distributed.rendezvous import Watched
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.python_process import PYTHON, python_environment
from metal_engine.settings.args import EngineArgs

RANK, HOSTFILE, COORDINATOR = "MLX_RANK", "MLX_HOSTFILE", "MLX_JACCL_COORDINATOR"
_DEVICES = "MLX_IBV_DEVICES"
LOOPBACK = "127.0.0.1"
# Ports of ranks that this process starts: below those that systems choose for connections and for servers with port 0
# (Linux: from 32768, macOS: from 49152). Until a rank listens, another program could be given its port. If that is a
# rank of another group, the groups connect to each other, because MLX lets two ranks listen on one port.
_PORTS = range(20_000, 32_000)
# Module that runs in a rank that this process starts.
_PROGRAM = "metal_engine.rank_worker"
# Standard inputs of the started ranks. The system closes these pipes when this process ends for any reason.
_life_lines: list[IO[str]] = []
# In a rank started by rank 0: descriptor of its standard input.
_leader_lines: list[int] = []
# Seconds for a rank to end normally after rank 0 has ended. Rank 0's last action may be the request to end.
_LAST_SECONDS = 1.0
# Seconds for a rank to end on rank 0's request. The server waits longer for rank 0 (10 s).
_OWN_END_SECONDS = 5.0


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank of this process; None if no launcher has started it."""
    rank = environment.get(RANK)
    return int(rank) if rank is not None and rank.isdigit() else None


def refuse_ranks_without_size(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if a launcher has started several processes, or an unknown number of processes.

    Call it if the settings give no number of ranks: each process would then be a separate engine.
    """
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
            f"({RANK}), and each process would be a separate engine",
        )


def is_follower(args: EngineArgs) -> bool:
    """Return True if this process only computes for rank 0, which serves."""
    return args.num_ranks > 1 and bool(launched_rank())


def leader_host(flag: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return rank 0's address in the group, without the port.

    Args:
        flag: setting that the error names.

    Raises:
        ConfigError: the environment does not contain the address.
    """
    try:
        if path := environment.get(HOSTFILE):
            address = json.loads(Path(path).read_text())[0][0]
        else:
            address = environment[COORDINATOR]
        return str(address).rpartition(":")[0].strip("[]")
    except (KeyError, OSError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(
            flag, f"needs {HOSTFILE} or {COORDINATOR} in addition to {RANK}, as mlx.launch sets them ({error!r})"
        ) from error


def host_name() -> str:
    """Return the host name of this machine."""
    return socket.gethostname()


@dataclass
class LocalRanks:
    """Ranks 1 and above, which rank 0 has started on this machine.

    Attributes:
        processes: processes of the ranks, from rank 1 on.
        ends: read ends of pipes, one for each process. A pipe reaches its end when its process ends.
        hostfile: temporary host file of the group.
    """

    processes: list[subprocess.Popen[str]]
    ends: list[int]
    hostfile: Path

    def watched(self) -> list[Watched]:
        """Return the data for monitoring these ranks while they join."""
        both = enumerate(zip(self.processes, self.ends, strict=True), 1)
        return [Watched(f"rank {rank} ({LOOPBACK})", process.pid, end) for rank, (process, end) in both]

    def stop(self) -> None:
        """Terminate the ranks that have not joined. Joined ranks ignore the signal and end on rank 0's request.

        Kills the ranks that remain after ``_OWN_END_SECONDS``.
        """
        for process in self.processes:
            process.terminate()
        self.kill_left()

    def kill_left(self) -> None:
        """Wait at most ``_OWN_END_SECONDS`` for the ranks to exit. Kill the remaining ranks, e.g. suspended ranks."""
        deadline = time.monotonic() + _OWN_END_SECONDS
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        """Kill the ranks that have not ended. A suspended rank would otherwise outlive rank 0 and keep its memory."""
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        """Release the resources that the ranks needed to join: pipes, the host file and environment variables.

        The ranks continue until rank 0 ends them or is gone.
        """
        for end in self.ends:
            os.close(end)
        self.ends = []
        self.hostfile.unlink(missing_ok=True)
        for name in (RANK, HOSTFILE):
            os.environ.pop(name, None)


def start_local_ranks(args: EngineArgs) -> LocalRanks:
    """Start the other ranks of a group on this machine. They communicate over the loopback interface.

    Sets environment variables that make this process rank 0 of the group. :meth:`LocalRanks.end` removes them. If a
    rank cannot be started, the others are stopped, and the error is raised.
    """
    ports = free_ports(args.num_ranks)
    descriptor, name = tempfile.mkstemp(prefix="metal-engine-ranks-", suffix=".json")
    with os.fdopen(descriptor, "w") as file:
        json.dump([[f"{LOOPBACK}:{port}"] for port in ports], file)
    os.environ[HOSTFILE] = name
    os.environ[RANK] = "0"
    parameters = json.dumps({"args": asdict(args), "log_level": logging.getLogger().getEffectiveLevel()})
    local = LocalRanks([], [], Path(name))
    try:
        for rank in range(1, args.num_ranks):
            _start_rank(rank, parameters, local)
    except BaseException:
        local.stop()
        local.end()
        raise
    return local


def _start_rank(rank: int, parameters: str, local: LocalRanks) -> None:
    end, held = os.pipe()
    local.ends.append(end)
    try:
        process = subprocess.Popen(
            [*PYTHON, "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=2,  # stderr: the stdout of this process may contain data
            env=python_environment() | {RANK: str(rank)},
            pass_fds=[held],  # the child keeps it open until it ends, without using it
            text=True,
        )
    finally:
        os.close(held)
    local.processes.append(process)
    assert process.stdin is not None
    process.stdin.write(parameters + "\n")
    process.stdin.flush()
    _life_lines.append(process.stdin)


def end_with(life_line: int) -> None:
    """Start a thread that ends this process soon after rank 0 has ended, even while other threads are blocked.

    Returns at once. For ranks that rank 0 has started.

    Args:
        life_line: descriptor of a pipe that is closed when rank 0 ends.
    """

    def wait() -> None:
        while os.read(life_line, 1):  # os.read(), because a file object would be locked when Python ends
            pass
        if path := os.environ.get(HOSTFILE):
            Path(path).unlink(missing_ok=True)
        time.sleep(_LAST_SECONDS)
        os._exit(1)

    _leader_lines.append(life_line)
    threading.Thread(target=wait, name="life line", daemon=True).start()


def started_here() -> bool:
    """Return True if rank 0 has started this rank on its machine."""
    return bool(_leader_lines)


def ignore_signals() -> None:
    """Ignore signals, so that this process ends only when rank 0 has answered all requests and ends it.

    A terminal sends these signals to all ranks, and so does a signal to the process group. Has an effect only in the
    main thread.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def free_ports(count: int) -> list[int]:
    """Return free ports of this machine for ranks that are about to start. Raises ModelLoadError if there are none."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            ports.append(port)
    else:
        raise ModelLoadError(f"{count} ranks need a free port each of {_PORTS[0]} to {_PORTS[-1]}")
    return ports
