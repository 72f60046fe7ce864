"""Every limit on one request's share of a step; the running and the waiting loop both call it."""

from __future__ import annotations

from metal_engine.config import SchedulerConfig
from metal_engine.request import Request


def num_new_tokens(request: Request, token_budget: int, config: SchedulerConfig) -> int:
    """How many tokens ``request`` may compute in this step; 0 if it has none to compute.

    Args:
        token_budget: tokens this step has left.
    """
    if request.num_output_tokens + request.num_output_placeholders >= request.max_tokens:
        return 0  # steps under way will finish it
    remaining = request.num_tokens_with_placeholders - request.num_computed_tokens
    return min(remaining, token_budget, config.max_model_len - request.num_computed_tokens)
