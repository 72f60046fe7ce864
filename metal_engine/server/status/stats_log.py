"""Periodic log line about the engine's throughput and load."""

from __future__ import annotations

import asyncio
import logging
import operator
import time

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.server.generation.model_provider import ModelProvider

logger = logging.getLogger(__name__)


class StatsLog:
    """Creates log lines with an engine's current load, and its rates since the previous line."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._last = self._totals()

    def _totals(self) -> tuple[float, int, int, int, int]:
        m = self._engine.metrics
        return time.monotonic(), m.num_prompt_tokens, m.num_generation_tokens, m.num_cache_queries, m.num_cache_hits

    def line(self) -> str | None:
        """Return a line about the activity since the last call.

        Returns None if no tokens were computed since then, and no request runs or waits.
        """
        stats, waiting = self._engine.stats, self._engine.num_waiting
        last, self._last = self._last, self._totals()
        seconds, num_prompt, num_generated, queries, hits = map(operator.sub, self._last, last)
        if not (num_prompt or num_generated or stats.num_running or waiting):
            return None
        seconds = max(seconds, 1e-9)
        hit_rate = f"{hits / queries:.1%}" if queries else "-"
        return (
            f"prompt {num_prompt / seconds:.1f} tokens/s, generation {num_generated / seconds:.1f} tokens/s, "
            f"running {stats.num_running}, waiting {waiting}, "
            f"KV cache {stats.num_used_blocks / stats.num_blocks:.1%}, prefix cache hits {hit_rate}"
        )


async def log_stats(models: ModelProvider, interval: float) -> None:
    """Log a line for each loaded model every ``interval`` seconds, until it is cancelled. Skip idle models.

    If the server has several models, a line begins with the model's name.
    """
    logs: dict[AsyncEngine, StatsLog] = {}
    while True:
        logs = {served.engine: logs.get(served.engine) or StatsLog(served.engine) for served in models.loaded}
        await asyncio.sleep(interval)
        for served in models.loaded:
            line = logs[served.engine].line() if served.engine in logs else None
            if line is not None:
                is_only = len(models.names) == len(served.names)
                logger.info("%s", line if is_only else f"{served.names[0]}: {line}")
