"""Prompts to vectors, for every endpoint that needs some: prepared in a thread, pooled side by side, all or none."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from metal_engine.engine.async_engine import AsyncEngine, Reservation
from metal_engine.errors import ContextLengthError, ParameterError, PromptError
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput
from metal_engine.server.errors import APIError, engine_dead, invalid, invalid_prompt
from metal_engine.server.generation.generation import failure
from metal_engine.server.generation.preparation import MAX_PROMPT_TOKENS, MAX_SEQUENCES, ServedModel
from metal_engine.server.logs import note
from metal_engine.server.workers import Weight
from metal_engine.text.tokenizer import Tokenizer

# Prompts of one request; OpenAI takes as many.
MAX_INPUTS = MAX_SEQUENCES
# Numbers of all vectors of an answer: 16 MiB, and 22 as base64.
MAX_VALUES = 1 << 22
# Requests handed to the engine in one go: 2 ms.
_AT_ONCE = 128

TokenizePrompts = Callable[[Tokenizer], list[list[int]]]


@dataclass(frozen=True)
class Pooled:
    """What some prompts came to.

    Attributes:
        request_id: of them all.
        vectors: one for each prompt, in order, [D] float32; or its logits, where those were asked for.
        num_prompt_tokens: of all prompts.
    """

    request_id: str
    vectors: list[np.ndarray]
    num_prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class PoolingTask:
    """Prompts that a client wants to be pooled.

    Attributes:
        tokenize: makes the prompts' token ids; called in a thread. What it raises as ValueError is ``field``'s fault.
        params: how to pool them; made in a thread, too, because it may raise ParameterError.
        num_bytes: what the prompts are made of.
        field: the body's field that has the prompts.
        max_values: numbers of all vectors together, at most.
    """

    tokenize: TokenizePrompts
    params: Callable[[], PoolingParams]
    num_bytes: int
    field: str
    id_prefix: str
    options: RequestOptions
    max_values: int = MAX_VALUES


async def embed(
    served: ServedModel,
    inputs: Sequence[str | list[int]],
    *,
    num_bytes: int,
    dimensions: int | None = None,
    truncate_prompt_tokens: int | None = None,
    options: RequestOptions | None = None,
    field: str = "input",
    max_values: int = MAX_VALUES,
) -> Pooled:
    """Vectors of texts or of lists of token ids, as the checkpoint pools them.

    Args:
        num_bytes: of the body that they came in.
        field: the name of the inputs in it, for errors.

    Raises:
        APIError: they cannot be served; 4xx with the field at fault, or 503.
    """
    return await pool(
        served,
        PoolingTask(
            tokenize=lambda tokenizer: [tokenizer.encode(one) if isinstance(one, str) else one for one in inputs],
            params=lambda: PoolingParams(dimensions=dimensions, truncate_prompt_tokens=truncate_prompt_tokens),
            num_bytes=num_bytes,
            field=field,
            id_prefix="embd",
            options=options or RequestOptions(),
            max_values=max_values,
        ),
        num_prompts=len(inputs),
    )


async def pool(served: ServedModel, task: PoolingTask, num_prompts: int) -> Pooled:
    """Pool prompts side by side. If one fails, or the client leaves, the others are aborted.

    Raises:
        APIError: they cannot be served; 4xx with the field at fault, or 503.
    """
    engine = served.engine
    served.admission.check(0)  # before any work on it
    if engine.error is not None:
        raise engine_dead(engine.error)
    if not 1 <= num_prompts <= MAX_INPUTS:
        raise invalid(f" must have 1 to {MAX_INPUTS} entries", where=task.field)
    requests = await served.workers.run(Weight.of(task.num_bytes), _prepared, served, task)
    prompt_lens = [len(request.prompt_token_ids) for request in requests]
    reservation = served.admission.admit(prompt_lens)
    request_id = f"{task.id_prefix}-{uuid.uuid4().hex}"
    run = _Run(engine, request_id, requests, task.options, reservation, served.admission.request_timeout)
    outputs = await run.outputs()
    num_tokens = sum(prompt_lens)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    note(id=request_id, prompt_tokens=num_tokens, cached_tokens=num_cached, completion_tokens=0, finish_reason="stop")
    return Pooled(request_id, [output.pooled for output in outputs if output.pooled is not None], num_tokens)


def _prepared(served: ServedModel, task: PoolingTask) -> list[PreparedRequest]:
    engine, field = served.engine, task.field
    try:
        params = task.params()
        tokenizer = served.tokenizer_beyond_context
        if params.truncate_prompt_tokens is None:
            tokenizer = engine.tokenizer.limited(engine.config.scheduler.max_model_len)
        try:
            prompts = task.tokenize(tokenizer)
        except ParameterError:
            raise
        except ValueError as error:
            raise invalid_prompt(error, field) from error
        num_tokens = sum(map(len, prompts))
        if num_tokens > MAX_PROMPT_TOKENS:
            raise invalid(f" has {num_tokens} tokens, and may have {MAX_PROMPT_TOKENS} at most", where=field)
        _check_num_values(served, task, params, len(prompts))
        return engine.prepare_pooling(prompts, params, task.options.cache_salt, served.adapter)
    except ParameterError as error:
        if error.name == "prompt":
            raise invalid(f" {error.message}", where=field) from error
        if error.name == "model":
            raise invalid(error.message, param="model") from error
        raise invalid(f" {error.message}", where=error.name) from error
    except ContextLengthError as error:
        raise invalid(str(error), param=field, code="context_length_exceeded") from error
    except PromptError as error:
        raise invalid(str(error), param=field) from error


def _check_num_values(served: ServedModel, task: PoolingTask, params: PoolingParams, num_prompts: int) -> None:
    size = params.dimensions or served.engine.config.model.hidden_size
    if not params.token_ids and num_prompts * size > task.max_values:
        raise invalid(
            f" of {num_prompts} entries comes to vectors of {num_prompts * size} numbers, and an answer may have "
            f"{task.max_values}: send fewer at a time, or ask for fewer dimensions",
            where=task.field,
        )


class _Run:
    """Requests in the engine, of one request of a client.

    Args:
        timeout: seconds after which they are cut; 0 for never.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: str,
        requests: list[PreparedRequest],
        options: RequestOptions,
        reservation: Reservation,
        timeout: float,
    ) -> None:
        self._engine = engine
        self._ids = [f"{request_id}-{i}" for i in range(len(requests))]
        self._requests = requests
        self._options = options
        self._reservation = reservation
        self._timeout = timeout
        self._timed_out = False

    async def outputs(self) -> list[RequestOutput]:
        """Each request's only output, in order. Raises APIError if one fails; the others are aborted."""
        timer = None
        if self._timeout:
            timer = asyncio.get_running_loop().call_later(self._timeout, self._time_out)
        tasks: list[asyncio.Task[RequestOutput]] = []
        try:
            for request_id, request in zip(self._ids, self._requests, strict=True):
                tasks.append(asyncio.create_task(self._output(request_id, request)))
                if len(tasks) % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            return await asyncio.gather(*tasks)
        finally:
            if timer is not None:
                timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._reservation.release()

    async def _output(self, request_id: str, request: PreparedRequest) -> RequestOutput:
        stream = self._engine.generate(request_id, request, 0, self._options, self._reservation)
        async with aclosing(stream):
            output = await anext(stream)
        if output.pooled is None:
            raise self._failure(output)
        return output

    def _failure(self, output: RequestOutput) -> APIError:
        return failure(self._engine, output, self._timeout if self._timed_out else None)

    def _time_out(self) -> None:
        self._timed_out = True
        for request_id in self._ids:
            self._engine.cut_request(request_id, "the request took too long")
