"""Routes of OpenAI's responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from metal_engine.server.errors import invalid, renaming
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.response_runner import EVENTS, PreparationErrors, ResponseRunner
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.openai import responses_protocol
from metal_engine.server.openai.background import BackgroundResponses
from metal_engine.server.openai.background_metrics import BackgroundMetrics
from metal_engine.server.openai.input_items import InputItemList, page
from metal_engine.server.openai.response_state import ResponseState
from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.server.openai.responses import ResponsesEndpoint, read_request, responses_error
from metal_engine.server.status.metrics import ServerMetrics

_PREPARATION_ERRORS = PreparationErrors(responses_error, responses_protocol.RENAMED)
_MAX_ITEMS_PER_PAGE = 100


def add_response_routes(
    app: FastAPI,
    models: ModelProvider,
    runner: ResponseRunner,
    store: ResponseStore,
    lifecycle: Lifecycle,
    metrics: ServerMetrics,
) -> None:
    background = BackgroundResponses(models, store)
    metrics.add(BackgroundMetrics(models, background, store))
    lifecycle.at_drain.append(background.cancel_unread)
    lifecycle.at_end.append(background.cancel_all)

    @app.post("/v1/responses", tags=["responses"], response_model=responses_protocol.Response, responses=EVENTS)
    async def create_response(body: responses_protocol.ResponsesBody, request: Request) -> Response:
        with renaming(responses_protocol.RENAMED):
            earlier = store.conversation(body.previous_response_id)
            num_earlier = store.num_characters(body.previous_response_id or "")
            num_bytes = len(await request.body()) + num_earlier
            chat, asked = await models.workers.run_if_large(num_bytes, read_request, body, earlier, num_earlier)
            if asked.in_background:
                started, log = await background.start(request, chat, asked)
                if asked.is_streamed:
                    return runner.stream(log.read(), started.id)
                return JSONResponse(started.response.model_dump())
            state = ResponseState(asked, body.model or "")

            def endpoint(served: ServedModel) -> ResponsesEndpoint:
                return ResponsesEndpoint(served, store, state)

            return await runner.run(
                request, ResponsesEndpoint, endpoint, chat, _PREPARATION_ERRORS, request_id=state.id
            )

    @app.get(
        "/v1/responses/{response_id}", tags=["responses"], response_model=responses_protocol.Response, responses=EVENTS
    )
    async def get_response(
        response_id: str, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
    ) -> Response:
        if not stream:
            if starting_after is not None:
                raise invalid(" is only allowed when stream is true", where="starting_after")
            return JSONResponse(store.get(response_id).response.model_dump())
        log = background.log(response_id)
        after = -1 if starting_after is None else starting_after
        log.check(after)

        async def events() -> AsyncGenerator[bytes, None]:
            with lifecycle.in_flight():  # a shutdown waits for the end of the response
                async with aclosing(log.read(after)) as read:
                    async for data in read:
                        yield data

        return runner.stream(events(), response_id)

    @app.delete("/v1/responses/{response_id}", tags=["responses"])
    async def delete_response(response_id: str) -> responses_protocol.DeletedResponse:
        await background.delete(response_id)
        return responses_protocol.DeletedResponse(id=response_id)

    @app.post("/v1/responses/{response_id}/cancel", tags=["responses"], response_model=responses_protocol.Response)
    async def cancel_response(response_id: str) -> Response:
        return JSONResponse((await background.cancel(response_id)).response.model_dump())

    @app.get("/v1/responses/{response_id}/input_items", tags=["responses"])
    async def list_input_items(
        response_id: str,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_ITEMS_PER_PAGE)] = 20,
    ) -> InputItemList:
        return page(store.get(response_id).asked.items, order, after, limit)
