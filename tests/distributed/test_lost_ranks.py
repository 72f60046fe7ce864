"""A rank that dies or stops: every rank ends, clients are told, and nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoint_files import write_checkpoint
from tests.support.ranked_server import ROOT, RankedServer

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


def test_a_signal_to_all_ranks_loses_no_request(model: Path) -> None:
    """Rank 0 answers what is under way; the others compute it, whatever they are told."""
    with RankedServer(model, "--served-model-name", "m", "--log-stats-interval", "0") as server:
        lines = server.stream(60).iter_lines()
        next(lines)
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(server.ranks[1], number)
        os.kill(server.ranks[0], signal.SIGTERM)
        told = [line for line in lines if line]
        assert told[-1] == "data: [DONE]" and not any('"error"' in line for line in told), told
        server.seconds_until_all_ended()
        assert server.process.wait() == 0
        assert "CRITICAL" not in server.said()


def test_a_program_that_does_not_close_its_llm_loses_no_rank(model: Path) -> None:
    program = (
        "from metal_engine import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, tensor_parallel_size=2)\n"
        "print(len(llm.generate('Tides', SamplingParams(max_tokens=3), use_tqdm=False)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "rank 0 (127.0.0.1) has gone" not in done.stderr
