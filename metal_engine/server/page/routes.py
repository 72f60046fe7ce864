"""Routes of the web page at ``/``, its files, and the stream that its live view reads."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from metal_engine import __version__
from metal_engine.server.errors import APIError
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.generation.streaming import EventStreamResponse
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.page.files import INDEX, PREFIX, load_files, wants_html
from metal_engine.server.page.viewers import ViewerRegistry
from metal_engine.server.status.pages import LINKS
from metal_engine.server.status.routes import get_and_head

# Path of the stream. The number of its clients is limited, so pages of other origins may not read it.
WATCH = "/watch"
# Maximum of `seconds`: one day.
_MAX_SECONDS = 86_400.0


def add_page(app: FastAPI, models: ModelProvider, lifecycle: Lifecycle, keep_alive: float) -> None:
    """Add the page at ``/``, its files below ``/page/``, and ``/watch``. The end of ``lifecycle`` ends the streams.

    Args:
        keep_alive: seconds without events after which a stream gets a comment; 0 for no comments.
    """
    files = load_files()
    viewer_registry = app.state.viewer_registry = ViewerRegistry(models)
    lifecycle.at_end.append(viewer_registry.close)

    @get_and_head(app, "/", include_in_schema=False)
    async def root(request: Request) -> Response:
        if wants_html(request.headers):
            return files[INDEX].response(request.headers.get("if-none-match", ""))
        return JSONResponse({"name": "metal-engine", "version": __version__, "models": models.names, "links": LINKS})

    @get_and_head(app, PREFIX + "{name:path}", include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        if name not in files or name == INDEX:
            raise APIError(404, "Not Found")
        return files[name].response(request.headers.get("if-none-match", ""))

    # hidden from the schema, since tools that test schemas would wait forever for the end of the stream
    @app.get(WATCH, include_in_schema=False)
    async def watch(
        request: Request, seconds: Annotated[float | None, Query(ge=0, le=_MAX_SECONDS)] = None
    ) -> Response:
        viewers = viewer_registry.of(request.query_params.get("model"))
        viewers.check_capacity()
        return EventStreamResponse(viewers.events(seconds), keep_alive=keep_alive)
