"""The line that says, every few seconds, what the engine has been doing."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from metal_engine.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Totals:
    time: float
    prompt_tokens: int
    generation_tokens: int
    cache_queries: int
    cache_hits: int


class StatsLog:
    """Turns the engine's totals into rates since the last line."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._last = self._totals()

    def _totals(self) -> _Totals:
        metrics = self._engine.metrics
        return _Totals(
            time.monotonic(),
            metrics.num_prompt_tokens,
            metrics.num_generation_tokens,
            metrics.num_cache_queries,
            metrics.num_cache_hits,
        )

    def line(self) -> str | None:
        """What happened since the last call; None if nothing did, and nothing is under way."""
        now, last, stats = self._totals(), self._last, self._engine.stats
        self._last = now
        num_prompt = now.prompt_tokens - last.prompt_tokens
        num_generated = now.generation_tokens - last.generation_tokens
        waiting = self._engine.num_waiting
        if not (num_prompt or num_generated or stats.num_running or waiting):
            return None
        seconds = max(now.time - last.time, 1e-9)
        queries = now.cache_queries - last.cache_queries
        hit_rate = f"{(now.cache_hits - last.cache_hits) / queries:.1%}" if queries else "-"
        return (
            f"prompt {num_prompt / seconds:.1f} tokens/s, generation {num_generated / seconds:.1f} tokens/s, "
            f"running {stats.num_running}, waiting {waiting}, "
            f"KV cache {stats.num_used_blocks / stats.num_blocks:.1%}, prefix cache hits {hit_rate}"
        )

    async def run(self, interval: float) -> None:
        """Log a line every ``interval`` seconds, for ever."""
        while True:
            await asyncio.sleep(interval)
            line = self.line()
            if line is not None:
                logger.info("%s", line)
