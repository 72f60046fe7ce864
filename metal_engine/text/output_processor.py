"""Converts token ids to the text that the client receives: incremental decoding and stop strings."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest

from metal_engine.request import Request, RequestOutput, TokenLogprobs, client_id
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import PromptLogprobs
from metal_engine.text.tokenizer import Detokenizer, Tokenizer


@dataclass(eq=False, slots=True)
class _Node:
    """Node of an Aho-Corasick automaton: a prefix of one or more stop strings.

    Attributes:
        depth: length of the prefix.
        longer: prefixes that are one character longer, keyed by their last character.
        shorter: longest proper suffix of this prefix that is also a prefix of a stop string; None for the root.
        stop: longest stop string that this prefix ends with, if there is one.
    """

    depth: int
    longer: dict[str, _Node] = field(default_factory=dict)
    shorter: _Node | None = None
    stop: str | None = None

    def after(self, ch: str) -> _Node:
        """Return the longest prefix that the text ends with after ``ch`` is appended."""
        node = self
        while ch not in node.longer:
            if node.shorter is None:
                return node
            node = node.shorter
        return node.longer[ch]


@lru_cache(maxsize=4)  # all outputs of a request share an automaton, which takes up to 5 MiB
def _automaton(stops: tuple[str, ...]) -> _Node:
    """Return the root of an Aho-Corasick automaton.

    Time and memory are linear in the characters of the stop strings.
    """
    root = _Node(0)
    for stop in stops:
        node = root
        for ch in stop:
            node = node.longer.setdefault(ch, _Node(node.depth + 1))
        node.stop = stop
    nodes = list(root.longer.values())
    for node in nodes:
        node.shorter = root
    for node in nodes:  # shorter prefixes first: the loop appends the longer prefixes
        for ch, longer in node.longer.items():
            assert node.shorter is not None
            longer.shorter = node.shorter.after(ch)
            longer.stop = longer.stop or longer.shorter.stop
            nodes.append(longer)
    return root


class StopStrings:
    """Finds stop strings in text that arrives in pieces. Holds back text that may be the start of a stop string.

    Each character costs constant time, regardless of the number and length of the stop strings.

    Args:
        stop: stop strings.
        include: True if the text shown includes the stop string.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        self._node = _automaton(stop) if stop else None
        self._include = include
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Append new text. Return the text that may be shown, and the stop string if one is complete.

        The stop string that is complete first wins. Among stop strings that end at the same character, the longest
        wins. The result therefore does not depend on the pieces of the text. The text shown ends before the stop
        string, unless ``include`` is set.
        """
        node = self._node
        if node is None:
            return text, None
        if not node.depth and node.longer.keys().isdisjoint(text):  # fast path: no stop string starts in this text
            return text, None
        for i, ch in enumerate(text):
            node = node.after(ch)
            if node.stop is not None:
                shown = self._held + text[: i + 1]
                self._held = ""
                return shown if self._include else shown[: -len(node.stop)], node.stop
        self._node = node
        text = self._held + text
        end = len(text) - node.depth
        self._held = text[end:]
        return text[:end], None

    def flush(self) -> str:
        """Return the text that was held back. Call it after the last piece of text."""
        held, self._held = self._held, ""
        return held


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
        include = params.include_stop_str_in_output
        self._states[request.request_id] = _OutputState(
            params=params,
            detokenizer=self._tokenizer.detokenizer(request.token_ids, params.skip_special_tokens),
            stop_strings=StopStrings(params.stop, include=include) if params.stop else None,
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
            if stop_strings is not None and state.num_output_tokens + i >= params.min_tokens:
                text, found = stop_strings.add(text)
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


def under_client_ids(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Replace the internal request ids of the outputs by the client's ids. Returns the same outputs."""
    for output in outputs:
        output.request_id = client_id(output.request_id)
    return outputs
