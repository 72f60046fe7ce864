"""Tests whether steps are planned ahead by default."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.settings.multi_model import per_model_args
from metal_engine.settings.resolve import plans_ahead

NGRAM = {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4})}
DRAFT_MODEL = {
    "speculative_config": json.dumps({"method": "draft_model", "model": "small", "num_speculative_tokens": 3})
}


@pytest.mark.parametrize(
    ("given", "on_metal"),
    [({}, True), (NGRAM, True), (DRAFT_MODEL, False), ({"tensor_parallel_size": 2}, False)],
    ids=["plain", "ngram", "draft model", "ranks"],
)
def test_on_metal_unless_it_may_win_nothing(given: dict[str, Any], on_metal: bool) -> None:
    args = EngineArgs(model="model", **given)
    assert plans_ahead(args, "metal") == on_metal
    assert not plans_ahead(args, "cpu")


@pytest.mark.parametrize("kind", ["metal", "cpu"])
@pytest.mark.parametrize("given", [True, False])
def test_the_flag_decides(kind: str, given: bool) -> None:
    args = EngineArgs(model="model", async_scheduling=given, **DRAFT_MODEL)
    assert plans_ahead(args, kind) == given


def test_each_of_several_models_plans_ahead() -> None:
    device = DeviceInfo(kind="metal", name="GPU", compute="GPU", memory_bytes=1 << 34)
    assert plans_ahead(per_model_args(EngineArgs(model="model"), 1 << 33, device), device.kind)
