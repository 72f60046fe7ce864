"""What a prompt ends with that no later prompt of its conversation has there."""

from __future__ import annotations

from metal_engine.engine.tokenizer import Tokenizer

_VARIABLES: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})


class GenerationPrompts:
    """The ways in which a chat template asks for an answer.

    What follows them may not come again: templates strip the reasoning from answers that have become history. So the
    place to begin with, next time, is before them.

    Args:
        tokenizer: whose template it is; one without a template has no such ways.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        found: set[tuple[int, ...]] = set()
        for variables in _VARIABLES:
            messages = [{"role": "user", "content": "x"}]
            try:
                asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
                told = tokenizer.apply_chat_template(messages, add_generation_prompt=False, **variables)
            except ValueError:  # there is no template, or none for such a conversation
                continue
            if asked[: len(told)] == told:
                found.add(tuple(asked[len(told) :]))
        self._endings = sorted(found - {()}, key=len, reverse=True)

    def length(self, prompt: list[int]) -> int:
        """Returns how many tokens at a prompt's end ask for an answer."""
        endings = (len(e) for e in self._endings if len(e) < len(prompt) and tuple(prompt[-len(e) :]) == e)
        return next(endings, 0)
