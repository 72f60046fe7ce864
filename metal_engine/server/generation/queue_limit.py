"""Limits the number of waiting requests. Requests beyond the limit are rejected at once with ``Retry-After``."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.engine.async_engine import AsyncEngine, Reservation
from metal_engine.server.errors import APIError, unavailable


@dataclass(frozen=True)
class QueueLimit:
    """Limits on requests that wait for the engine. Must be used in the event loop's thread.

    Attributes:
        max_requests: maximum number of waiting sequences (:attr:`AsyncEngine.num_queued`); 0 for no limit.
        max_tokens: maximum number of prompt tokens of all requests that have no output yet; 0 for no limit.
        request_timeout: maximum duration of a request in seconds; 0 for no limit.
    """

    engine: AsyncEngine
    max_requests: int
    max_tokens: int
    request_timeout: float

    def check(self, num_prompt_tokens: int) -> None:
        """Raise APIError, a 503 with ``Retry-After``, if a limit forbids one more request.

        Args:
            num_prompt_tokens: prompt tokens of all sequences of the request; 0 if they are not known yet.
        """
        num_queued = self.engine.num_queued
        if self.max_requests and num_queued >= self.max_requests:
            raise overloaded(f"{num_queued} requests are waiting (--max-num-queued-reqs)")
        queued = self.engine.num_queued_tokens
        # A prompt that is larger than the limit is admitted if no other prompt waits. Otherwise, it would never run.
        if self.max_tokens and queued and queued + num_prompt_tokens > self.max_tokens:
            raise overloaded(f"{queued} prompt tokens are waiting (setting max-num-queued-tokens)")

    def admit(self, prompt_lens: list[int]) -> Reservation:
        """Reserve queue places for sequences with these prompt lengths in tokens. Later checks count these places.

        Raises as :meth:`check`.
        """
        self.check(sum(prompt_lens))
        return self.engine.reserve(prompt_lens)


def overloaded(reason: str) -> APIError:
    """Return an error with status 503 and ``Retry-After``."""
    return unavailable(f"the server is overloaded: {reason}")
