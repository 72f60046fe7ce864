"""How much of what a server proposes it accepts, from its ``/metrics``: vLLM's names, whoever's server it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp

# A metric of any server, as in `vllm:spec_decode_num_drafts_total{model_name="..."} 12.0`.
_SAMPLE = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{.*\})? (\S+)$", re.MULTILINE
)


@dataclass(frozen=True)
class SpecDecodeCounts:
    """What a server has counted so far, or in some time.

    Attributes:
        num_drafts: proposals, each of one request in one step.
        num_draft_tokens: tokens proposed.
        num_accepted_tokens: of those, the ones accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of the proposed tokens that were accepted, in percent."""
        return 100 * self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a request with drafts got in a step, on average."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def since(self, before: SpecDecodeCounts | None) -> SpecDecodeCounts:
        """Returns what came to these counts after ``before``; None stands for nothing counted."""
        before = before or SpecDecodeCounts()
        return SpecDecodeCounts(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
        )


async def spec_decode_counts(session: aiohttp.ClientSession, base_url: str) -> SpecDecodeCounts | None:
    """Returns a server's counts; None if it has none, because it does not speculate or has no such metrics."""
    try:
        async with session.get(f"{base_url.rstrip('/')}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        return None
    return parse_counts(text)


def parse_counts(text: str) -> SpecDecodeCounts | None:
    """Reads counts in Prometheus's format; those of several models are added up. None if there are none."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    if not sums:
        return None
    return SpecDecodeCounts(*(int(sums.get(name, 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")))
