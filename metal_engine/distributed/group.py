"""Group of ranks: connects the ranks at the start, compares their settings, and ends all ranks if one rank is lost."""

from __future__ import annotations

import atexit
import json
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from importlib import metadata
from typing import Any, cast

import mlx.core as mx

from metal_engine import __version__
from metal_engine.distributed.channel import TOKEN_BYTES, FrameKind, Link, accept_ranks, connect, listen
from metal_engine.distributed.follower import run_as_follower
from metal_engine.distributed.launch import (
    LOOPBACK,
    LocalRanks,
    ignore_signals,
    launched_rank,
    leader_host,
    start_local_ranks,
    started_here,
)
from metal_engine.distributed.leader import LeaderRunner
from metal_engine.distributed.rank_failure import (
    FOLLOWER_GRACE_SECONDS,
    LEADER_GRACE_SECONDS,
    RankFailureMonitor,
    StepTimeout,
)
from metal_engine.distributed.rendezvous import ended_by_hang_up, monitored_rendezvous
from metal_engine.distributed.wire import encode
from metal_engine.errors import ConfigError, ModelLoadError, one_line
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.token_broadcast import TokenBroadcast
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.fields import settings_of
from metal_engine.step import RunnerLostError

logger = logging.getLogger(__name__)

# Seconds within which all ranks must find each other. Ranks start at about the same time.
_RENDEZVOUS_SECONDS = 120.0
# Settings that may differ between ranks: the model may have another path on another machine.
_OWN_SETTINGS = {"model", "tokenizer", "download_dir", "chat_template", "generation_config"}
# Flag that defined the group of this process. A process cannot join a second group, because MLX keeps the first.
_joined: list[str] = []


