"""A prepared request to its answer: one body, or a stream of events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from metal_engine.server.errors import APIError, to_api_error
from metal_engine.server.generation.generation import Generation
from metal_engine.server.generation.preparation import BodyT, Endpoint, ServedModel, prepare
from metal_engine.server.generation.streaming import EventStreamResponse
from metal_engine.server.workers import Weight

logger = logging.getLogger(__name__)

# The header of a stream that has its answer's id, which clients otherwise hear with the first token.
GENERATION_ID = "x-generation-id"
# What a route that may stream says of its answer.
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


@dataclass(frozen=True)
class Answerer:
    """Runs a request to its answer: one body, or a stream of events."""

    served: ServedModel
    sse_keep_alive: float

    async def __call__(self, endpoint: Endpoint[BodyT], body: BodyT, num_bytes: int) -> Response:
        """The response to a request whose prompt was made of so many bytes."""
        generation = await prepare(self.served, endpoint, body, num_bytes)
        if body.stream:
            events, kind = _events(generation, endpoint, body), endpoint.stream_media_type
            response = EventStreamResponse(events, keep_alive=self.sse_keep_alive, media_type=kind)
            response.headers[GENERATION_ID] = generation.request_id
            return response
        await generation.finish()
        if generation.is_long:
            data = await self.served.workers.run(Weight.HEAVY, _encoded, endpoint, generation)
        else:
            data = _encoded(endpoint, generation)
        return Response(data, media_type="application/json")


def _encoded(endpoint: Endpoint[BodyT], generation: Generation) -> bytes:
    generation.read()
    return generation.parts.encode(endpoint.response(generation))


async def _events(generation: Generation, endpoint: Endpoint[BodyT], body: BodyT) -> AsyncGenerator[bytes, None]:
    """A generation as server-sent events, or lines: one item, so one write, for whatever came at once.

    An error becomes the last event, so that it is not taken for a normal end.
    """
    started: set[int] = set()
    continuous_usage = body.continuous_usage
    if beginning := endpoint.begin(generation):
        yield beginning
    try:
        async with aclosing(generation.outputs()) as batches:
            async for batch in batches:
                data = b""
                usage = generation.usage if continuous_usage else None
                for arrived in batch:
                    data += endpoint.chunk(generation, arrived, arrived[0] not in started, usage)
                    started.add(arrived[0])
                if data:
                    yield data
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("request %s failed", generation.request_id)
        yield endpoint.error(generation, to_api_error(error))
        return
    yield endpoint.end(generation, body.include_usage)
