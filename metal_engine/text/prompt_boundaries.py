"""Finds the places where chat prompts may diverge: after the instructions, and before the generation prompt."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import takewhile

from metal_engine.request import PreparedRequest
from metal_engine.text.chat_template import REASONING_SWITCHES
from metal_engine.text.tokenizer import Tokenizer

_VARIABLES = ({}, *({name: is_on} for name in REASONING_SWITCHES for is_on in (True, False)))


class PromptBoundaries:
    """Finder of the two places in chat prompts at which later requests often diverge from a cached prefix.

    - The end of the instructions (system message and tools): the text after it belongs to one conversation or user.
    - The start of the generation prompt: the text from there on may not recur, because templates strip reasoning from
      earlier answers.

    The places are found by the tokens that the chat template writes there.

    Args:
        tokenizer: tokenizer with the chat template. Without a template, no boundaries are found.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = {self._ending(variables) for variables in _VARIABLES}
        self._endings = sorted(found - {()}, key=len, reverse=True)
        self._turn = array("i", self._beginning_of_turn()).tobytes()

    def _ending(self, variables: dict[str, bool]) -> tuple[int, ...]:
        """Return the tokens of the generation prompt; empty if the template does not write it at the end."""
        full, bare = (self._rendered(None, "x", add_generation_prompt=asks, **variables) for asks in (True, False))
        return tuple(full[len(bare) :]) if full[: len(bare)] == bare else ()

    def _beginning_of_turn(self) -> list[int]:
        """Return the tokens between the content of a system message and the content of the user message after it."""
        one, other, third = (self._rendered(*texts) for texts in (("1", "x"), ("2", "x"), ("1", "y")))
        num_after = _num_common(one[::-1], other[::-1])
        return one[len(one) - num_after : _num_common(one, third)]

    def _rendered(self, system: str | None, user: str, **variables: bool) -> list[int]:
        messages = [{"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            return self._tokenizer.apply_chat_template(messages, **variables)
        except ValueError:  # no template, or the template refuses this conversation
            return []

    def with_boundaries(self, request: PreparedRequest) -> PreparedRequest:
        """Return a copy of the request with ``num_lasting_tokens`` and ``num_instruction_tokens``."""
        prompt = request.prompt_token_ids
        return replace(
            request,
            num_lasting_tokens=self.num_lasting_tokens(prompt),
            num_instruction_tokens=self.num_instruction_tokens(prompt),
        )

    def num_instruction_tokens(self, prompt: list[int]) -> int:
        """Return the number of prompt tokens before the content of the first user message; 0 if unknown."""
        if not self._turn:
            return 0
        tokens = array("i", prompt)
        text, at = tokens.tobytes(), -1
        while (at := text.find(self._turn, at + 1)) >= 0:
            if at % tokens.itemsize == 0:
                return (at + len(self._turn)) // tokens.itemsize
        return 0

    def num_lasting_tokens(self, prompt: list[int]) -> int:
        """Return the number of prompt tokens before the generation prompt.

        Return the number of all tokens if the prompt does not end with a known generation prompt.
        """
        endings = (len(e) for e in self._endings if len(e) < len(prompt) and tuple(prompt[-len(e) :]) == e)
        return len(prompt) - next(endings, 0)


def _num_common(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
