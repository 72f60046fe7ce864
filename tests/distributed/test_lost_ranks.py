"""A rank that dies or stops: every rank ends, clients are told, and nobody hangs."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.checkpoint_files import write_checkpoint
from tests.support.ranked_server import RankedServer

TIMEOUT = 8.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


def end_of(model: Path, lost: int, how: signal.Signals, *, loaded: bool) -> tuple[float, str, str]:
    """Lose a rank of a server.

    Returns:
        Seconds until all others had ended; what the server said; what the client of a stream was told.
    """
    flags = ["--distributed-timeout-seconds", str(TIMEOUT), "--served-model-name", "m", "--log-stats-interval", "0"]
    with RankedServer(model, *flags) as server:
        told, health = "", set[str]()
        if loaded:
            answer = server.stream(2000)
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
        os.kill(server.ranks[lost], how)
        if lost == 0:
            seconds = server.seconds_until_all_ended(but=server.ranks[0])
            return seconds, server.said(), told
        if loaded:
            told = "\n".join(lines)
        health.update(iter(server.health, "gone"))
        assert health <= {"ok", "error"}
        seconds = server.seconds_until_all_ended(but=server.ranks[lost])
        assert server.process.wait() == 1
        return seconds, server.said(), told


@pytest.mark.parametrize(("how", "what"), [(signal.SIGKILL, "has gone"), (signal.SIGSTOP, "has been silent for 8 s")])
def test_a_lost_follower(model: Path, how: signal.Signals, what: str) -> None:
    _, said, told = end_of(model, 1, how, loaded=True)
    assert re.search(rf"rank 1 \(127\.0\.0\.1\) {what}.*: rank 0 ends", said), said
    assert "rank 1" in told and '"error"' in told, told


def test_a_lost_leader(model: Path) -> None:
    _, said, _ = end_of(model, 0, signal.SIGKILL, loaded=False)
    assert re.search(r"rank 0 \(127\.0\.0\.1\) has gone .*: rank 1 ends", said), said


@pytest.mark.full
@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "loaded"])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_twenty_of_twenty(model: Path, how: signal.Signals, lost: int, loaded: bool) -> None:
    seconds = [end_of(model, lost, how, loaded=loaded)[0] for _ in range(20)]
    print(f"{how.name} of rank {lost}: all others had ended after {max(seconds):.2f} s at most")
    assert len(seconds) == 20
