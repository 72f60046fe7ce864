"""From a request body to a generation: what all generating endpoints check, and what sets one apart."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.chat_answers import AnswerReader
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.request import RequestOptions
from metal_engine.sampling_params import SamplingParams
from metal_engine.server.errors import APIError, engine_dead, invalid, model_not_found
from metal_engine.server.generation.admission import Admission
from metal_engine.server.generation.generation import Arrived, Generation
from metal_engine.server.generation.parameters import ParameterPolicy
from metal_engine.server.generation.sampling import parameter_error, sampling_params
from metal_engine.server.openai.protocol import GenerationBody, KVTransferParams, Usage

# Sequences of one request; each takes memory before it runs.
MAX_SEQUENCES = 2048

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True)
class ServedModel:
    """The engine as the API presents it: under these names, with this policy about parameters."""

    engine: AsyncEngine
    names: tuple[str, ...]
    parameters: ParameterPolicy
    answer_format: AnswerFormat
    admission: Admission
    auto_tool_choice: bool = True

    def check_model(self, model: str | None) -> None:
        """Raises APIError, a 404, for a model that is not this one."""
        if model is not None and model not in self.names:
            raise model_not_found(model)


class Endpoint(Protocol[BodyT]):
    """What sets a generating endpoint apart from the others."""

    id_prefix: str

    def tokenize(self, body: BodyT, tokenizer: Tokenizer) -> list[list[int]]:
        """The prompts' token ids; runs in a thread. Raises APIError for a body that cannot be a prompt."""
        ...

    def echoes(self, body: BodyT, prompts: list[list[int]], tokenizer: Tokenizer) -> list[str] | None:
        """Each prompt's text, if the answer is to begin with it; runs in a thread."""
        ...

    def adjust(self, body: BodyT) -> BodyT:
        """The body with what its prompt asks of sampling; the same one if that is nothing. After :meth:`tokenize`."""
        ...

    def reader(self) -> AnswerReader | None:
        """A reader for one choice's answer; None if answers are plain text. After :meth:`tokenize`."""
        ...

    def response(self, generation: Generation) -> BaseModel:
        """The answer to a request that does not stream, once the generation is complete."""
        ...

    def begin(self, generation: Generation) -> bytes:
        """What a stream begins with, before there is any output."""
        ...

    def chunk(self, generation: Generation, arrived: Arrived, first: bool, usage: Usage | None) -> bytes:
        """The events of one output in a stream.

        Args:
            first: it is the first of its choice.
            usage: to be told with it, if the client asked for that.
        """
        ...

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        """What a stream ends with when all has gone well."""
        ...

    def error(self, generation: Generation, error: APIError) -> bytes:
        """What a stream ends with otherwise."""
        ...


async def prepare(served: ServedModel, endpoint: Endpoint[BodyT], body: BodyT) -> Generation:
    """Validate a request and make a generation of it; nothing reaches the engine's queue yet.

    Raises:
        APIError: the request cannot be served; 4xx with the field at fault, or 503 if the engine has ended.
    """
    engine = served.engine
    served.check_model(body.model)
    served.admission.check(0)  # before any work on it
    served.parameters.check(body)
    params = sampling_params(body, engine.config.model.default_sampling)
    if engine.error is not None:
        raise engine_dead(engine.error)
    # Each can take long, for a long prompt or a large grammar, and the event loop serves everybody.
    prompts, echoes, params = await asyncio.to_thread(_prepared, engine, endpoint, body, params)
    for prompt in prompts:
        _check_prompt(engine, prompt, params, body)
    reservation = served.admission.admit([len(prompt) for prompt in prompts for _ in range(params.n)])
    return Generation(
        engine,
        reservation,
        request_id=f"{endpoint.id_prefix}-{uuid.uuid4().hex}",
        model=served.names[0],
        prompts=prompts,
        params=params,
        options=_options(body),
        timeout=served.admission.request_timeout,
        echoes=echoes,
        is_echo_only=echoes is not None and body.max_tokens == 0,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        reader=endpoint.reader,
    )


def _options(body: GenerationBody) -> RequestOptions:
    transfer = body.kv_transfer_params or KVTransferParams()
    return RequestOptions(
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        do_remote_prefill=transfer.do_remote_prefill,
        do_remote_decode=transfer.do_remote_decode,
    )


def _prepared(
    engine: AsyncEngine, endpoint: Endpoint[BodyT], body: BodyT, params: SamplingParams
) -> tuple[list[list[int]], list[str] | None, SamplingParams]:
    """The prompts, their texts if they are wanted back, and the parameters in the model's tokens; in a thread."""
    tokenizer = engine.tokenizer
    if body.truncate_prompt_tokens is None:
        tokenizer = tokenizer.limited(engine.config.scheduler.max_model_len)
    whole = endpoint.tokenize(body, tokenizer)
    adjusted = endpoint.adjust(body)
    if adjusted is not body:
        params = sampling_params(adjusted, engine.config.model.default_sampling)
    if len(whole) * params.n > MAX_SEQUENCES:
        raise invalid(f"n times the number of prompts may be {MAX_SEQUENCES} at most", param="n")
    try:
        params = engine.resolve(params)
        prompts = [engine.core.truncate(prompt, params) for prompt in whole]
    except ValueError as error:
        raise parameter_error(error, body, adjusted) from error
    for prompt in prompts:
        _check_token_ids(engine, prompt, body)
    return prompts, endpoint.echoes(body, prompts, engine.tokenizer), params


def _prompt_field(body: GenerationBody) -> str:
    return "messages" if "messages" in type(body).model_fields else "prompt"


def _check_token_ids(engine: AsyncEngine, prompt: list[int], body: GenerationBody) -> None:
    name = _prompt_field(body)
    try:
        engine.core.check_prompt(prompt)
    except ValueError as error:
        vocab_size = engine.config.model.vocab_size
        raise invalid(f"{name} has token ids outside the vocabulary of {vocab_size}", param=name) from error


def _check_prompt(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams, body: GenerationBody
) -> None:
    field_name = _prompt_field(body)
    try:
        engine.check_request(len(prompt), params)
    except ValueError as error:
        if str(error).startswith("min_tokens"):
            raise parameter_error(error, body) from error
        max_model_len = engine.config.scheduler.max_model_len
        prompt_too_long = len(prompt) >= max_model_len
        too_long = prompt_too_long or len(prompt) + (params.max_tokens or 1) > max_model_len
        raise invalid(
            str(error),
            param=body.max_tokens_field if too_long and not prompt_too_long else field_name,
            code="context_length_exceeded" if too_long else None,
        ) from error
