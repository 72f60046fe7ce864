"""Converts token ids to the text that the client receives: incremental decoding and stop strings."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest

from metal_engine.request import Request, RequestOutput, TokenLogprobs, client_id
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import PromptLogprobs
from metal_engine.text.stop_strings import StopStrings, StopStringsOutsideReasoning
from metal_engine.text.tokenizer import Detokenizer, Tokenizer


@dataclass(eq=False, slots=True)
class _OutputState:
    """State of one request's text.

    Attributes:
        params: sampling parameters of the request.
        detokenizer: decoder of the request's tokens.
        stop_strings: finder of stop strings; None if there are none, so that no text is held back.
        prompt_logprobs: log probabilities of the prompt that were not returned yet; None if not requested.
        num_prompt_tokens: number of prompt tokens.
        num_output_tokens: number of output tokens so far.
        num_predicted_tokens: numbers of accepted and rejected predicted tokens, from the previous output.
        text_end: number of characters of text so far.
        num_shown: number of characters that have been shown.
        held: tokens whose text may belong to a stop string: start and end of the token's text in the request's text,
            and the token's log probabilities if requested.
    """

    params: SamplingParams
    detokenizer: Detokenizer
    stop_strings: StopStrings | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_predicted_tokens: tuple[int, int] = (0, 0)
    text_end: int = 0
    num_shown: int = 0
    held: deque[tuple[int, int, TokenLogprobs | None]] = field(default_factory=deque)

    def release(self, *, is_last: bool) -> tuple[list[int], list[TokenLogprobs]]:
        """Return ``token_ends`` and ``text_logprobs`` of the tokens that are no longer held, and remove these tokens.

        Args:
            is_last: True if no more text will be shown. All tokens are released then.
        """
        token_ends: list[int] = []
        text_logprobs: list[TokenLogprobs] = []
        while self.held and (is_last or self.held[0][1] <= self.num_shown):
            begin, end, logprobs = self.held.popleft()
            token_ends.append(min(end, self.num_shown))
            if logprobs is not None and (begin < self.num_shown or end <= self.num_shown):
                text_logprobs.append(logprobs)
        return token_ends, text_logprobs


class OutputProcessor:
    """Fills in the text of each step's :class:`RequestOutput` objects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _OutputState] = {}

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        self._states[request.request_id] = _OutputState(
            params=params,
            detokenizer=self._tokenizer.detokenizer(request.token_ids, params.skip_special_tokens),
            stop_strings=_stop_strings(params),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            num_prompt_tokens=request.num_prompt_tokens,
        )

    def remove_request(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def add_prompt_logprobs(self, request_id: str, part: PromptLogprobs) -> None:
        """Append log probabilities of a part of a prompt. If a part is computed again, the first values are kept."""
        state = self._states.get(request_id)
        if state is not None and state.prompt_logprobs is not None:
            state.prompt_logprobs += part.tokens[len(state.prompt_logprobs) - part.start :]

    def process(self, output: RequestOutput) -> RequestOutput:
        """Fill in the text of one request's new tokens, and the counts. Returns the same output.

        The request's state is deleted when the output finishes the request. If a stop string is found here, the caller
        must end the request.
        """
        state = self._states[output.request_id]
        params, stop_strings = state.params, state.stop_strings
        begin = text_end = state.text_end
        shown = ""
        token_ends: list[int] = []
        found: str | None = None
        # The text excludes the token that stopped generation (EOS or a stop token), unless the request includes it.
        is_hidden = output.finish_reason == "stop" and not params.include_stop_str_in_output
        visible = output.token_ids[:-1] if is_hidden else output.token_ids
        for i, token_id in enumerate(visible):
            text = state.detokenizer.add(token_id)
            text_end += len(text)
            token_ends.append(text_end)
            if stop_strings is not None:
                text, found = stop_strings.add(text, is_active=state.num_output_tokens + i >= params.min_tokens)
            shown += text
            if found is not None:
                output.finish_reason, output.stop_reason = "stop", found
                # The tokens after the stop string would not exist without drafts: the last one is sampled, the others
                # are drafts.
                num_cut_drafts = max(0, len(output.token_ids) - i - 2)
                accepted, rejected = output.num_predicted_tokens
                accepted -= min(num_cut_drafts, accepted - state.num_predicted_tokens[0])
                output.num_predicted_tokens = accepted, rejected
                output.token_ids = visible[: i + 1]
                output.logprobs = None if output.logprobs is None else output.logprobs[: i + 1]
                break
        state.text_end = text_end
        state.num_output_tokens += len(output.token_ids)
        state.num_predicted_tokens = output.num_predicted_tokens
        is_last = output.finished
        text_logprobs = [] if output.logprobs is None else output.logprobs[: len(token_ends)]
        if stop_strings is not None:
            if found is None and is_last:
                shown += stop_strings.flush()
            state.num_shown += len(shown)
            if state.held or state.num_shown != text_end:
                begins = [begin, *token_ends][: len(token_ends)]
                state.held.extend(zip_longest(begins, token_ends, text_logprobs))
                token_ends, text_logprobs = state.release(is_last=is_last)
        if is_last:
            del self._states[output.request_id]
        output.text = shown
        output.token_ends = token_ends
        output.num_prompt_tokens = state.num_prompt_tokens
        output.num_output_tokens = state.num_output_tokens
        output.text_logprobs = None if params.logprobs is None else text_logprobs
        output.prompt_logprobs = state.prompt_logprobs
        state.prompt_logprobs = None
        return output


def _stop_strings(params: SamplingParams) -> StopStrings | None:
    if not params.stop:
        return None
    include = params.include_stop_str_in_output
    if params.phases is not None and params.phases.reasoning is not None:
        return StopStringsOutsideReasoning(params.stop, params.phases.reasoning, include=include)
    return StopStrings(params.stop, include=include)


def under_client_ids(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Replace the internal request ids of the outputs by the client's ids. Returns the same outputs."""
    for output in outputs:
        output.request_id = client_id(output.request_id)
    return outputs
