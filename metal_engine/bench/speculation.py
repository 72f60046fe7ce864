"""Reads counts of speculation from the ``/metrics`` of any server that uses vLLM's names for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp

# Matches a metric of any server, such as `vllm:spec_decode_num_drafts_total{model_name="..."} 12.0`.
_SAMPLE = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{.*\})? (\S+)$", re.MULTILINE
)


@dataclass(frozen=True)
class SpecDecodeCounts:
    """Counts of speculation on a server, in total or in a period.

    Attributes:
        num_drafts: number of proposals, each for one request in one step.
        num_draft_tokens: number of proposed tokens.
        num_accepted_tokens: number of accepted tokens among the proposed ones.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Percentage of the proposed tokens that were accepted."""
        return 100 * self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Average number of tokens that a request with drafts got in a step."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def since(self, before: SpecDecodeCounts | None) -> SpecDecodeCounts:
        """Return the difference to earlier counts. None stands for zero counts."""
        before = before or SpecDecodeCounts()
        return SpecDecodeCounts(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
        )


async def spec_decode_counts(session: aiohttp.ClientSession, base_url: str) -> SpecDecodeCounts | None:
    """Return a server's counts; None if the server does not speculate or has no such metrics."""
    try:
        async with session.get(f"{base_url.rstrip('/')}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        return None
    return parse_counts(text)


def parse_counts(text: str) -> SpecDecodeCounts | None:
    """Parse counts in Prometheus format, summed over all models. None if there are none."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    if not sums:
        return None
    return SpecDecodeCounts(*(int(sums.get(name, 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")))
