"""A group of ranks: found at the start, agreed on sizes, lost together."""

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
from metal_engine.distributed.channel import TOKEN_BYTES, Kind, Link, accept_ranks, connect, listen
from metal_engine.distributed.follower import follow
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
from metal_engine.distributed.rendezvous import ended_by_hang_up, watched_meeting
from metal_engine.distributed.wire import encode
from metal_engine.errors import ConfigError, ModelLoadError, one_line
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.token_broadcast import TokenBroadcast
from metal_engine.settings.args import EngineArgs
from metal_engine.step import RunnerLostError

logger = logging.getLogger(__name__)

# Until all ranks have found each other: they start at about the same time.
_MEETING_SECONDS = 120.0
# Settings that may differ: the same model may lie elsewhere on another machine.
_OWN_SETTINGS = {"model", "tokenizer", "download_dir", "chat_template", "generation_config"}
# Of this process, which can be in one group only: MLX keeps it.
_joined: list[str] = []


class RankGroup:
    """The ranks of an engine, this process being one of them. Belongs to the engine's thread.

    Attributes:
        args: the engine's settings.
        communication: MLX's group.
        rank: of this process; rank 0 plans, samples and serves.
        size: number of ranks.
    """

    def __init__(
        self,
        args: EngineArgs,
        communication: mx.distributed.Group,
        links: Sequence[Link],
        watch: RankFailureMonitor,
        local: LocalRanks | None,
    ) -> None:
        self.args = args
        self.communication = communication
        self.rank, self.size = communication.rank(), communication.size()
        self._links = links
        self._watch = watch
        self._local = local
        self._share = TokenBroadcast(communication)

    @property
    def share(self) -> TokenBroadcast:
        """How all ranks come to the same tokens."""
        return self._share

    # --- facts ---

    def exchange(self, what: str, facts: dict[str, Any], seconds: float | None = None) -> list[dict[str, Any]]:
        """Tell all ranks something, in JSON's terms; returns what each rank tells, by rank.

        Args:
            what: the name of what is told: all ranks tell the same, or are not at the same place.
            seconds: how long another rank may take; None: as long as it lives.

        Raises:
            RunnerLostError: a rank has been lost, is somewhere else, or takes too long.
        """
        if self.rank:
            (leader,) = self._links
            leader.send(Kind.FIGURES, encode([what, facts]))
            answer: list[dict[str, Any]] = self._figures(leader, what, seconds)
            return answer
        told = [json.loads(encode(facts)), *(self._figures(link, what, seconds) for link in self._links)]
        for link in self._links:
            link.send(Kind.FIGURES, encode([what, told]))
        return told

    def _figures(self, link: Link, what: str, seconds: float | None) -> Any:
        try:
            kind, content = link.receive(seconds)
        except TimeoutError as error:
            raise RunnerLostError(f"{link.name} has not come to {what!r} within {seconds:g} s") from error
        self._watch.check()
        if kind is not Kind.FIGURES:
            raise RunnerLostError(f"{link.name} sends {kind.name} before it has started")
        theirs, facts = json.loads(content)
        if theirs != what:
            raise RunnerLostError(f"{link.name} is at {theirs!r}, and rank {self.rank} at {what!r}")
        return facts

    def largest(self, what: str, number: int) -> int:
        """The largest of all ranks' numbers."""
        return max(told["number"] for told in self.exchange(what, {"number": number}))

    def barrier(self, what: str) -> None:
        """Wait until all ranks are at a place that some of them may not come to.

        Raises:
            RunnerLostError: they have not come within the group's timeout, or a rank has been lost.
        """
        self.exchange(what, {}, self.args.distributed_timeout_seconds)

    def check_settings(self) -> None:
        """Raises ConfigError where the ranks were not started alike."""
        mine = {name: value for name, value in asdict(self.args).items() if name not in _OWN_SETTINGS}
        told = self.exchange("settings", {"settings": mine, "versions": _versions()})
        first = told[0]
        for rank, one in enumerate(told):
            for name, version in one["versions"].items():
                if version != first["versions"][name]:
                    problem = f"rank {rank} runs {name} {version}, and rank 0 {first['versions'][name]}"
                    raise ConfigError(None, problem)
            for name, value in one["settings"].items():
                if value != first["settings"][name]:
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError(flag, f"is {value} on rank {rank}, and {first['settings'][name]} on rank 0")

    # --- steps ---

    def lead(self, runner: ModelRunner, step_seconds: float) -> LeaderRunner:
        """On rank 0: a runner whose steps all ranks run, none of which takes as long as that."""
        step_watch = StepTimeout(self._watch, self._links, step_seconds)
        step_watch.start()
        kill_left = (lambda: None) if self._local is None else self._local.kill_left
        return LeaderRunner(runner, self._links, self._watch, step_watch, kill_left)

    def follow(self, runner: ModelRunner) -> None:
        """On the others: run rank 0's steps until it ends. Raises what :func:`follow` raises."""
        (leader,) = self._links
        follow(runner, leader, self._watch, self.rank)

    # --- the end ---

    def give_up(self, error: BaseException) -> BaseException:
        """This rank cannot start: end the others. Returns what it is to raise, which names the one at fault."""
        is_told = self._watch.error is not None
        for link in () if is_told else self._links:
            link.close()
            message = f"rank {self.rank} cannot start ({one_line(error)})"
            with suppress(RunnerLostError):
                link.send(Kind.LOST, message.encode())
        if self._local is not None:
            self._local.stop()
        if is_told or isinstance(error, RunnerLostError):
            return ModelLoadError(str(self._watch.error or error))
        return error


