"""Tests limits of Metal's command buffers, from configurations alone."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from metal_engine.device.command_buffers import (
    MAX_MB,
    MAX_OPS,
    command_buffer_limits,
    kernels_of_step,
    limits_in_force,
    set_command_buffer_limits,
)
from metal_engine.settings.config import CommandBufferLimits

GIB = 1 << 30


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 30}, 480),
        ({"n_layer": 12}, 192),
        ({"num_hidden_layers": 48, "num_experts": 128}, 1344),
        ({"num_hidden_layers": 48, "num_experts": 0}, 768),
        # num_hidden_layers of the vision tower is ignored
        ({"num_hidden_layers": 3, "text_config": {"num_hidden_layers": 62}}, 992),
        ({"n_layers": 40, "text_config": {"vocab_size": 5}}, 640),
        ({"n_layers": 40, "text_config": {"num_hidden_layers": None, "num_experts": 8}}, 1120),
        ({"n_layers": 40, "num_experts": 8, "text_config": {"num_hidden_layers": 62}}, 992),
        ({"model_type": "llama"}, None),
        ({"num_hidden_layers": "many"}, None),
    ],
)
def test_kernels_of_a_step(config: dict[str, Any], expected: int | None) -> None:
    assert kernels_of_step(config) == expected


@pytest.mark.parametrize(("num_layers", "per_layer"), [(16, 17), (30, 17), (62, 20), (94, 30)])
def test_a_step_has_at_least_14_command_buffers_for_queued_dispatch(num_layers: int, per_layer: int) -> None:
    limits = command_buffer_limits([{"num_hidden_layers": num_layers}], 16 * GIB, allows_queued_dispatch=True)
    assert limits.max_ops is not None
    # A command buffer is committed when it has more kernels than the limit.
    assert num_layers * per_layer / (limits.max_ops + 1) >= 14


@pytest.mark.parametrize("memory_gib", [16, 64, 512])
@pytest.mark.parametrize("num_layers", [16, 30, 94])
def test_the_cache_does_not_end_a_command_buffer(num_layers: int, memory_gib: int) -> None:
    """Assumes that keys and values take all memory, in half precision. Weights are counted in packed words."""
    elements = memory_gib * GIB // 2
    limits = command_buffer_limits([{"num_hidden_layers": num_layers}], memory_gib * GIB, allows_queued_dispatch=True)
    assert limits.max_ops is not None and limits.max_mb is not None
    layers_of_a_buffer = (limits.max_ops + 1) / 16
    assert limits.max_mb << 20 >= elements / num_layers * layers_of_a_buffer


def test_of_several_models_the_smallest_decides() -> None:
    small, large = {"num_hidden_layers": 24}, {"num_hidden_layers": 80}
    limits = [
        command_buffer_limits(configs, 64 * GIB, allows_queued_dispatch=True)
        for configs in ([small], [large, small], [small, {}], [large])
    ]
    assert [one.max_ops for one in limits] == [23, 23, 23, 79]


@pytest.mark.parametrize("allows_queued_dispatch", [False, True])
def test_an_unknown_model_keeps_the_operation_limit_of_mlx(allows_queued_dispatch: bool) -> None:
    limits = command_buffer_limits([], 64 * GIB, allows_queued_dispatch=allows_queued_dispatch)
    assert limits.max_ops is None and limits.max_mb is not None


@pytest.mark.parametrize(("num_layers", "max_ops"), [(2, None), (24, None), (51, None), (52, 51), (80, 79)])
def test_operation_limit_is_not_lowered_without_queued_dispatch(num_layers: int, max_ops: int | None) -> None:
    """MLX's own limit is 40 or 50."""
    config = {"num_hidden_layers": num_layers}
    limits = command_buffer_limits([config], 64 * GIB, allows_queued_dispatch=False)
    assert limits.max_ops == max_ops
    assert limits.max_mb == command_buffer_limits([config], 64 * GIB, allows_queued_dispatch=True).max_mb


def test_command_buffer_limits_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_OPS, "7")
    monkeypatch.setenv(MAX_MB, "")  # so that monkeypatch removes the variable again
    monkeypatch.delenv(MAX_MB)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    assert limits_in_force() == CommandBufferLimits(7, None)
    set_command_buffer_limits(CommandBufferLimits(29, 4096))
    assert limits_in_force() == CommandBufferLimits(7, 4096)


def test_mlx_s_own_limit_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MAX_OPS, MAX_MB):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    set_command_buffer_limits(CommandBufferLimits(None, 4096))
    assert MAX_OPS not in os.environ
    assert limits_in_force() == CommandBufferLimits(None, 4096)


def test_command_buffer_limits_are_not_set_after_mlx_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MAX_OPS, raising=False)
    monkeypatch.delenv(MAX_MB, raising=False)
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    set_command_buffer_limits(CommandBufferLimits(29, 4096))
    assert limits_in_force() is None
