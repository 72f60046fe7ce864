"""Reads counts of speculation and the type of the KV cache from a server's ``/metrics``.

Works with any server that uses vLLM's names for these counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp

# Matches a metric of any server, such as `vllm:spec_decode_num_drafts_total{model_name="..."} 12.0`.
_SAMPLE = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{.*\})? (\S+)$", re.MULTILINE
)


_INFO = re.compile(r"^\w+:engine_info\{(.*)\} \S+$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


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
        """Percentage of the proposed tokens that were accepted; 0 without proposals."""
        return 100 * self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Average number of tokens that a request with drafts got in a step; 1 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def since(self, before: SpecDecodeCounts | None) -> SpecDecodeCounts:
        """Return the difference to earlier counts. None stands for zero counts."""
        before = before or SpecDecodeCounts()
        return SpecDecodeCounts(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
        )


async def read_metrics(session: aiohttp.ClientSession, base_url: str) -> str:
    """Return a server's metrics in Prometheus format; an empty string if the server does not report any."""
    try:
        async with session.get(f"{base_url.rstrip('/')}/metrics") as response:
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        return ""


def parse_counts(text: str) -> SpecDecodeCounts | None:
    """Parse metrics in Prometheus format. Return the counts, summed over all models; None if there are no counts."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    if not sums:
        return None
    return SpecDecodeCounts(*(int(sums.get(name, 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")))


def parse_kv_cache_dtype(text: str, model: str) -> str | None:
    """Return the type of the KV cache, such as ``int8``; None if the server does not report the type.

    Args:
        text: metrics in Prometheus format.
        model: name of the requested model. If the metrics have only one model, its name may differ.
    """
    found = [dict(_LABEL.findall(labels)) for labels in _INFO.findall(text)]
    named = [labels for labels in found if labels.get("model_name") == model]
    ours = named or (found if len(found) == 1 else [])
    return ours[0].get("kv_cache_dtype") if ours else None
