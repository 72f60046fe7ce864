"""Runs a request and creates its response: one body, or a stream of events."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from metal_engine.server.errors import APIError, renaming, to_api_error
from metal_engine.server.generation.generation import Generation
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.generation.preparation import BodyT, Endpoint, ServedModel, prepare
from metal_engine.server.generation.streaming import EVENT_STREAM, EventStreamResponse, sse
from metal_engine.server.workers import Weight

logger = logging.getLogger(__name__)

# Seconds between two comments that say that a model is being loaded.
_LOADING_SECONDS = 2.0
# Response header with the response's id. Without it, clients of a stream get the id only with the first token.
GENERATION_ID = "x-generation-id"
# OpenAPI description of the response of a route that can stream.
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


@dataclass(frozen=True)
class PreparationErrors:
    """Format of an error in a stream that has begun before its model was loaded and its request was validated.

    Attributes:
        encode: function that encodes an error as an event.
        renamed: map from a field of the body to the client's name of that field, for :func:`renaming`.
    """

    encode: Callable[[APIError], bytes]
    renamed: Mapping[str, str] = field(default_factory=dict)


OPENAI_ERRORS = PreparationErrors(lambda error: sse(error.body))


@dataclass(frozen=True)
class ResponseRunner:
    """Runs requests and creates their responses: one body, or a stream of events.

    Attributes:
        models: models of the server.
        sse_keep_alive: seconds without events after which a stream gets a comment; 0 for no comments.
    """

    models: ModelProvider
    sse_keep_alive: float

    async def run(
        self,
        request: Request,
        endpoint_class: type[Endpoint[BodyT]],
        make_endpoint: Callable[[ServedModel], Endpoint[BodyT]],
        body: BodyT,
        preparation_errors: PreparationErrors | None = OPENAI_ERRORS,
        *,
        request_id: str | None = None,
    ) -> Response:
        """Return the response to a request.

        If a stream's model is not loaded, the stream begins at once. It has comments until the model is loaded. A later
        error becomes an event. All other responses begin after the request is validated.

        Args:
            endpoint_class: class of the endpoint.
            make_endpoint: function that creates the endpoint for a model.
            preparation_errors: format of errors in streams that begin before the model is loaded. None for streams that
                are not event streams: they begin after the model is loaded.
            request_id: id of the response; None for a new one.

        Raises:
            APIError: the request cannot be served, and its stream has not begun.
            EngineDeadError: the engine has stopped.
        """
        response_id = request_id or f"{endpoint_class.id_prefix}-{uuid.uuid4().hex}"

        async def answer(served: ServedModel) -> Response:
            return await self._answer(request, served, make_endpoint(served), body, response_id)

        if body.stream and preparation_errors is not None and not self.models.is_ready(body.model):
            return self.stream(self._when_loaded(request, body.model, answer, preparation_errors), response_id)
        return await answer(await self.models.use(request, body.model))

    def stream(self, events: AsyncGenerator[bytes, None], request_id: str, media_type: str = EVENT_STREAM) -> Response:
        """Return a response that sends events as they arrive, with ``request_id`` in the header ``x-generation-id``."""
        response = EventStreamResponse(events, keep_alive=self.sse_keep_alive, media_type=media_type)
        response.headers[GENERATION_ID] = request_id
        return response

    async def _when_loaded(
        self,
        request: Request,
        name: str | None,
        answer: Callable[[ServedModel], Awaitable[Response]],
        errors: PreparationErrors,
    ) -> AsyncGenerator[bytes, None]:
        using = asyncio.ensure_future(self.models.use(request, name))
        try:
            while not using.done():
                yield b": loading %s\n\n" % json.dumps(name).encode()
                await asyncio.wait([using], timeout=_LOADING_SECONDS)
            with renaming(errors.renamed):
                response = await answer(using.result())
        except Exception as error:
            if not isinstance(error, APIError):
                logger.exception("a request whose model was loaded for it failed")
            yield errors.encode(to_api_error(error))
            return
        finally:
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)
        assert isinstance(response, EventStreamResponse)
        async with aclosing(response.events) as events:
            async for data in events:
                yield data

    async def _answer(
        self, request: Request, served: ServedModel, endpoint: Endpoint[BodyT], body: BodyT, request_id: str
    ) -> Response:
        generation = await prepare(request, served, endpoint, body, request_id)
        if body.stream:
            return self.stream(stream_events(generation, endpoint, body), request_id, endpoint.stream_media_type)
        await generation.finish()
        if generation.is_long:
            data = await served.workers.run(Weight.HEAVY, _encoded, endpoint, generation)
        else:
            data = _encoded(endpoint, generation)
        return Response(data, media_type="application/json")


def _encoded(endpoint: Endpoint[BodyT], generation: Generation) -> bytes:
    generation.read()
    return generation.parts.encode(endpoint.response(generation))


async def stream_events(generation: Generation, endpoint: Endpoint[BodyT], body: BodyT) -> AsyncGenerator[bytes, None]:
    """Yield a generation as server-sent events, or as JSON lines. Outputs that arrive together become one item, which
    is sent with one write.

    An error becomes the last event, so that clients do not take the end of the stream for a success.
    """
    started: set[int] = set()
    continuous_usage = body.continuous_usage
    if first_events := endpoint.begin(generation):
        yield first_events
    try:
        async with aclosing(generation.outputs()) as batches:
            async for batch in batches:
                events: list[bytes] = []
                usage = generation.usage if continuous_usage else None
                for choice_output in batch:
                    events.append(endpoint.chunk(generation, choice_output, choice_output[0] not in started, usage))
                    started.add(choice_output[0])
                if data := b"".join(events):
                    yield data
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("request %s failed", generation.request_id)
        yield endpoint.error(generation, to_api_error(error))
        return
    yield endpoint.end(generation, body.include_usage)
