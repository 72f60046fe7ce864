"""Limits of Metal's command buffers, from configurations alone."""

from __future__ import annotations

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
        ({"num_hidden_layers": 3, "text_config": {"num_hidden_layers": 62}}, 992),  # the other is of the vision tower
        ({"model_type": "llama"}, None),
        ({"num_hidden_layers": "many"}, None),
    ],
)
def test_kernels_of_a_step(config: dict[str, Any], expected: int | None) -> None:
    assert kernels_of_step(config) == expected


@pytest.mark.parametrize(("num_layers", "per_layer"), [(16, 17), (30, 17), (62, 20), (94, 30)])
def test_a_step_has_command_buffers_enough_to_go_behind_another(num_layers: int, per_layer: int) -> None:
    limits = command_buffer_limits([{"num_hidden_layers": num_layers}], 16 * GIB)
    # A command buffer is committed when it has more kernels than the limit.
    assert num_layers * per_layer / (limits.max_ops + 1) >= 14


@pytest.mark.parametrize("memory_gib", [16, 64, 512])
@pytest.mark.parametrize("num_layers", [16, 30, 94])
def test_the_cache_does_not_end_a_command_buffer(num_layers: int, memory_gib: int) -> None:
    """The keys and values of all memory there is, in half precision; weights are counted in packed words."""
    elements = memory_gib * GIB // 2
    limits = command_buffer_limits([{"num_hidden_layers": num_layers}], memory_gib * GIB)
    layers_of_a_buffer = (limits.max_ops + 1) / 16
    assert limits.max_mb << 20 >= elements / num_layers * layers_of_a_buffer


def test_of_several_models_the_smallest_decides() -> None:
    small, large = {"num_hidden_layers": 24}, {"num_hidden_layers": 80}
    alone = command_buffer_limits([small], 64 * GIB)
    assert command_buffer_limits([large, small], 64 * GIB) == command_buffer_limits([small, {}], 64 * GIB) == alone
    assert alone.max_ops < command_buffer_limits([large], 64 * GIB).max_ops


def test_a_model_that_is_not_known_leaves_mlx_s_own_limit_of_operations() -> None:
    assert command_buffer_limits([], 64 * GIB).max_ops == 40


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_OPS, "7")
    monkeypatch.setenv(MAX_MB, "")  # so that monkeypatch takes it away again
    monkeypatch.delenv(MAX_MB)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    assert limits_in_force() is None
    assert set_command_buffer_limits(CommandBufferLimits(29, 4096)) == CommandBufferLimits(7, 4096)
    assert limits_in_force() == CommandBufferLimits(7, 4096)


def test_it_is_too_late_when_mlx_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MAX_OPS, raising=False)
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    assert set_command_buffer_limits(CommandBufferLimits(29, 4096)) is None
    assert limits_in_force() is None
