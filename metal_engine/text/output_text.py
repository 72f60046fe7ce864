"""Converts an output's token ids to the text that the client receives: incremental decoding and stop strings."""

from __future__ import annotations

from collections import deque
from itertools import zip_longest

from metal_engine.request import PreparedRequest, RequestOutput, TokenLogprobs
from metal_engine.text.stop_strings import StopStrings, StopStringsOutsideReasoning
from metal_engine.text.tokenizer import Tokenizer


class OutputText:
    """Converter of one output's tokens to text. Completes the :class:`RequestOutput` objects that the engine returns.

    Args:
        prepared: request of the output.
        tokenizer: tokenizer of the model.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_num_output_tokens",
        "_num_predicted_tokens",
        "_num_prompt_tokens",
        "_num_shown",
        "_params",
        "_stop_strings",
        "_text_end",
    )

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._params = prepared.params
        self._detokenizer = tokenizer.detokenizer(prepared.prompt_token_ids, prepared.params.skip_special_tokens)
        # Finder of stop strings; None if there are none, so that no text is held back.
        self._stop_strings = _stop_strings(prepared)
        self._num_prompt_tokens = len(prepared.prompt_token_ids)
        self._num_output_tokens = 0
        # Numbers of accepted and rejected predicted tokens, from the previous output.
        self._num_predicted_tokens = (0, 0)
        self._text_end = 0  # number of characters of text so far
        self._num_shown = 0  # number of characters that have been shown
        # Tokens whose text may belong to a stop string: start and end of the token's text in the output's text, and the
        # token's log probabilities if requested.
        self._held: deque[tuple[int, int, TokenLogprobs | None]] = deque()

    @property
    def has_stop_strings(self) -> bool:
        return self._stop_strings is not None

    def add(self, output: RequestOutput) -> None:
        """Set the text fields and the token counts of ``output``, which has the new tokens.

        Sets ``text``, ``token_ends``, ``text_logprobs``, ``num_prompt_tokens`` and ``num_output_tokens``.

        If a stop string is complete, sets ``finish_reason`` and ``stop_reason``, and removes the tokens after the stop
        string. The caller must then end the request in the engine.
        """
        params, stop_strings = self._params, self._stop_strings
        begin = text_end = self._text_end
        shown = ""
        token_ends: list[int] = []
        found: str | None = None
        # The text excludes the token that stopped generation (EOS or a stop token), unless the request includes it.
        is_hidden = output.finish_reason == "stop" and not params.include_stop_str_in_output
        visible = output.token_ids[:-1] if is_hidden else output.token_ids
        for i, token_id in enumerate(visible):
            text = self._detokenizer.add(token_id)
            text_end += len(text)
            token_ends.append(text_end)
            if stop_strings is not None:
                text, found = stop_strings.add(text, is_active=self._num_output_tokens + i >= params.min_tokens)
            shown += text
            if found is not None:
                output.finish_reason, output.stop_reason = "stop", found
                # The tokens after the stop string would not exist without drafts: the last one is sampled, the others
                # are drafts.
                num_cut_drafts = max(0, len(output.token_ids) - i - 2)
                accepted, rejected = output.num_predicted_tokens
                accepted -= min(num_cut_drafts, accepted - self._num_predicted_tokens[0])
                output.num_predicted_tokens = accepted, rejected
                output.token_ids = visible[: i + 1]
                output.logprobs = None if output.logprobs is None else output.logprobs[: i + 1]
                break
        self._text_end = text_end
        self._num_output_tokens += len(output.token_ids)
        self._num_predicted_tokens = output.num_predicted_tokens
        is_last = output.finished
        text_logprobs = [] if output.logprobs is None else output.logprobs[: len(token_ends)]
        if stop_strings is not None:
            if found is None and is_last:
                shown += stop_strings.flush()
            self._num_shown += len(shown)
            if self._held or self._num_shown != text_end:
                begins = [begin, *token_ends][: len(token_ends)]
                self._held.extend(zip_longest(begins, token_ends, text_logprobs))
                token_ends, text_logprobs = self._release(is_last=is_last)
        output.text = shown
        output.token_ends = token_ends
        output.num_prompt_tokens = self._num_prompt_tokens
        output.num_output_tokens = self._num_output_tokens
        output.text_logprobs = None if params.logprobs is None else text_logprobs

    def _release(self, *, is_last: bool) -> tuple[list[int], list[TokenLogprobs]]:
        """Remove the held tokens whose text has been shown. Return their ``token_ends`` and ``text_logprobs``.

        Args:
            is_last: True if no more text will be shown. All tokens are then removed. Tokens whose text is never shown,
                such as the text of a stop string, have no entry in ``text_logprobs``.
        """
        token_ends: list[int] = []
        text_logprobs: list[TokenLogprobs] = []
        while self._held and (is_last or self._held[0][1] <= self._num_shown):
            begin, end, logprobs = self._held.popleft()
            token_ends.append(min(end, self._num_shown))
            if logprobs is not None and (begin < self._num_shown or end <= self._num_shown):
                text_logprobs.append(logprobs)
        return token_ends, text_logprobs


def _stop_strings(prepared: PreparedRequest) -> StopStrings | None:
    params, root = prepared.params, prepared.stop_automaton
    if root is None:
        return None
    include = params.include_stop_str_in_output
    if params.phases is not None and params.phases.reasoning is not None:
        is_structured = params.structured_outputs is not None
        return StopStringsOutsideReasoning(root, params.phases.reasoning, is_structured=is_structured, include=include)
    return StopStrings(root, include=include)
