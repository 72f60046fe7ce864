"""Tests settings of several ranks, and their conflicts with other settings."""

from __future__ import annotations

from typing import Any

import pytest

from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.multi_model import refuse_for_one_model


def test_there_is_one_rank_by_default() -> None:
    args = EngineArgs(model="m", kv_cache_dir="somewhere", enable_lora=True)
    assert args.num_ranks == 1


@pytest.mark.parametrize(
    ("name", "flag"), [("tensor", "--tensor-parallel-size"), ("pipeline", "--pipeline-parallel-size")]
)
def test_either_flag_makes_ranks(name: str, flag: str) -> None:
    args = EngineArgs(model="m", **{f"{name}_parallel_size": 3})  # type: ignore[arg-type]
    assert (args.num_ranks, args.ranks_flag) == (3, flag)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--pipeline-parallel-size", 2),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
        ("--kv-cache-dir", "somewhere"),
        ("--kv-transfer-config", "{}"),
        ("--lora-modules", ("a=b",)),
        ("--enable-lora", True),
    ],
)
def test_what_does_not_work_with_ranks_is_refused_by_name(flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} .*--tensor-parallel-size") as error:
        EngineArgs(model="m", tensor_parallel_size=2, **{flag[2:].replace("-", "_"): value})
    assert error.value.flag == flag


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 0}, {"distributed_timeout_seconds": 0.0}])
def test_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineArgs(model="m", **settings)


def test_several_models_have_one_rank_each() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is for one model"):
        refuse_for_one_model(EngineArgs(model="m", tensor_parallel_size=2))
