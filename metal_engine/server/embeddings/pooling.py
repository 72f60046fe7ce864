"""Turns prompts into vectors for all pooling endpoints.

The prompts of a request run concurrently. If one prompt fails, the request fails.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from starlette.requests import Request

from metal_engine.engine.async_engine import AsyncEngine, Reservation
from metal_engine.errors import ContextLengthError, ParameterError, PromptError
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput
from metal_engine.server.embeddings.protocol import PoolingBody
from metal_engine.server.errors import APIError, beyond_context, engine_dead, invalid, invalid_prompt
from metal_engine.server.generation.generation import failure
from metal_engine.server.generation.preparation import MAX_PROMPT_TOKENS, MAX_SEQUENCES, ServedModel
from metal_engine.server.logs import add_log_fields
from metal_engine.server.protocol import RequestModel
from metal_engine.server.workers import Weight
from metal_engine.text.tokenizer import Tokenizer

# Maximum number of prompts in one request, the same as OpenAI's.
MAX_INPUTS = MAX_SEQUENCES
# Maximum number of vector elements in a response: 16 MiB, or 22 MiB as base64.
MAX_VALUES = 1 << 22
# Number of requests to submit to the engine, in 2 ms, before other tasks of the event loop may run.
_AT_ONCE = 128

TokenizePrompts = Callable[[Tokenizer], list[list[int]]]


@dataclass(frozen=True)
class PoolingRequest:
    """Client request to a pooling endpoint.

    Attributes:
        served: model that the request names.
        num_bytes: size of the request body in bytes.
        options: options for the engine.
        cache_salt: see :attr:`PreparedRequest.cache_salt`.
    """

    served: ServedModel
    num_bytes: int
    options: RequestOptions
    cache_salt: str = ""


@dataclass(frozen=True)
class Pooled:
    """Pooling results of the prompts of one request.

    Attributes:
        request_id: id of the client's request.
        vectors: one vector for each prompt, in order, [D] float32. If the parameters have ``token_ids``, the logits of
            these D tokens.
        num_prompt_tokens: number of tokens of all prompts.
    """

    request_id: str
    vectors: list[np.ndarray]
    num_prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class PoolingTask:
    """Pooling task of one client request.

    Attributes:
        tokenize: function that returns the prompts' token ids. Runs in a thread. The client receives its ValueError as
            an error of ``field``.
        params: function that returns the pooling parameters. Runs in a thread. Its ParameterError becomes status 400.
        field: field of the body that contains the prompts.
        id_prefix: prefix of the response's id.
        max_inputs: maximum number of prompts.
        max_values: maximum number of elements of all vectors together.
    """

    tokenize: TokenizePrompts
    params: Callable[[], PoolingParams]
    field: str
    id_prefix: str
    max_inputs: int = MAX_INPUTS
    max_values: int = MAX_VALUES


async def pooling_request(served: ServedModel, request: Request, body: RequestModel) -> PoolingRequest:
    """Check the parameters of a client request, and read the options for the engine.

    A body that is not a :class:`PoolingBody`, such as Ollama's, has no options.

    Raises:
        APIError: status 400, as :meth:`ParameterPolicy.check`.
    """
    num_bytes = len(await request.body())
    await served.workers.run_if_large(num_bytes, served.parameters.check, body)
    if not isinstance(body, PoolingBody):
        return PoolingRequest(served, num_bytes, RequestOptions())
    return PoolingRequest(served, num_bytes, RequestOptions(priority=body.priority or 0), body.cache_salt or "")


async def embed(
    pooling: PoolingRequest,
    inputs: Sequence[str | list[int]],
    *,
    dimensions: int | None = None,
    truncate_prompt_tokens: int | None = None,
    field: str = "input",
    max_values: int = MAX_VALUES,
) -> Pooled:
    """Compute the vectors of texts or of lists of token ids, with the pooling method of the checkpoint.

    Args:
        inputs: texts or lists of token ids. Each gives one vector.
        dimensions: number of elements of each vector; None for the model's own number.
        truncate_prompt_tokens: see :class:`PoolingParams`.
        field: name of the body's field with the inputs, for errors.
        max_values: maximum number of elements of all vectors together.

    Raises:
        APIError, EngineDeadError: as :func:`pool`.
    """
    return await pool(
        pooling,
        PoolingTask(
            tokenize=lambda tokenizer: [tokenizer.encode(one) if isinstance(one, str) else one for one in inputs],
            params=lambda: PoolingParams(dimensions=dimensions, truncate_prompt_tokens=truncate_prompt_tokens),
            field=field,
            id_prefix="embd",
            max_values=max_values,
        ),
        num_prompts=len(inputs),
    )


async def pool(pooling: PoolingRequest, task: PoolingTask, num_prompts: int) -> Pooled:
    """Pool prompts concurrently. If one prompt fails, or the client disconnects, all unfinished prompts are aborted.

    Args:
        num_prompts: number of prompts that ``task.tokenize`` will return.

    Raises:
        APIError: status 4xx, naming the field at fault, if the prompts cannot be served; 500 if the engine fails; 503
            if the engine has stopped or too many requests wait; 504 if the prompts take too long.
        EngineDeadError: the engine has stopped.
    """
    served = pooling.served
    engine = served.engine
    served.queue_limit.check(0)  # before the expensive work
    if engine.error is not None:
        raise engine_dead(engine.error)
    if not 1 <= num_prompts <= task.max_inputs:
        raise invalid(f" must have 1 to {task.max_inputs} entries", where=task.field)
    requests = await served.workers.run(Weight.of(pooling.num_bytes), _prepared, pooling, task)
    prompt_lens = [len(request.prompt_token_ids) for request in requests]
    reservation = served.queue_limit.admit(prompt_lens)
    request_id = f"{task.id_prefix}-{uuid.uuid4().hex}"
    run = _PoolingRun(engine, request_id, requests, pooling.options, reservation, served.queue_limit.request_timeout)
    outputs = await run.outputs()
    num_tokens = sum(prompt_lens)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    add_log_fields(
        id=request_id, prompt_tokens=num_tokens, cached_tokens=num_cached, completion_tokens=0, finish_reason="stop"
    )
    return Pooled(request_id, [output.pooled for output in outputs if output.pooled is not None], num_tokens)


def _prepared(pooling: PoolingRequest, task: PoolingTask) -> list[PreparedRequest]:
    served, field = pooling.served, task.field
    engine = served.engine
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
            raise invalid(f" has {num_tokens} tokens, but the limit is {MAX_PROMPT_TOKENS}", where=field)
        _check_num_values(served, task, params, len(prompts))
        return engine.preparer.prepare_pooling(prompts, params, pooling.cache_salt, served.adapter)
    except ParameterError as error:
        if error.name == "prompt":
            raise invalid(f" {error.message}", where=field) from error
        if error.name == "model":
            raise invalid(error.message, param="model") from error
        raise invalid(f" {error.message}", where=error.name) from error
    except ContextLengthError as error:
        raise beyond_context(error, field) from error
    except PromptError as error:
        raise invalid(str(error), param=field) from error


def _check_num_values(served: ServedModel, task: PoolingTask, params: PoolingParams, num_prompts: int) -> None:
    size = params.dimensions or served.engine.config.model.hidden_size
    if not params.token_ids and num_prompts * size > task.max_values:
        raise invalid(
            f": {num_prompts} entries result in vectors of {num_prompts * size} numbers in total; the limit is "
            f"{task.max_values}. Send fewer entries, or set dimensions to a lower number",
            where=task.field,
        )


class _PoolingRun:
    """Requests in the engine that belong to one request of a client.

    Args:
        timeout: seconds after which the requests are aborted; 0 for no limit.
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
        """Return the only output of each request, in order. If a request fails, abort the others and raise its error.

        The error is an APIError, or an EngineDeadError if the engine has stopped. Releases the reservation at the end.
        """
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
