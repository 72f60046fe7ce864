"""Reads the fields of a chat request that turn reasoning on or off, limit it, or hide it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from metal_engine.errors import short
from metal_engine.server.errors import invalid
from metal_engine.server.protocol import ChatCompletionBody, ReasoningBody
from metal_engine.text.chat_template import REASONING_SWITCHES

_T = TypeVar("_T")


@dataclass(frozen=True)
class ReasoningOptions:
    """Settings of one request that control the model's reasoning.

    Attributes:
        effort: effort for the chat template; None if the request has no effort.
        is_enabled: True if the request turns reasoning on, False if it turns reasoning off, otherwise None.
        budget: maximum number of tokens of the reasoning; None for no limit.
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
        effort = _only({"reasoning.effort": asked.effort, "reasoning_effort": body.reasoning_effort})
        thinking = body.thinking
        budget = _only(
            {
                "reasoning.max_tokens": asked.max_tokens,
                "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
                "thinking_budget": body.thinking_budget,
                "thinking_token_budget": body.thinking_token_budget,
            }
        )
        variables = body.chat_template_kwargs or {}
        switches = [asked.enabled, body.enable_thinking, *(variables.get(name) for name in REASONING_SWITCHES)]
        if thinking is not None and thinking.type in ("enabled", "disabled"):
            switches.append(thinking.type == "enabled")
        if budget == 0 or effort == "none" or any(switch is False for switch in switches):
            return cls(effort, False, 0, is_hidden)
        is_enabled = True if True in switches or asked.max_tokens or effort is not None else None
        return cls(effort, is_enabled, budget, is_hidden)


def _only(given: Mapping[str, _T | None]) -> _T | None:
    """Return the value of the only field that is set; None if no field is set.

    Args:
        given: names and values of fields with the same meaning.

    Raises:
        APIError: status 400, if several fields have a value, or the value is a negative number.
    """
    present = {name: value for name, value in given.items() if value is not None}
    for name, value in present.items():
        if isinstance(value, int) and value < 0:
            raise invalid(f" must be at least 0, got {short(value)}", where=name)
    if len(present) > 1:
        first, second, *_ = present
        raise invalid(f" and {second} exclude each other", where=first)
    return next(iter(present.values()), None)
