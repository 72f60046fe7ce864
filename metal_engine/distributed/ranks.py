"""What an engine that is being built has to do with other ranks: nothing, where there is one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from metal_engine.distributed.group import Group, open_group
from metal_engine.distributed.launch import host_name
from metal_engine.distributed.leader import LeaderRunner
from metal_engine.errors import ConfigError
from metal_engine.models.division import Division, WholeModel, evaluate_one_by_one
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.token_share import TokenShare
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo, ModelInfo, RankInfo
from metal_engine.settings.fields import format_size

logger = logging.getLogger(__name__)


class Ranks:
    """The only rank of an engine.

    Attributes:
        facts: about each rank, once they have agreed; empty where there is one.
        share: how ranks come to the same tokens; None where there is one.
    """

    facts: tuple[RankInfo, ...] = ()
    share: TokenShare | None = None

    def device(self, device: DeviceInfo) -> DeviceInfo:
        """The device as every rank may use it."""
        return device

    def divide(self, model: nn.Module) -> None:
        """Leave this rank's share in a model; nothing is read or computed. Raises UnsupportedModelError."""

    def load_share(self, model: nn.Module) -> None:
        """Leave this rank's share in a model, and read its weights. Raises UnsupportedModelError."""

    def agreed(self, info: ModelInfo) -> ModelInfo:
        """The facts about the model by which every rank plans its memory."""
        return info

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return number

    def follow(self, runner: ModelRunner) -> None:
        """On other ranks than 0: run rank 0's steps until it ends, and then raise SystemExit."""

    def lead(self, runner: ModelRunner) -> LeaderRunner | None:
        """A runner that has all ranks run its steps; None where there is one."""
        return None


class SeveralRanks(Ranks):
    """One of the ranks of an engine. All of them call the same methods in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._division = Division(group.communication, group.args.pipeline_parallel_size > 1)
        self._whole: WholeModel | None = None
        self.share = group.share

    def device(self, device: DeviceInfo) -> DeviceInfo:
        """That of the least memory; ranks on one machine divide theirs."""
        told = self._group.exchange({"host": host_name(), "kind": device.kind, "memory": device.memory_bytes})
        kinds = {one["kind"] for one in told}
        if len(kinds) > 1:
            raise ConfigError(self._group.args.ranks_flag, f"has ranks on devices of several kinds: {sorted(kinds)}")
        of_host = Counter(one["host"] for one in told)
        return replace(device, memory_bytes=min(one["memory"] // of_host[one["host"]] for one in told))

    def divide(self, model: nn.Module) -> None:
        self._division.divide(model)

    def load_share(self, model: nn.Module) -> None:
        self._whole = self._division.divide(model)
        mx.reset_peak_memory()
        evaluate_one_by_one(model)

    def agreed(self, info: ModelInfo) -> ModelInfo:
        assert self._whole is not None
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
        told = self._group.exchange(mine)
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

    def largest(self, number: int) -> int:
        return self._group.largest(number)

    def follow(self, runner: ModelRunner) -> None:
        if self._group.rank:
            self._group.follow(runner)
            raise SystemExit(0)

    def lead(self, runner: ModelRunner) -> LeaderRunner | None:
        return self._group.lead(runner)


@contextmanager
def starting_ranks(args: EngineArgs) -> Iterator[Ranks]:
    """Join the other ranks that the settings ask for; where this one cannot start, none does.

    Raises:
        ConfigError: see :func:`open_group`; ModelLoadError likewise, or another rank cannot start.
    """
    if args.num_ranks == 1:
        yield Ranks()
        return
    group = open_group(args)
    try:
        yield SeveralRanks(group)
    except Exception as error:
        raise group.give_up(error) from error
