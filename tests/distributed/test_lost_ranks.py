"""A rank that dies or stops in a server without a process for its engine: every rank ends, and clients get an error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoint_files import write_checkpoint
from tests.support.ranked_server import ROOT, RankedServer

TIMEOUT = 8.0


# Characters of a prompt that takes many steps, and tokens of each step.
LONG_PROMPT, CHUNK = 60_000, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m", config={"max_position_embeddings": 1 << 16})


def end_of(model: Path, lost: int, how: signal.Signals, phase: str) -> tuple[float, str, str]:
    """Lose a rank of a server that is ``idle``, or in the ``prefill`` or ``decode`` of a request.

    Returns:
        Seconds until all other ranks had ended, the server's log output, and the text that the client received.
    """
    flags = ["--served-model-name", "m", "--max-num-batched-tokens", str(CHUNK), "--no-engine-process"]
    settings = {"distributed_timeout_seconds": TIMEOUT, "log_stats_interval": 0}
    with RankedServer(model, *flags, **settings) as server, ThreadPoolExecutor(1) as client:
        answer = None
        if phase == "decode":
            lines = server.stream(2000).iter_lines()
            for _ in range(6):
                next(lines)
            answer = client.submit(read_on, lines)
        elif phase == "prefill":
            answer = client.submit(lambda: read_on(server.stream(1, "a" * LONG_PROMPT).iter_lines()))
            while server.num_running() == 0:
                assert not answer.done(), answer.result()
        os.kill(server.ranks[lost], how)
        if lost:
            assert set(iter(server.health, "gone")) <= {"ok", "error"}
        # Rank 0 kills a stopped rank that it has started. A stopped rank 0 is not killed.
        seconds = server.seconds_until_all_ended(but=None if lost else server.ranks[0])
        if lost:
            assert server.process.wait() == 1
        server.kill()  # the clients of a stopped server would wait
        told = "" if answer is None else answer.result()
        assert "[DONE]" not in told or '"error"' in told, "the request ended before the loss"
        return seconds, server.said(), told


def read_on(lines: Iterator[str]) -> str:
    """Return the rest of a stream, which may break off."""
    read = []
    with suppress(httpx.HTTPError):
        read.extend(lines)
    return "\n".join(read)


def test_a_lost_follower(model: Path) -> None:
    _, said, told = end_of(model, 1, signal.SIGKILL, "decode")
    assert re.search(r"rank 1 \(127\.0\.0\.1\) has gone.*: rank 0 ends", said), said
    assert "rank 1" in told and '"error"' in told, told


@pytest.mark.full
def test_an_orderly_end_leaves_no_stopped_rank(model: Path) -> None:
    with RankedServer(model, "--served-model-name", "m", distributed_timeout_seconds=600) as server:
        os.kill(server.ranks[1], signal.SIGSTOP)
        server.process.terminate()
        server.seconds_until_all_ended()
        assert server.process.wait() == 0
        assert "CRITICAL" not in server.said()


@pytest.mark.full
@pytest.mark.parametrize("phase", ["idle", "prefill", "decode"])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_twenty_of_twenty(model: Path, how: signal.Signals, lost: int, phase: str) -> None:
    """Run four servers at a time, because they mostly wait."""
    with ThreadPoolExecutor(4) as servers:
        found = list(servers.map(lambda _: end_of(model, lost, how, phase), range(20)))
    what = "has gone" if how == signal.SIGKILL else f"has been silent for {TIMEOUT:g} s"
    for _, said, _ in found:
        lines = [line for line in said.splitlines() if f": rank {1 - lost} ends" in line]
        assert len(lines) == 1 and re.search(rf"rank {lost} \(127\.0\.0\.1\) {what}", lines[0]), said
    print(
        f"{how.name} of rank {lost}, {phase}: all others had ended after {max(one[0] for one in found):.2f} s at most"
    )


def test_a_signal_to_all_ranks_loses_no_request(model: Path) -> None:
    """Rank 0 completes the requests in flight. The other ranks ignore the signal and compute them."""
    # The requests in flight are completed, even on a busy machine.
    flags = ["--served-model-name", "m", "--shutdown-timeout", "600"]
    with RankedServer(model, *flags, log_stats_interval=0) as server:
        lines = server.stream(40).iter_lines()
        next(lines)
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(server.ranks[1], number)
        server.process.terminate()
        told = [line for line in lines if line]
        assert told[-1] == "data: [DONE]" and not any('"error"' in line for line in told), told
        server.seconds_until_all_ended()
        assert server.process.wait() == 0
        assert "CRITICAL" not in server.said()


@pytest.mark.full
def test_a_program_that_exits_without_closing_the_llm_reports_no_lost_rank(model: Path) -> None:
    program = (
        "from metal_engine import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, tensor_parallel_size=2)\n"
        "print(len(llm.generate('Tides', SamplingParams(max_tokens=3), use_tqdm=False)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "rank 0 (127.0.0.1) has gone" not in done.stderr
