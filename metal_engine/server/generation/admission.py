"""Bounds how many requests wait. A client beyond the bound is told at once to come back later."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.engine.async_engine import AsyncEngine, Reservation
from metal_engine.server.errors import APIError

OVERLOADED = "overloaded"
# A queue that is full now may have room after a few steps; clients back off further by themselves.
RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True)
class Admission:
    """Limits on what waits for the engine. Belongs to the event loop.

    Attributes:
        max_requests: requests that may wait; 0 for no limit.
        max_tokens: prompt tokens of requests without output; 0 for no limit.
        request_timeout: seconds that a request may take; 0 for no limit.
    """

    engine: AsyncEngine
    max_requests: int
    max_tokens: int
    request_timeout: float

    def check(self, num_prompt_tokens: int) -> None:
        """Raise APIError, a 503 with ``Retry-After``, if a request with such a prompt may not wait."""
        num_queued = self.engine.num_queued
        if self.max_requests and num_queued >= self.max_requests:
            raise overloaded(f"{num_queued} requests are waiting (--max-num-queued-reqs)")
        queued = self.engine.num_queued_tokens
        # A prompt larger than the limit is let in when nothing else waits: it would never get in otherwise.
        if self.max_tokens and queued and queued + num_prompt_tokens > self.max_tokens:
            raise overloaded(f"{queued} prompt tokens are waiting (setting max-num-queued-tokens)")

    def admit(self, prompt_lens: list[int]) -> Reservation:
        """Places for requests with prompts of so many tokens: of a burst, each counts those before it.

        Raises what :meth:`check` raises.
        """
        self.check(sum(prompt_lens))
        return self.engine.reserve(prompt_lens)


def overloaded(reason: str) -> APIError:
    """A 503 with ``Retry-After``."""
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    return APIError(503, f"the server is overloaded: {reason}", code=OVERLOADED, headers=headers)
