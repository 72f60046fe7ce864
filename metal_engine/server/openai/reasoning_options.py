"""Reads the fields of a chat request that turn reasoning on or off, limit it, or hide it."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.errors import short
from metal_engine.server.errors import invalid
from metal_engine.server.protocol import ChatCompletionBody, ReasoningBody


@dataclass(frozen=True)
class ReasoningOptions:
    """Wishes of a request about the model's reasoning.

    Attributes:
        effort: effort for the chat template; None if there is none.
        is_enabled: True or False if the request turns reasoning on or off; None if it does neither.
        budget: maximum number of tokens of the reasoning; None: no limit.
        is_hidden: True if the response must leave out the text of the reasoning.
    """

    effort: str | None = None
    is_enabled: bool | None = None
    budget: int | None = None
    is_hidden: bool = False

    @classmethod
    def of(cls, body: ChatCompletionBody) -> ReasoningOptions:
        """Return the options of a body. Raises APIError, a 400, for values out of range and fields that conflict."""
        asked = body.reasoning or ReasoningBody()
        if asked.exclude is not None and asked.exclude is body.include_reasoning:
            raise invalid(" and include_reasoning contradict each other", where="reasoning.exclude")
        is_hidden = bool(asked.exclude) or body.include_reasoning is False
        for name, own, other in (
            ("max_tokens", asked.max_tokens, "thinking_token_budget"),
            ("effort", asked.effort, "reasoning_effort"),
        ):
            if own is not None and getattr(body, other) is not None:
                raise invalid(f" and {other} exclude each other", where=f"reasoning.{name}")
        _check_budget("reasoning.max_tokens", asked.max_tokens)
        _check_budget("thinking_token_budget", body.thinking_token_budget)
        effort = body.reasoning_effort if asked.effort is None else asked.effort
        budget = body.thinking_token_budget if asked.max_tokens is None else asked.max_tokens
        wanted = (body.chat_template_kwargs or {}).get("enable_thinking")
        if budget == 0 or effort == "none" or asked.enabled is False or wanted is False:
            return cls(effort, False, 0, is_hidden)
        is_enabled = True if asked.enabled or asked.max_tokens or effort is not None else None
        return cls(effort, is_enabled, budget, is_hidden)


def _check_budget(name: str, budget: int | None) -> None:
    if budget is not None and budget < 0:
        raise invalid(f" must be at least 0, got {short(budget)}", where=name)
