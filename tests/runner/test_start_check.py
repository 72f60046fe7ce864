"""Time limit of the checks at the start."""

from __future__ import annotations

import pytest

from metal_engine.runner.start_check import CheckDeadline, CheckTooSlowError


def test_the_time_limit() -> None:
    now = 0.0
    deadline = CheckDeadline(5.0, lambda: now)
    deadline.check()
    now = 5.1
    with pytest.raises(CheckTooSlowError, match="more than 5 s"):
        deadline.check()
