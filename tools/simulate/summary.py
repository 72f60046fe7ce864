"""Results of a scenario, as the figures of docs/dev/scaling-limits.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tools.benchmarks.simulate_scheduler import percentile
from tools.simulate.scenario import SimulatedFleet

HEADER = (
    "requests", "TTFT P50 s", "P90 s", "P99 s", "s a token P50 / P99", "tokens/s a replica", "hits", "possible",
    "busiest", "broken",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimulationSummary:
    """Figures of the requests that arrived within the period. Times are in seconds.

    Attributes:
        ttfts: times to the first token.
        tokens_per_second: throughput of a replica: prompt tokens (cached or not) and output tokens of requests that
            finished in the period, whenever they arrived.
        token_seconds: mean time between two tokens, for each finished request with more than one output token.
        hit_rate: share of prompt tokens found in the replica's cache or in the store.
        from_store: share of prompt tokens loaded from the store.
        possible: share of prompt tokens that an unlimited cache shared by all replicas would have had.
        busiest: number of requests on the busiest replica, relative to the mean.
        num_broken: number of streams that broke because their replica was lost.
        num_preemptions: preemptions in the whole run, warm-up included.
        store_bytes_per_second: bytes per second read from the store, and written to it, in the whole run.
    """

    num_requests: int
    ttfts: list[float]
    tokens_per_second: float
    token_seconds: list[float]
    hit_rate: float
    from_store: float
    possible: float
    busiest: float
    num_broken: int
    num_preemptions: int
    store_bytes_per_second: tuple[float, float]

    @property
    def row(self) -> list[str]:
        return [
            f"{self.num_requests:,}",
            *(f"{percentile(self.ttfts, percent):.1f}" for percent in (50, 90, 99)),
            " / ".join(f"{percentile(self.token_seconds, percent):.2f}" for percent in (50, 99)),
            f"{self.tokens_per_second:.0f}",
            f"{self.hit_rate:.1%}",
            f"{self.possible:.1%}",
            f"{self.busiest:.2f}",
            f"{self.num_broken}",
        ]


def summarize(fleets: Sequence[SimulatedFleet]) -> SimulationSummary:
    """Return the combined figures of several completed runs of one scenario.

    Raises:
        ValueError: no request arrived within the period.
    """
    scenario = fleets[0].scenario
    seconds = len(fleets) * scenario.period
    of_fleets = [[s for s in fleet.served if scenario.warm_up <= s.asked_at < scenario.end] for fleet in fleets]
    counted = [served for of_fleet in of_fleets for served in of_fleet]
    if not counted:
        raise ValueError("no request came within the period: make it longer, or the load higher")
    finished = [s for s in counted if s.outcome == "finished"]
    ended = [s for fleet in fleets for s in fleet.served if scenario.warm_up <= s.ended_at < scenario.end]
    num_tokens = sum(s.num_prompt_tokens + s.num_answer_tokens for s in ended if s.outcome == "finished")
    num_prompt_tokens = sum(s.num_prompt_tokens for s in finished)
    most = sum(max(Counter(s.replica for s in of_fleet).values(), default=0) for of_fleet in of_fleets)
    stores = [fleet.store for fleet in fleets if fleet.store is not None]
    whole = len(fleets) * scenario.end
    return SimulationSummary(
        num_requests=len(counted),
        ttfts=[s.first_token_at - s.asked_at for s in counted],
        tokens_per_second=num_tokens / seconds / scenario.num_replicas,
        token_seconds=[
            (s.ended_at - s.first_token_at) / (s.num_answer_tokens - 1) for s in finished if s.num_answer_tokens > 1
        ],
        hit_rate=sum(s.num_cached_tokens for s in finished) / num_prompt_tokens,
        from_store=sum(s.num_external_tokens for s in finished) / num_prompt_tokens,
        possible=sum(s.num_possible_tokens for s in finished) / num_prompt_tokens,
        busiest=most * scenario.num_replicas / len(counted),
        num_broken=sum(s.outcome == "broken" for s in counted),
        num_preemptions=sum(fleet.num_preemptions for fleet in fleets),
        store_bytes_per_second=(
            sum(store.num_bytes_read for store in stores) / whole,
            sum(store.num_bytes_written for store in stores) / whole,
        ),
    )
