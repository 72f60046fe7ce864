"""Deaths of an engine's process under streams of mixed requests: no answer is lost or different."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_child import pid_of, started
from tests.support.serving import serve, wait_until
from tools.benchmarks.engine_death import answers
from tools.benchmarks.engine_death.__main__ import main, measure, worker_of
from tools.benchmarks.engine_death.deaths import Report
from tools.benchmarks.engine_death.requests import mixed_requests
from tools.benchmarks.engine_death.server import WORKER
from tools.benchmarks.engine_death.worker import LOADS

KINDS = ("kill", "abort", "error")
SIZES = {"max_model_len": 2048, "num_blocks": 4096, "max_num_batched_tokens": 1024}
HYBRID = {"architecture": "qwen3_5", "num_state_slots": 64}


def run(
    num_deaths: int, num_streams: int, seed: int, *, max_tokens: int = 24, kinds: Sequence[str] = KINDS, **config: Any
) -> Report:
    """Run the benchmark against a server in this process, whose engine is on a tiny model."""
    engine = started("tiny", max_restarts=1000, fails=True, ahead=True, **SIZES, **config)
    with serve(engine=engine, names=("tiny",)) as served:
        report = asyncio.run(
            measure(
                served.url,
                lambda: pid_of(engine),
                mixed_requests("tiny", 1, max_tokens),
                num_streams=num_streams,
                num_deaths=num_deaths,
                kinds=kinds,
                gap=0.3,
                seed=seed,
            )
        )
        served.wait_until_idle()
    return report


@pytest.fixture(autouse=True)
def _loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LOADS, str(tmp_path / "loads"))


@pytest.mark.full
@pytest.mark.parametrize("config", [{}, HYBRID], ids=["attention", "hybrid"])
def test_no_response_is_lost_or_changed_by_engine_deaths(config: dict[str, Any]) -> None:
    """tests/engine/process/ runs deaths of an engine with fewer requests."""
    report = run(12, 64, seed=2, **config)
    assert report.is_good, str(report)
    assert set(report.kinds) <= set(KINDS) and report.tally.num_answers >= 64 and report.pauses


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--kv-cache-dtype int8",
        "--kv-cache-dir {folder}",
        """--speculative-config {{"method":"ngram","num_speculative_tokens":4}}""",
    ],
    ids=["attention", "quantized KV", "store", "drafts"],
)
def test_the_demo(demo_path: Path, arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool's own server answers alike under deaths.

    With a quantized KV cache, batches round differently, so that answers differ without deaths, too.
    """
    given = ["--deaths", "8", "--streams", "16", "--serve-args", arguments.format(folder=tmp_path / "kv")]
    status, report = main(given), capsys.readouterr().out
    assert " 0 lost" in report and "PROBLEM" not in report
    assert status == 0 or "int8" in arguments


def test_the_oldest_process_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = f"python -m {WORKER} 7"
    rows = [(300, 9, "1-00:00:01", "sh"), (20, 9, "02:03", worker), (4, 9, "59", worker), (5, 8, "01:00:00", worker)]
    rows += [(31, 9, "1-00:00:00", worker)]
    text = "\n".join(" ".join(map(str, row)) for row in rows)

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, text)

    monkeypatch.setattr("tools.benchmarks.engine_death.__main__.subprocess.run", run)
    assert worker_of(9) == 31 and worker_of(8) == 5 and worker_of(7) is None


def test_the_engine_s_process_is_found_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    child = subprocess.Popen([sys.executable, "-c", "input()" + " " * 80, WORKER], stdin=subprocess.PIPE)
    try:
        wait_until(lambda: worker_of(os.getpid()) == child.pid, "the process to be listed")
    finally:
        child.communicate(b"\n")


CHUNKS = [
    {"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}}]},
    {"id": "1", "choices": [{"index": 1, "delta": {"content": "x"}}, {"index": 0, "delta": {"content": "lo"}}]},
    {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}},
]
MERGED_CHUNKS = [
    {"id": "2", "choices": [{"index": 0, "delta": {"content": "Hello"}}]},
    {"id": "2", "choices": [{"index": 1, "delta": {"content": "x"}}]},
    {"id": "2", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}},
]


def test_answers_are_compared_without_their_chunks() -> None:
    ours = answers.merged(CHUNKS)
    assert answers.difference(ours, answers.merged(MERGED_CHUNKS)) == ""
    assert answers.difference(ours, answers.merged(MERGED_CHUNKS[1:])).startswith(".choices[0].delta.content: 'Hello'")
    assert answers.difference(ours, answers.merged(CHUNKS + CHUNKS[:1])) != "", "a repeated part"


def test_log_probabilities_may_differ_slightly() -> None:
    values = [answers.merged([{"logprobs": [{"logprob": one}, {"logprob": -2.0}]}]) for one in (-1.0, -1.001, -1.2)]
    assert answers.difference(values[0], values[1]) == ""
    assert answers.difference(values[0], values[2]) != ""
    assert answers.difference(values[0], answers.merged([{"logprobs": [{"logprob": -1.0}]}])) != ""


FAILURE = {"error": {"message": "it ended"}}


@pytest.mark.parametrize(
    "event", [FAILURE, {"type": "error"} | FAILURE, {"type": "response.failed", "response": FAILURE}]
)
def test_errors_of_streams_are_found(event: Any) -> None:
    assert "it ended" in (answers.error_of(event) or "")
    for good in (CHUNKS[0], {"response": "a text", "done": False}, {"response": {"error": None}}):
        assert answers.error_of(good) is None
