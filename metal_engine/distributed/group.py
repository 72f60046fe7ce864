"""A group of ranks: found at the start, agreed on sizes, lost together."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, cast

import mlx.core as mx

from metal_engine import __version__
from metal_engine.distributed.channel import TOKEN_BYTES, Kind, Link, accept_ranks, connect, listen
from metal_engine.distributed.follower import follow
from metal_engine.distributed.launch import LocalRanks, launched_rank, leader_host, start_local_ranks
from metal_engine.distributed.leader import LeaderRunner
from metal_engine.distributed.loss import LEADER_GRACE_SECONDS, LossWatch
from metal_engine.distributed.wire import encode
from metal_engine.errors import ConfigError, ModelLoadError, one_line
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.token_share import TokenShare
from metal_engine.settings.args import EngineArgs
from metal_engine.step import RunnerLostError

logger = logging.getLogger(__name__)

# Until all ranks have found each other: they start at about the same time.
_MEETING_SECONDS = 120.0
# Settings that may differ: the same model may lie elsewhere on another machine.
_OWN_SETTINGS = {"model", "tokenizer", "download_dir", "chat_template", "generation_config"}
# Of this process, which can be in one group only: MLX keeps it.
_joined: list[str] = []


class Group:
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
        watch: LossWatch,
        local: LocalRanks | None,
    ) -> None:
        self.args = args
        self.communication = communication
        self.rank, self.size = communication.rank(), communication.size()
        self._links = links
        self._watch = watch
        self._local = local
        self._share = TokenShare(communication)

    @property
    def share(self) -> TokenShare:
        """How all ranks come to the same tokens."""
        return self._share

    # --- facts ---

    def exchange(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell all ranks something, in JSON's terms; returns what each rank tells, by rank.

        Raises:
            RunnerLostError: a rank has been lost.
        """
        if self.rank:
            (leader,) = self._links
            leader.send(Kind.FIGURES, encode(facts))
            answer: list[dict[str, Any]] = json.loads(self._figures(leader))
            return answer
        told = [json.loads(encode(facts)), *(json.loads(self._figures(link)) for link in self._links)]
        for link in self._links:
            link.send(Kind.FIGURES, encode(told))
        return told

    def _figures(self, link: Link) -> bytes:
        kind, content = link.receive()
        self._watch.check()
        if kind is not Kind.FIGURES:
            raise RunnerLostError(f"{link.name} sends {kind.name} before it has started")
        return content

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return max(told["number"] for told in self.exchange({"number": number}))

    def check_settings(self) -> None:
        """Raises ConfigError where the ranks were not started alike."""
        mine = {name: value for name, value in asdict(self.args).items() if name not in _OWN_SETTINGS}
        told = self.exchange({"settings": mine, "version": __version__})
        first = told[0]
        for rank, one in enumerate(told):
            if one["version"] != first["version"]:
                problem = f"rank {rank} runs metal-engine {one['version']}, and rank 0 {first['version']}"
                raise ConfigError(None, problem)
            for name, value in one["settings"].items():
                if value != first["settings"][name]:
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError(flag, f"is {value} on rank {rank}, and {first['settings'][name]} on rank 0")

    # --- steps ---

    def lead(self, runner: ModelRunner) -> LeaderRunner:
        """On rank 0: a runner whose steps all ranks run."""
        return LeaderRunner(runner, self._links, self._watch)

    def follow(self, runner: ModelRunner) -> None:
        """On the others: run rank 0's steps until it ends. Raises what :func:`follow` raises."""
        (leader,) = self._links
        follow(runner, leader, self._watch, self.rank)

    # --- the end ---

    def give_up(self, error: BaseException) -> BaseException:
        """This rank cannot start: end the others. Returns what it is to raise, which names the one at fault."""
        if self._local is not None:
            self._local.end()
        if isinstance(error, RunnerLostError) or self._watch.error is not None:
            return ModelLoadError(str(self._watch.error or error))
        for link in self._links:
            link.close()
            message = f"rank {self.rank} cannot start ({one_line(error)})"
            with suppress(RunnerLostError):
                link.send(Kind.LOST, message.encode())
        return error


def open_group(args: EngineArgs) -> Group:
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
    watch = LossWatch(rank, 0.0 if rank else LEADER_GRACE_SECONDS)
    met = threading.Event()
    threading.Thread(target=_watch_meeting, args=(met, watch, local), daemon=True).start()
    try:
        host = leader_host(flag)
        try:
            communication = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise ModelLoadError(f"rank {rank} cannot join its group: {one_line(error)}") from error
        if communication.size() != args.num_ranks:
            raise ConfigError(flag, f"is {args.num_ranks}, and the launcher has started {communication.size()} ranks")
        links = _meet(communication, host, args.distributed_timeout_seconds, watch)
    except RunnerLostError as error:
        raise ModelLoadError(str(error)) from error
    finally:
        met.set()
        if local is not None:
            local.end()
    group = Group(args, communication, links, watch, local)
    try:
        group.check_settings()
    except (RunnerLostError, ConfigError) as error:
        raise group.give_up(error) from error
    return group


def _watch_meeting(met: threading.Event, watch: LossWatch, local: LocalRanks | None) -> None:
    """Ends this process if the ranks do not meet: MLX may wait for ever for one that has ended, or never came."""
    for _ in range(int(_MEETING_SECONDS * 10)):
        if met.wait(0.1):
            return
        if local is not None and (problem := local.ended()) is not None:
            watch.lose(problem)
            return
    watch.lose(f"the ranks have not found each other within {_MEETING_SECONDS:g} s")


def _meet(communication: mx.distributed.Group, host: str, timeout: float, watch: LossWatch) -> list[Link]:
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
    """Tell the ranks that are left which one has gone; those that wait for a frame are woken."""
    for link in links:
        link.close()
        with suppress(RunnerLostError):
            link.send(Kind.LOST, str(error).encode())
        link.wake()