def _versions() -> dict[str, str]:
    """Of what computes: other versions of it may divide a model otherwise."""
    return {"metal-engine": __version__, **{name: metadata.version(name) for name in ("mlx", "mlx-lm")}}


def open_group(args: EngineArgs) -> RankGroup:
    """Join the group of ranks that the settings ask for, and wait for all of them; in the engine's thread.

    Where no launcher has started this process, it starts the other ranks on this machine.

    Raises:
        ConfigError: the settings do not fit the group, or each other.
        ModelLoadError: the ranks do not find each other.
    """
    flag = args.ranks_flag
    if _joined:
        raise ConfigError(
            flag, "cannot be used again: this process is in a group already, and MLX keeps that until it ends"
        )
    rank, local = launched_rank(), None
    if rank is None:
        local = start_local_ranks(args)
        rank = 0
        logger.info("started %d more ranks on this machine", args.num_ranks - 1)
    _joined.append(flag)
    watch = RankFailureMonitor(rank, FOLLOWER_GRACE_SECONDS if rank else LEADER_GRACE_SECONDS)
    if local is not None:
        watch.at_end(local.kill)
    atexit.register(watch.exit_if_rank_lost)
    try:
        host = leader_host(flag)
        with _watched_meeting(rank, local):
            try:
                communication = mx.distributed.init(strict=True)
            except RuntimeError as error:
                raise ModelLoadError(f"rank {rank} cannot join its group: {one_line(error)}") from error
            size = communication.size()
            if size != args.num_ranks:
                raise ConfigError(flag, f"is {args.num_ranks}, and the launcher has started {size} ranks")
            links = _meet(communication, host, args.distributed_timeout_seconds, watch)
    except RunnerLostError as error:
        raise ModelLoadError(str(error)) from error
    except BaseException:
        if local is not None:
            local.stop()
        raise
    finally:
        if local is not None:
            local.end()
    if rank:
        ignore_signals()
    group = RankGroup(args, communication, links, watch, local)
    try:
        group.check_settings()
    except (RunnerLostError, ConfigError) as error:
        raise group.give_up(error) from error
    return group


def _watched_meeting(rank: int, local: LocalRanks | None) -> AbstractContextManager[None]:
    """What ends this process, and those that it has started, where MLX would wait for ever for one that never comes."""
    if started_here():  # rank 0 has it watched
        return ended_by_hang_up()
    if local is None:
        return watched_meeting(f"rank {rank}", [], _MEETING_SECONDS, None)
    return watched_meeting(f"rank 0 ({LOOPBACK})", local.watched(), _MEETING_SECONDS, local.hostfile)


def _meet(communication: mx.distributed.Group, host: str, timeout: float, watch: RankFailureMonitor) -> list[Link]:
    """Connect the side channel: rank 0 tells its port and a secret through the group itself.

    Returns:
        On rank 0, a link to each of the others, by rank; on the others, the one to rank 0.
    """
    rank, size = communication.rank(), communication.size()
    listening, token, port = None, bytes(TOKEN_BYTES), 0
    if rank == 0:
        listening, token = listen(host), secrets.token_bytes(TOKEN_BYTES)
        port = listening.getsockname()[1]
    told = mx.distributed.all_sum(mx.array([port, *token], mx.int32), group=communication)
    mx.eval(told)
    numbers = cast(list[int], told.tolist())
    port, token = numbers[0], bytes(numbers[1:])
    if listening is None:
        connections: dict[int, socket.socket] = {0: connect(host, port, token, rank, timeout)}
    else:
        connections = accept_ranks(listening, token, size, timeout)
    links = []
    for other, connection in sorted(connections.items()):
        name = f"rank {other} ({connection.getpeername()[0]})"
        links.append(Link(connection, name, timeout, watch.lose))
    watch.tell(lambda error: _pass_on(links, error))
    for link in links:
        link.start()
    return links


def _pass_on(links: Sequence[Link], error: RunnerLostError) -> None:
    """Tell the ranks that are left which one has gone; whoever waits here for a frame is woken.

    Each in a thread of its own: one that has stopped, with as much on its way as the network holds, keeps none of the
    others from hearing it.
    """

    def tell(link: Link) -> None:
        with suppress(RunnerLostError):
            link.send(Kind.LOST, str(error).encode())

    for link in links:
        link.close()
        threading.Thread(target=tell, args=(link,), daemon=True).start()
        link.wake()
