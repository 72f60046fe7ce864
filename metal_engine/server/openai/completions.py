"""Endpoint class of ``/v1/completions``."""

from __future__ import annotations

from typing import cast

from pydantic import BaseModel

from metal_engine.request import RequestOutput, TokenLogprobs
from metal_engine.sampling_params import SamplingParams
from metal_engine.server.errors import invalid, invalid_prompt
from metal_engine.server.generation.generation import Choice, ChoiceOutput, Generation, finish_reason
from metal_engine.server.generation.logprobs import completion_logprobs, completion_logprobs_json, prompt_offsets
from metal_engine.server.generation.preparation import MAX_PROMPT_TOKENS, Endpoint
from metal_engine.server.generation.streaming import DONE, ChunkTemplate, sse
from metal_engine.server.protocol import CompletionBody
from metal_engine.server.response_bodies import Completion, CompletionChoice
from metal_engine.server.usage import Usage
from metal_engine.text.tokenizer import Tokenizer


class CompletionEndpoint(Endpoint[CompletionBody]):
    """Endpoint ``/v1/completions``. Prompts are texts or token ids. A response has unparsed text."""

    id_prefix = "cmpl"

    def __init__(self) -> None:
        # For each prompt, the slice of its tokens that the client sent. With `suffix`, other tokens surround them.
        self._places: list[slice] = []
        self._ends: tuple[int, ...] = ()
        self._templates: dict[int, ChunkTemplate] = {}
        # For each choice, the end of the last token that a chunk has reported, within the generated text.
        self._text_ends: dict[int, int] = {}

    def tokenize(self, body: CompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
        prompts = _prompts(body)
        if not prompts:
            raise invalid("prompt must not be empty", param="prompt")
        try:
            if body.suffix:
                return self._infilling(body, prompts, tokenizer)
            return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        except ValueError as error:
            raise invalid_prompt(error, "prompt") from error

    def _infilling(self, body: CompletionBody, prompts: list[str | list[int]], tokenizer: Tokenizer) -> list[list[int]]:
        """Return the token ids of infilling prompts. Each asks for the text between one of ``prompts`` and the suffix.

        Stores, for each result, the slice with the tokens of the client's prompt. Stores the tokens that end an output.

        Raises:
            APIError: status 400. The model has no tokens for infilling, the request also truncates its prompts, or the
                suffix is too long.
            ValueError: a prompt cannot be tokenized.
        """
        if tokenizer.infilling is None:
            problem = " is not supported: the model's tokenizer has no tokens for filling in the middle"
            raise invalid(problem, where="suffix", code="unsupported_parameter")
        if body.truncate_prompt_tokens is not None:
            raise invalid(" and suffix exclude each other", where="truncate_prompt_tokens")
        assert body.suffix is not None
        try:
            suffix = tokenizer.encode_within(body.suffix)
        except ValueError as error:
            raise invalid_prompt(error, "suffix") from error
        if len(prompts) * len(suffix) > MAX_PROMPT_TOKENS:
            raise invalid(
                f": its tokens times the number of prompts may be {MAX_PROMPT_TOKENS} at most", where="suffix"
            )
        made = [tokenizer.encode_infilling(prompt, suffix) for prompt in prompts]
        self._places = [place for _, place in made]
        self._ends = () if body.ignore_eos else tokenizer.infilling.ends
        return [ids for ids, _ in made]

    def adjust(self, params: SamplingParams) -> SamplingParams:
        """If the request has a suffix, add the model's end tokens of infilling to the stop tokens."""
        if not self._ends:
            return params
        return params.changed(stop_token_ids=(*params.stop_token_ids, *self._ends))

    def echoes(self, body: CompletionBody, prompts: list[list[int]], tokenizer: Tokenizer) -> list[str] | None:
        if not body.echo:
            return None
        given = _prompts(body) if body.truncate_prompt_tokens is None else prompts
        return [prompt if isinstance(prompt, str) else _text_of(prompt, body, tokenizer) for prompt in given]

    def response(self, generation: Generation) -> BaseModel:
        choices = []
        for choice in generation.choices:
            has_logprobs = generation.params.logprobs is not None
            logprobs = None
            if has_logprobs:
                tokens = self._logprob_tokens(generation, choice, choice, first=True)
                logprobs = generation.parts.add(
                    completion_logprobs_json(generation.tokenizer, *tokens, spells_ids=generation.spells_ids)
                )
            choices.append(
                CompletionChoice(
                    index=choice.index,
                    text=(choice.echo or "") + choice.text,
                    logprobs=logprobs,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    prompt_logprobs=generation.prompt_logprobs(choice),
                    prompt_token_ids=generation.token_ids(choice.prompt_token_ids),
                    token_ids=generation.token_ids(choice.token_ids),
                )
            )
        answer = _completion(generation, choices, generation.usage)
        answer.kv_transfer_params = generation.kv_handover
        return answer

    def chunk(self, generation: Generation, choice_output: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
        index, output, _ = choice_output
        choice = generation.choices[index]
        text = (choice.echo or "") + output.text if first else output.text
        shows_ids = generation.shows_token_ids
        if not text and not output.text_logprobs and not output.finished and not shows_ids:
            return b""
        has_logprobs = bool(output.text_logprobs) or (first and output.text_logprobs is not None)
        if not (output.finished or has_logprobs or usage is not None or shows_ids):
            return self._template(generation, index).fill(text)
        logprobs = None
        if has_logprobs:
            tokens = self._logprob_tokens(generation, choice, output, first)
            logprobs = completion_logprobs(generation.tokenizer, *tokens, spells_ids=generation.spells_ids)
        chunk = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason(output),
            stop_reason=output.stop_reason,
            prompt_token_ids=choice.prompt_token_ids if shows_ids and first else None,
            token_ids=output.token_ids if shows_ids else None,
        )
        return sse(_completion(generation, [chunk], usage))

    def _template(self, generation: Generation, index: int) -> ChunkTemplate:
        template = self._templates.get(index)
        if template is None:
            choice = CompletionChoice(index=index, text=ChunkTemplate.TEXT)
            template = self._templates[index] = ChunkTemplate(_completion(generation, [choice]))
        return template

    def _logprob_tokens(
        self, generation: Generation, choice: Choice, part: Choice | RequestOutput, first: bool
    ) -> tuple[list[TokenLogprobs | None], list[int], int | None]:
        """Return the arguments of :func:`completion_logprobs` for a part of a choice.

        Records where the text of ``part`` ends, because the next part begins there.

        Args:
            part: the whole choice, or one of its outputs.
            first: True if ``part`` has the choice's first tokens. If the response repeats the prompt, the prompt's
                tokens come before them.

        Returns:
            Tokens with log probabilities, the start of each token's text in characters, and the id of the prompt's
            first token. The id is None if the prompt's tokens are not included.
        """
        tokens: list[TokenLogprobs | None] = [*(part.text_logprobs or ())]
        begin = len(choice.echo or "")
        starts = [self._text_ends.get(choice.index, 0), *part.token_ends]
        self._text_ends[choice.index] = starts[-1]
        offsets = [begin + start for start in starts[: len(tokens)]]
        prompt = choice.prompt_logprobs if first and choice.echo is not None else None
        if not prompt:
            return tokens, offsets, None
        place = self._places[choice.index // generation.params.n] if self._places else slice(None)
        prompt_token_ids = choice.prompt_token_ids[place]
        skip = generation.params.skip_special_tokens
        before = prompt_offsets(generation.tokenizer, prompt_token_ids, skip_special_tokens=skip)
        return [*prompt[place], *tokens], before + offsets, choice.prompt_token_ids[0]

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        return (sse(_completion(generation, [], generation.usage)) if include_usage else b"") + DONE


def _text_of(prompt: list[int], body: CompletionBody, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens is not False)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """Return the body's prompt, which has one of four forms, as a list of texts or lists of token ids."""
    prompt = body.prompt
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return cast(list[str | list[int]], [prompt] if is_one else prompt)


def _completion(generation: Generation, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
    return Completion(**generation.head, choices=choices, usage=usage)
