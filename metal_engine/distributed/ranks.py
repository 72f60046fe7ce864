"""Interface between an engine that is being built and its ranks."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_engine.checkpoints.digests import file_digests
from metal_engine.distributed.group import RankGroup, open_group
from metal_engine.distributed.launch import host_name, refuse_ranks_without_size
from metal_engine.distributed.leader import LeaderRunner
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.models.sharding import Sharding, UnshardedModelInfo, evaluate_one_by_one
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.token_broadcast import TokenBroadcast
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo, ModelInfo, RankInfo
from metal_engine.settings.fields import format_size
from metal_engine.step import RunnerLostError

logger = logging.getLogger(__name__)

# Minimum step timeout in seconds, and step timeout as a multiple of the time of the largest step without a context.
# Attention over a million tokens takes about 20 times as long as the rest of a step.
_LEAST_STEP_SECONDS, _LONG_CONTEXT = 600.0, 40.0


class Ranks(ABC):
    """All ranks of an engine that is being built. This process is one of the ranks.

    Attributes:
        rank_infos: names and memory of the ranks, after :meth:`sync_model_info`; empty with one rank.
        broadcast: broadcast of rank 0's samples; None with one rank.
    """

    rank_infos: tuple[RankInfo, ...] = ()
    broadcast: TokenBroadcast | None = None

    @abstractmethod
    def device(self, device: DeviceInfo) -> DeviceInfo:
        """Return ``device`` with limits that hold on every rank. Raises ConfigError if the kinds of devices differ."""

    @abstractmethod
    def divide(self, model: nn.Module) -> None:
        """Reduce a model to this rank's shard. Reads and computes nothing. Raises UnsupportedModelError."""

    @abstractmethod
    def load_shard(self, model: nn.Module) -> None:
        """Reduce a model to this rank's shard, and read its weights. Raises UnsupportedModelError."""

    @abstractmethod
    def sync_model_info(self, info: ModelInfo) -> ModelInfo:
        """Return ``info`` with the sizes of the rank that needs most, and with the layers and parameters of all ranks.

        All ranks plan their memory with the same result. Call it after :meth:`load_shard`. With several ranks, it sets
        :attr:`rank_infos`.
        """

    @abstractmethod
    def max_over_ranks(self, what: str, number: int) -> int:
        """Return the largest ``number`` that a rank passes. All ranks pass the same name ``what``.

        Raises RunnerLostError if a rank is lost.
        """

    @abstractmethod
    def from_rank_zero(self, what: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of ``decide``, which is called on rank 0 only. Raises RunnerLostError if a rank is lost.

        Args:
            what: name of the decision, the same on all ranks.
            decide: makes the decision, which must be JSON data.
        """

    @abstractmethod
    def same_files(self, path: Path) -> None:
        """Raise ModelLoadError if the model's files differ between ranks.

        Args:
            path: directory or GGUF file of the model on this rank.
        """

    @abstractmethod
    def barrier(self, what: str) -> None:
        """Wait until all ranks have reached the place named ``what``. Raises RunnerLostError if a rank does not."""

    @abstractmethod
    def run_as_follower(self, runner: ModelRunner) -> None:
        """Run rank 0's steps until rank 0 ends, then raise SystemExit. Return at once on rank 0.

        The exit status is 0 if rank 0 has ended the ranks, and 1 if a rank was lost. The log then names the lost rank.
        """

    @abstractmethod
    def lead(self, runner: ModelRunner) -> LeaderRunner | None:
        """Return a runner whose steps all ranks run; None with one rank. Call it on rank 0."""


class SingleRank(Ranks):
    """The only rank of an engine."""

    def device(self, device: DeviceInfo) -> DeviceInfo:
        return device

    def divide(self, model: nn.Module) -> None:
        pass

    def load_shard(self, model: nn.Module) -> None:
        pass

    def sync_model_info(self, info: ModelInfo) -> ModelInfo:
        return info

    def max_over_ranks(self, what: str, number: int) -> int:
        return number

    def from_rank_zero(self, what: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return decide()

    def same_files(self, path: Path) -> None:
        pass

    def barrier(self, what: str) -> None:
        pass

    def run_as_follower(self, runner: ModelRunner) -> None:
        pass

    def lead(self, runner: ModelRunner) -> LeaderRunner | None:
        return None


class SeveralRanks(Ranks):
    """One of several ranks of an engine. All ranks call the same methods in the same order."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._sharding = Sharding(group.communication, group.args.pipeline_parallel_size > 1)
        self._unsharded: UnshardedModelInfo | None = None
        self.broadcast = group.broadcast
        self._began = time.monotonic()  # start of the first run of the model

    def device(self, device: DeviceInfo) -> DeviceInfo:
        """Return ``device`` with the smallest memory that any rank has.

        Ranks with the same host name divide the memory of their machine evenly.
        """
        of_ranks = self._group.exchange(
            "device", {"host": host_name(), "kind": device.kind, "memory": device.memory_bytes}
        )
        kinds = {one["kind"] for one in of_ranks}
        if len(kinds) > 1:
            raise ConfigError(self._group.args.ranks_flag, f"has ranks on devices of several kinds: {sorted(kinds)}")
        of_host = Counter(one["host"] for one in of_ranks)
        return replace(device, memory_bytes=min(one["memory"] // of_host[one["host"]] for one in of_ranks))

    def divide(self, model: nn.Module) -> None:
        self._sharding.divide(model)

    def load_shard(self, model: nn.Module) -> None:
        self._unsharded = self._sharding.divide(model)
        mx.reset_peak_memory()
        evaluate_one_by_one(model)

    def sync_model_info(self, info: ModelInfo) -> ModelInfo:
        assert self._unsharded is not None
        self._began = time.monotonic()
        mine = {
            "host": host_name(),
            "weight_bytes": info.weight_bytes,
            "peak_bytes": mx.get_peak_memory(),
            "num_layers": info.num_layers,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "unquantized": info.unquantized_kv_bytes_per_token or 0,
            "state_bytes_per_request": info.state_bytes_per_request,
            "layer_width": info.layer_width,
        }
        of_ranks = self._group.exchange("model", mine)
        names = ("host", "weight_bytes", "peak_bytes", "num_layers")
        self.rank_infos = tuple(RankInfo(**{name: one[name] for name in names}) for one in of_ranks)
        if self._group.rank == 0:
            for rank, one in enumerate(self.rank_infos):
                sizes = format_size(one.weight_bytes), format_size(one.peak_bytes)
                logger.info("rank %d (%s) has its weights: %s, %s at most to read them", rank, one.host, *sizes)
        most = {name: max(one[name] for one in of_ranks) for name in mine if name not in names}
        unquantized = most.pop("unquantized")
        return replace(
            info,
            num_layers=self._unsharded.num_layers,
            num_params=self._unsharded.num_params,
            weight_bytes=max(one.weight_bytes for one in self.rank_infos),
            unquantized_kv_bytes_per_token=unquantized if info.unquantized_kv_bytes_per_token is not None else None,
            **most,
        )

    def max_over_ranks(self, what: str, number: int) -> int:
        return self._group.max_over_ranks(what, number)

    def from_rank_zero(self, what: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return self._group.exchange(what, {} if self._group.rank else decide())[0]

    def same_files(self, path: Path) -> None:
        all_files = self._group.exchange("files", file_digests(path))
        for rank, files in enumerate(all_files):
            for name in sorted({*all_files[0], *files}):
                if files.get(name) != all_files[0].get(name):
                    problem = f"{name} of the model on rank {rank} is not what it is on rank 0: copy it to all machines"
                    raise ModelLoadError(problem)

    def barrier(self, what: str) -> None:
        self._group.barrier(what)

    def run_as_follower(self, runner: ModelRunner) -> None:
        if self._group.rank:
            try:
                self._group.run_as_follower(runner)
            except RunnerLostError as error:
                raise SystemExit(1) from error
            raise SystemExit(0)

    def lead(self, runner: ModelRunner) -> LeaderRunner | None:
        # The time since the weights were read includes at least one run of the largest step, without a context.
        seconds = max(_LEAST_STEP_SECONDS, _LONG_CONTEXT * (time.monotonic() - self._began))
        return self._group.lead(runner, seconds)


@contextmanager
def starting_ranks(args: EngineArgs) -> Iterator[Ranks]:
    """Join the ranks that the settings define, and yield them. If the block raises an error, all ranks end.

    Raises:
        ConfigError: see :func:`open_group`. Also raised if a launcher has started several processes, and the settings
            give no number of ranks.
        ModelLoadError: see :func:`open_group`. Also raised if another rank cannot start.
    """
    if args.num_ranks == 1:
        refuse_ranks_without_size()
        yield SingleRank()
        return
    group = open_group(args)
    try:
        yield SeveralRanks(group)
    except Exception as error:
        raise group.give_up(error) from error
