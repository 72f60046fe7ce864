"""Scenarios for comparing servers: requests with their times, and the figures that count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from metal_engine.bench.datasets import BenchRequest, arrival_times, random_text, verse_text
from metal_engine.bench.tokens import PromptTokenizer


@dataclass(frozen=True)
class Group:
    """Requests that are measured together.

    Attributes:
        due: earliest start of each request, in seconds after the start of its phase.
        max_concurrency: maximum number of the group's requests in flight. Further requests wait. None: no limit.
    """

    name: str
    requests: list[BenchRequest]
    due: list[float]
    max_concurrency: int | None = None


@dataclass(frozen=True)
class Goal:
    """Goal for metal-engine's ``metric`` of ``group``, divided by the best peer's.

    The goal is met if the ratio is at least ``factor``, or, if ``at_least`` is false, at most ``factor``.
    """

    group: str
    metric: str
    factor: float
    at_least: bool


@dataclass(frozen=True)
class PeerScenario:
    """Requests for comparing servers, in phases that run one after another on a newly started server.

    The groups of a phase run concurrently.

    Attributes:
        phases: function that returns the groups of each phase for a tokenizer and a seed.
        peers: names of the servers to compare with.
        same_blas: True if peers use metal-engine's OpenBLAS.
        show: metrics to print.
    """

    name: str
    title: str
    phases: Callable[[PromptTokenizer, int], list[list[Group]]]
    goals: list[Goal]
    peers: tuple[str, ...] = ("mlx-lm", "vllm-mlx", "rapid-mlx")
    same_blas: bool = True
    show: tuple[str, ...] = field(default=("output_throughput", "median_ttft_ms", "median_tpot_ms"))


def random_requests(
    tokenizer: PromptTokenizer, seed: int, count: int, input_len: int, output_len: int, prefix: str = ""
) -> list[BenchRequest]:
    rng = np.random.default_rng(seed)
    total = input_len + (len(tokenizer.encode(prefix)) if prefix else 0)
    texts = [random_text(tokenizer, rng, total, prefix) for _ in range(count)]
    return [BenchRequest(text, output_len, len(tokenizer.encode(text))) for text in texts]


def at_once(name: str, requests: list[BenchRequest], at: float = 0.0, most: int | None = None) -> Group:
    return Group(name, requests, [at] * len(requests), most)


def _sixteen(tokenizer: PromptTokenizer, seed: int) -> list[list[Group]]:
    return [[at_once("all", random_requests(tokenizer, seed, 16, 150, 32))]]


def _sonnet(tokenizer: PromptTokenizer, seed: int, count: int, rate: float, most: int) -> list[list[Group]]:
    rng = np.random.default_rng(seed)
    texts = [verse_text(tokenizer, rng, 1024) for _ in range(count)]
    requests = [BenchRequest(text, 128, len(tokenizer.encode(text))) for text in texts]
    return [[Group("all", requests, arrival_times(count, rate, 1.0, seed).tolist(), most)]]


def _one_stream(tokenizer: PromptTokenizer, seed: int) -> list[list[Group]]:
    return [[at_once("all", random_requests(tokenizer, seed, 4, 150, 64), most=1)]]


def _shared_prefix(tokenizer: PromptTokenizer, seed: int) -> list[list[Group]]:
    prefix = random_text(tokenizer, np.random.default_rng(1000 + seed), 1000)
    return [
        [at_once("cold", random_requests(tokenizer, seed, 8, 50, 32, prefix))],
        [at_once("warm", random_requests(tokenizer, 500 + seed, 8, 50, 32, prefix))],
    ]


def _short_behind_long(tokenizer: PromptTokenizer, seed: int) -> list[list[Group]]:
    long = at_once("long", random_requests(tokenizer, seed, 4, 1500, 16))
    return [[long, at_once("short", random_requests(tokenizer, 500 + seed, 1, 5, 16), at=0.5)]]


def _long_arrive(tokenizer: PromptTokenizer, seed: int) -> list[list[Group]]:
    running = at_once("running", random_requests(tokenizer, seed, 8, 30, 96))
    long = Group("long", random_requests(tokenizer, 500 + seed, 2, 1500, 8), [3.0, 6.0])
    return [[running, long]]


SCENARIOS = {
    s.name: s
    for s in (
        PeerScenario(
            "1",
            "16 at once, 150 in, 32 out",
            _sixteen,
            [Goal("all", "output_throughput", 1.5, True), Goal("all", "median_ttft_ms", 0.6, False)],
        ),
        PeerScenario(
            "2",
            "sonnet 1,024 in, 128 out, 8 at once",
            lambda tokenizer, seed: _sonnet(tokenizer, seed, 8, float("inf"), 8),
            [Goal("all", "output_throughput", 1.5, True)],
        ),
        PeerScenario(
            "2b",
            "sonnet 1,024 in, 128 out, 32 at rate 10, 32 at once",
            lambda tokenizer, seed: _sonnet(tokenizer, seed, 32, 10.0, 32),
            [],
            peers=("mlx-lm",),
        ),
        PeerScenario(
            "3",
            "one stream, 150 in, 64 out",
            _one_stream,
            [Goal("all", "median_ttft_ms", 1.0, False), Goal("all", "median_tpot_ms", 1.0, False)],
        ),
        PeerScenario(
            "4",
            "1,000 common tokens, 8 at once, 50 more in, 32 out",
            _shared_prefix,
            [Goal("cold", "output_throughput", 3.0, True), Goal("warm", "output_throughput", 1.0, True)],
        ),
        PeerScenario(
            "5",
            "5 words behind four prompts of 1,500 tokens",
            _short_behind_long,
            [Goal("short", "median_ttft_ms", 0.2, False)],
        ),
        PeerScenario(
            "6",
            "8 answers under way while two prompts of 1,500 tokens arrive",
            _long_arrive,
            [Goal("running", "p99_itl_ms", 1.2, False), Goal("running", "mean_tpot_ms", 1.2, False)],
            show=("p99_itl_ms", "mean_tpot_ms", "output_throughput", "median_ttft_ms"),
        ),
        PeerScenario(
            "7",
            "as installed: 16 at once, 150 in, 32 out",
            _sixteen,
            [Goal("all", "output_throughput", 10.0, True)],
            peers=("mlx-lm",),
            same_blas=False,
        ),
    )
}
