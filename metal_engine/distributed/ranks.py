"""What an engine that is being built has to do with other ranks: nothing, where there is one."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_engine.checkpoints.digests import file_prints
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

logger = logging.getLogger(__name__)

# What a step may take at least before it counts as one that never ends; and how many times the largest one without a
# context the longest one takes at most: attention over a million tokens is some 20 times the rest.
_LEAST_STEP_SECONDS, _LONG_CONTEXT = 600.0, 40.0


class Ranks:
    """The only rank of an engine.

    Attributes:
        facts: about each rank, once they have agreed; empty where there is one.
        share: how ranks come to the same tokens; None where there is one.
    """

    facts: tuple[RankInfo, ...] = ()
    share: TokenBroadcast | None = None

    def device(self, device: DeviceInfo) -> DeviceInfo:
        """The device as every rank may use it."""
        return device

    def divide(self, model: nn.Module) -> None:
        """Leave this rank's share in a model; nothing is read or computed. Raises UnsupportedModelError."""

    def load_shard(self, model: nn.Module) -> None:
        """Leave this rank's share in a model, and read its weights. Raises UnsupportedModelError."""

    def sync_model_info(self, info: ModelInfo) -> ModelInfo:
        """The facts about the model by which every rank plans its memory."""
        return info

    def largest(self, what: str, number: int) -> int:
        """The largest of all ranks' numbers, which are told under the same name."""
        return number

    def decided(self, what: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what rank 0 decides, in JSON's terms, told under a name. The other ranks decide nothing."""
        return decide()

    def same_files(self, path: Path) -> None:
        """Raises ModelLoadError where the ranks have other files of the model: a directory, or a GGUF file."""

    def barrier(self, what: str) -> None:
        """Wait until all ranks are at a place that some may not come to. Raises RunnerLostError if some do not."""

    def follow(self, runner: ModelRunner) -> None:
        """On other ranks than 0: run rank 0's steps until it ends, and then raise SystemExit."""

    def lead(self, runner: ModelRunner) -> LeaderRunner | None:
        """A runner that has all ranks run its steps; None where there is one."""
        return None


class SeveralRanks(Ranks):
    """One of the ranks of an engine. All of them call the same methods in the same order."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._division = Sharding(group.communication, group.args.pipeline_parallel_size > 1)
        self._whole: UnshardedModelInfo | None = None
        self.share = group.share
        self._began = time.monotonic()  # to run the model

    def device(self, device: DeviceInfo) -> DeviceInfo:
        """That of the least memory; ranks on one machine divide theirs."""
        told = self._group.exchange("device", {"host": host_name(), "kind": device.kind, "memory": device.memory_bytes})
        kinds = {one["kind"] for one in told}
        if len(kinds) > 1:
            raise ConfigError(self._group.args.ranks_flag, f"has ranks on devices of several kinds: {sorted(kinds)}")
        of_host = Counter(one["host"] for one in told)
        return replace(device, memory_bytes=min(one["memory"] // of_host[one["host"]] for one in told))

    def divide(self, model: nn.Module) -> None:
        self._division.divide(model)

    def load_shard(self, model: nn.Module) -> None:
        self._whole = self._division.divide(model)
        mx.reset_peak_memory()
        evaluate_one_by_one(model)

    def sync_model_info(self, info: ModelInfo) -> ModelInfo:
        assert self._whole is not None
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
        told = self._group.exchange("model", mine)
        names = ("host", "weight_bytes", "peak_bytes", "num_layers")
        self.facts = tuple(RankInfo(**{name: one[name] for name in names}) for one in told)
        if self._group.rank == 0:
            for rank, fact in enumerate(self.facts):
                sizes = format_size(fact.weight_bytes), format_size(fact.peak_bytes)
                logger.info("rank %d (%s) has its weights: %s, %s at most to read them", rank, fact.host, *sizes)
        most = {name: max(one[name] for one in told) for name in mine if name not in names}
        unquantized = most.pop("unquantized")
        return replace(
            info,
            num_layers=self._whole.num_layers,
            num_params=self._whole.num_params,
            weight_bytes=max(fact.weight_bytes for fact in self.facts),
            unquantized_kv_bytes_per_token=unquantized if info.unquantized_kv_bytes_per_token is not None else None,
            **most,
        )

    def largest(self, what: str, number: int) -> int:
        return self._group.largest(what, number)

    def decided(self, what: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return self._group.exchange(what, {} if self._group.rank else decide())[0]

    def same_files(self, path: Path) -> None:
        told = self._group.exchange("files", file_prints(path))
        for rank, files in enumerate(told):
            for name in sorted({*told[0], *files}):
                if files.get(name) != told[0].get(name):
                    problem = f"{name} of the model on rank {rank} is not what it is on rank 0: copy it to all machines"
                    raise ModelLoadError(problem)

    def barrier(self, what: str) -> None:
        self._group.barrier(what)

    def follow(self, runner: ModelRunner) -> None:
        if self._group.rank:
            self._group.follow(runner)
            raise SystemExit(0)

    def lead(self, runner: ModelRunner) -> LeaderRunner | None:
        # What has passed since the weights were there has the largest step, run at least once, but without a context.
        seconds = max(_LEAST_STEP_SECONDS, _LONG_CONTEXT * (time.monotonic() - self._began))
        return self._group.lead(runner, seconds)


@contextmanager
def starting_ranks(args: EngineArgs) -> Iterator[Ranks]:
    """Join the other ranks that the settings ask for; where this one cannot start, none does.

    Raises:
        ConfigError: see :func:`open_group`, or a launcher has started several processes, and there is no size.
        ModelLoadError: likewise, or another rank cannot start.
    """
    if args.num_ranks == 1:
        refuse_ranks_without_size()
        yield Ranks()
        return
    group = open_group(args)
    try:
        yield SeveralRanks(group)
    except Exception as error:
        raise group.give_up(error) from error
