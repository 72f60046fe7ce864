"""A prepared request to its answer: one body, or a stream of events."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from metal_engine.server.generation.preparation import BodyT, Endpoint, ServedModel, prepare
from metal_engine.server.generation.streaming import EventStreamResponse, cancel_on_disconnect, stream_events
from metal_engine.settings.args import ServerArgs

# nginx's status for a client that left; nobody receives it, but access logs show it.
CLIENT_CLOSED_REQUEST = 499

# What a route that may stream says of its answer.
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


class Answerer:
    """Runs a request to its answer: one body, or a stream of events."""

    def __init__(self, served: ServedModel, args: ServerArgs) -> None:
        self._served = served
        self._args = args

    async def __call__(self, endpoint: Endpoint[BodyT], body: BodyT, request: Request) -> Response:
        generation = await prepare(self._served, endpoint, body)
        if body.stream:
            events = stream_events(generation, endpoint, body.include_usage, body.continuous_usage)
            return EventStreamResponse(events, keep_alive=self._args.sse_keep_alive)
        try:
            await cancel_on_disconnect(request.receive, generation.finish())
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(endpoint.response(generation).model_dump_json(), media_type="application/json")