class RankGroup:
    """Ranks of an engine, including this process. Belongs to the engine's thread.

    Attributes:
        args: settings of the engine.
        communication: group object of MLX.
        rank: rank of this process. Rank 0 plans, samples and serves.
        size: number of ranks.
    """

    def __init__(
        self,
        args: EngineArgs,
        communication: mx.distributed.Group,
        links: Sequence[Link],
        monitor: RankFailureMonitor,
        local: LocalRanks | None,
    ) -> None:
        self.args = args
        self.communication = communication
        self.rank, self.size = communication.rank(), communication.size()
        self._links = links
        self._monitor = monitor
        self._local = local
        self._broadcast = TokenBroadcast(communication)

    @property
    def broadcast(self) -> TokenBroadcast:
        """Broadcast of rank 0's samples to all ranks."""
        return self._broadcast

    # --- exchange of values ---

    def exchange(self, what: str, values: dict[str, Any], seconds: float | None = None) -> list[dict[str, Any]]:
        """Exchange values with all ranks. Every rank must call it, and waits until it has the values of all ranks.

        Args:
            what: name of the values. If the ranks pass different names, they have diverged, which raises an error.
            values: values of this rank, as JSON data.
            seconds: time limit for each wait for another rank. None waits until that rank answers or is lost.

        Returns:
            Values of each rank, by rank.

        Raises:
            RunnerLostError: a rank was lost, passes another name, or takes too long.
        """
        if self.rank:
            (leader,) = self._links
            leader.send(FrameKind.FIGURES, encode([what, values]))
            answer: list[dict[str, Any]] = self._figures(leader, what, seconds)
            return answer
        of_ranks = [json.loads(encode(values)), *(self._figures(link, what, seconds) for link in self._links)]
        for link in self._links:
            link.send(FrameKind.FIGURES, encode([what, of_ranks]))
        return of_ranks

    def _figures(self, link: Link, what: str, seconds: float | None) -> Any:
        try:
            kind, content = link.receive(seconds)
        except TimeoutError as error:
            raise RunnerLostError(f"{link.name} has not reached {what!r} within {seconds:g} s") from error
        self._monitor.check()
        if kind is not FrameKind.FIGURES:
            raise RunnerLostError(f"{link.name} sends {kind.name} before it has started")
        theirs, values = json.loads(content)
        if theirs != what:
            raise RunnerLostError(f"{link.name} is at {theirs!r}, and rank {self.rank} at {what!r}")
        return values

    def max_over_ranks(self, what: str, number: int) -> int:
        """Return the largest ``number`` that a rank passes. All ranks pass the same name ``what``.

        Raises as :meth:`exchange`.
        """
        return max(values["number"] for values in self.exchange(what, {"number": number}))

    def barrier(self, what: str) -> None:
        """Wait until all ranks have reached the same place in the code. Use it after work that can fail on some ranks.

        Args:
            what: name of the place.

        Raises:
            RunnerLostError: a rank was lost, or has not arrived within the group's timeout.
        """
        self.exchange(what, {}, self.args.distributed_timeout_seconds)

    def check_settings(self) -> None:
        """Raise ConfigError if versions or settings differ between ranks. Raises RunnerLostError if a rank is lost.

        The settings in ``_OWN_SETTINGS``, such as the path of the model, may differ.
        """
        mine = {name: value for name, value in asdict(self.args).items() if name not in _OWN_SETTINGS}
        of_ranks = self.exchange("settings", {"settings": mine, "versions": _versions()})
        first = of_ranks[0]
        labels = {one.name: one.label for one in settings_of(EngineArgs)}
        for rank, one in enumerate(of_ranks):
            for name, version in one["versions"].items():
                if version != first["versions"][name]:
                    problem = f"rank {rank} runs {name} {version}, and rank 0 {first['versions'][name]}"
                    raise ConfigError(None, problem)
            for name, value in one["settings"].items():
                if value != first["settings"][name]:
                    label = labels.get(name, name)
                    raise ConfigError(label, f"is {value} on rank {rank}, and {first['settings'][name]} on rank 0")

    # --- steps ---

    def lead(self, runner: ModelRunner, step_seconds: float) -> LeaderRunner:
        """Return the runner for rank 0, whose steps all ranks run. Call it on rank 0.

        If rank 0 waits longer than ``step_seconds`` for a step, all ranks end.
        """
        step_timeout = StepTimeout(self._monitor, self._links, step_seconds)
        step_timeout.start()
        kill_left = (lambda: None) if self._local is None else self._local.kill_left
        return LeaderRunner(runner, self._links, self._monitor, step_timeout, kill_left)

    def run_as_follower(self, runner: ModelRunner) -> None:
        """Run rank 0's steps until rank 0 ends. Call it on the other ranks. Raises as :func:`run_as_follower`."""
        (leader,) = self._links
        run_as_follower(runner, leader, self._monitor, self.rank)

    # --- the end ---

    def give_up(self, error: BaseException) -> BaseException:
        """Report to all ranks that this rank cannot start, which ends them. Stop the ranks that this rank has started.

        Args:
            error: reason why this rank cannot start.

        Returns:
            The exception to raise: a ModelLoadError that names the lost rank if a rank was lost, otherwise ``error``.
        """
        is_reported = self._monitor.error is not None
        for link in () if is_reported else self._links:
            link.close()
            message = f"rank {self.rank} cannot start ({one_line(error)})"
            with suppress(RunnerLostError):
                link.send(FrameKind.LOST, message.encode())
        if self._local is not None:
            self._local.stop()
        if is_reported or isinstance(error, RunnerLostError):
            return ModelLoadError(str(self._monitor.error or error))
        return error


def _versions() -> dict[str, str]:
    """Return the versions of the packages that compute. Other versions might shard a model differently."""
    return {"metal-engine": __version__, **{name: metadata.version(name) for name in ("mlx", "mlx-lm")}}


