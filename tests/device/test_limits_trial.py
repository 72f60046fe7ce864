"""Starts that end while large command buffers run for the first time: the third start uses MLX's own limits."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from metal_engine.checkpoints import known_config
from metal_engine.checkpoints.known_config import limit_command_buffers
from metal_engine.device.command_buffers import MAX_MB, MAX_OPS, limits_in_force
from metal_engine.device.limits_trial import MOST_UNFINISHED, refusal, trying_limits
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import CommandBufferLimits

LIMITS = CommandBufferLimits(24, 4096)
WATCHDOG = "[METAL] Command buffer execution failed: (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"


@pytest.fixture(autouse=True)
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set limits. Return the cache directory."""
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setenv(MAX_OPS, str(LIMITS.max_ops))
    monkeypatch.setenv(MAX_MB, str(LIMITS.max_mb))
    return tmp_path


def killed() -> None:
    """Start a process that dies in ``trying_limits``, as in a model's largest step, and wait for its end."""
    if (child := os.fork()) == 0:
        with trying_limits():
            os._exit(1)
    os.waitpid(child, 0)


def test_a_finished_start_leaves_no_trial_record(limits: Path) -> None:
    with trying_limits():
        assert list(limits.rglob("*.json"))
    assert not list(limits.rglob("*.json")) and refusal(LIMITS) is None


def test_after_two_killed_starts_the_limits_are_refused(limits: Path) -> None:
    for _ in range(MOST_UNFINISHED):
        assert refusal(LIMITS) is None
        killed()
    reason = refusal(LIMITS)
    (file,) = limits.rglob("*.json")
    assert reason is not None and str(file) in reason
    assert refusal(CommandBufferLimits(50, 4096)) is None  # other limits have not been tried
    file.unlink()
    assert refusal(LIMITS) is None


def test_one_killed_start_is_forgotten_after_a_start_that_finishes() -> None:
    killed()
    with trying_limits():
        pass
    killed()
    assert refusal(LIMITS) is None


def test_concurrent_unfinished_starts_count_once(limits: Path) -> None:
    """Ranks and models start together. A running start does not count as unfinished."""
    with trying_limits():
        killed()
        with trying_limits():
            pass
        assert list(limits.rglob("*.json"))
        assert refusal(LIMITS) is None
    killed()
    with trying_limits():
        assert refusal(LIMITS) is None


@pytest.mark.parametrize(("message", "counts"), [(WATCHDOG, True), ("[malloc] Unable to allocate", False)])
def test_only_errors_of_long_command_buffers_count(message: str, counts: bool) -> None:
    for _ in range(MOST_UNFINISHED):
        with pytest.raises(RuntimeError), trying_limits():
            raise RuntimeError(message)
    assert (refusal(LIMITS) is not None) == counts


def test_a_damaged_file_counts_as_none(limits: Path) -> None:
    killed()
    (file,) = limits.rglob("*.json")
    file.write_text("{")
    assert refusal(LIMITS) is None


def test_refused_limits_are_not_set_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(known_config.sys, "platform", "darwin")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    for name in (MAX_OPS, MAX_MB):
        monkeypatch.delenv(name)
    monkeypatch.setattr(known_config, "refusal", lambda limits: "two starts ended")
    limit_command_buffers([EngineArgs(model="./nowhere")])
    assert limits_in_force() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "two starts ended" in record.message