def open_group(args: EngineArgs) -> RankGroup:
    """Join the group of ranks that the settings define, and wait for all ranks. Call it in the engine's thread.

    If no launcher has started this process, this process starts the other ranks on this machine.

    Raises:
        ConfigError: the settings do not fit the group, or differ between ranks.
        ModelLoadError: the ranks do not find each other.
    """
    flag = args.ranks_flag
    if _joined:
        raise ConfigError(
            flag, "cannot be used again: this process is in a group already, and MLX keeps it until the process ends"
        )
    rank, local = launched_rank(), None
    if rank is None:
        local = start_local_ranks(args)
        rank = 0
        logger.info("started %d more ranks on this machine", args.num_ranks - 1)
    _joined.append(flag)
    monitor = RankFailureMonitor(rank, FOLLOWER_GRACE_SECONDS if rank else LEADER_GRACE_SECONDS)
    if local is not None:
        monitor.at_end(local.kill)
    atexit.register(monitor.exit_if_rank_lost)
    try:
        host = leader_host(flag)
        with _monitored_rendezvous(rank, local):
            try:
                communication = mx.distributed.init(strict=True)
            except RuntimeError as error:
                raise ModelLoadError(f"rank {rank} cannot join its group: {one_line(error)}") from error
            size = communication.size()
            if size != args.num_ranks:
                raise ConfigError(flag, f"is {args.num_ranks}, and the launcher has started {size} ranks")
            links = _connect_ranks(communication, host, args.distributed_timeout_seconds, monitor)
    except BaseException as error:
        if local is not None:
            local.stop()
        if isinstance(error, RunnerLostError):
            raise ModelLoadError(str(error)) from error
        raise
    finally:
        if local is not None:
            local.end()
    if rank:
        ignore_signals()
    group = RankGroup(args, communication, links, monitor, local)
    try:
        group.check_settings()
    except (RunnerLostError, ConfigError) as error:
        raise group.give_up(error) from error
    return group


def _monitored_rendezvous(rank: int, local: LocalRanks | None) -> AbstractContextManager[None]:
    """Return a context manager that ends this process, and the ranks that it has started, if a rank is missing.

    Without it, MLX would wait for the missing rank forever.
    """
    if started_here():  # rank 0's monitor also watches this process
        return ended_by_hang_up()
    if local is None:
        return monitored_rendezvous(f"rank {rank}", [], _RENDEZVOUS_SECONDS, None)
    return monitored_rendezvous(f"rank 0 ({LOOPBACK})", local.watched(), _RENDEZVOUS_SECONDS, local.hostfile)


def _connect_ranks(
    communication: mx.distributed.Group, host: str, timeout: float, monitor: RankFailureMonitor
) -> list[Link]:
    """Connect the side channel. Rank 0 sends its port and a secret through the MLX group.

    Returns:
        On rank 0, the links to all other ranks, by rank. On the other ranks, the link to rank 0.

    Raises:
        ModelLoadError: rank 0's port and secret arrive changed, because ranks of two groups have connected.
    """
    rank, size = communication.rank(), communication.size()
    listening, token, port = None, bytes(TOKEN_BYTES), 0
    if rank == 0:
        listening, token = listen(host), secrets.token_bytes(TOKEN_BYTES)
        port = listening.getsockname()[1]
    shared = mx.distributed.all_sum(mx.array([port, *token], mx.int32), group=communication)
    mx.eval(shared)
    numbers = cast(list[int], shared.tolist())
    if not 0 < numbers[0] < 1 << 16 or not all(0 <= number < 256 for number in numbers[1:]):
        raise ModelLoadError(f"rank {rank} has connected to ranks of another group; start both groups again")
    port, token = numbers[0], bytes(numbers[1:])
    if listening is None:
        connections: dict[int, socket.socket] = {0: connect(host, port, token, rank, timeout)}
    else:
        connections = accept_ranks(listening, token, size, timeout)
    links = []
    for other, connection in sorted(connections.items()):
        name = f"rank {other} ({connection.getpeername()[0]})"
        links.append(Link(connection, name, timeout, monitor.lose))
    monitor.add_callback(lambda error: _pass_on(links, error))
    for link in links:
        link.start()
    return links


def _pass_on(links: Sequence[Link], error: RunnerLostError) -> None:
    """Report a lost rank to the remaining ranks. Wake the calls of :meth:`Link.receive` in this process.

    Each report is sent in a separate thread, because sending to a stopped rank with full network buffers blocks.
    """

    def report(link: Link) -> None:
        with suppress(RunnerLostError):
            link.send(FrameKind.LOST, str(error).encode())

    for link in links:
        link.close()
        threading.Thread(target=report, args=(link,), daemon=True).start()
        link.wake()
