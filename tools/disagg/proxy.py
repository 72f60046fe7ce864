"""One OpenAI-compatible endpoint over two servers: one prefills, the other decodes, and KV is passed between them.

    python -m tools.disagg.proxy --prefill http://mac-1:8000 --decode http://mac-2:8000 --port 9000

Both servers get every request at the same time. The prefill server generates one token and saves the prompt's KV chunk
by chunk (``do_remote_decode``). The decode server loads the chunks as they appear (``do_remote_prefill``) and computes
the rest. Its response is passed to the client. If the prefill server fails, the decode server computes the whole
prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

logger = logging.getLogger("disagg_proxy")

_HOP_BY_HOP = ("connection", "content-length", "transfer-encoding", "keep-alive")
_FORWARDED = ("authorization", "content-type")
# Fields that are useless or harmful for generating one token.
_NOT_FOR_PREFILL = ("stream", "stream_options", "min_tokens", "n", "best_of")
_LIMITS = ("max_tokens", "max_completion_tokens")
# Interval of checks for a disconnected client before the response begins.
_LOOK_SECONDS = 0.2


def create_app(prefill_url: str, decode_url: str) -> FastAPI:
    """Return the proxy for two servers, each given as ``http://host:port``."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # A request can take arbitrarily long, so only connecting has a time limit. Proxies of the environment are
        # ignored, because the servers are nearby.
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0), trust_env=False) as client:
            app.state.client = client
            yield

    app = FastAPI(title="metal-engine: disaggregated prefill", lifespan=lifespan)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        client: httpx.AsyncClient = request.app.state.client
        headers = {key: value for key, value in request.headers.items() if key in _FORWARDED}
        try:
            body = await request.json()
            assert isinstance(body, dict)
        except (ValueError, AssertionError):
            return _error(400, "the body must be a JSON object")
        path = request.url.path
        exchange = _Exchange(client, prefill_url + path, decode_url + path, headers, body)
        task = asyncio.create_task(exchange.run())
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
                if await request.is_disconnected():
                    return _error(499, "the client has disconnected")
            return task.result()
        except httpx.HTTPError as error:
            return _error(502, f"the decode server does not respond: {type(error).__name__}: {error}")
        finally:
            if not task.done():
                await _cancel(task)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        headers = {key: value for key, value in request.headers.items() if key in _FORWARDED}
        try:
            answer = await request.app.state.client.get(decode_url + "/v1/models", headers=headers)
        except httpx.HTTPError as error:
            return _error(502, f"the decode server does not respond: {type(error).__name__}: {error}")
        return Response(answer.content, answer.status_code, media_type="application/json")

    @app.get("/health")
    async def health(request: Request) -> JSONResponse:
        """Return each server's /health response. The status is the decode server's, because that server can run alone.

        The status is 503 if the decode server does not respond.
        """
        status, body = 503, {}
        for name, url in (("prefill", prefill_url), ("decode", decode_url)):
            try:
                answer = await request.app.state.client.get(url + "/health")
                status, body[name] = answer.status_code, answer.json()
            except (httpx.HTTPError, ValueError) as error:
                status, body[name] = 503, {"status": "error", "error": repr(error)}
        return JSONResponse(body, status)

    return app


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the client's body, changed for the prefill server: one token, no stream, and the prompt's KV is saved."""
    prefill = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    limits = [key for key in _LIMITS if key in prefill] or ["max_tokens"]
    return prefill | dict.fromkeys(limits, 1) | {"kv_transfer_params": {"do_remote_decode": True}}


class EndingResponse(StreamingResponse):
    """Response that awaits a function after the last chunk, or when the client disconnects.

    A ``finally`` in the generator of the chunks would not run if the client disconnects before the first chunk.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        status_code: int,
        headers: dict[str, str],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(chunks, status_code, headers)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()


class _Exchange:
    """One request of a client, which is sent to both servers."""

    def __init__(
        self, client: httpx.AsyncClient, prefill: str, decode: str, headers: dict[str, str], body: dict
    ) -> None:
        self._client = client
        self._prefill_url, self._decode_url = prefill, decode
        self._headers, self._body = headers, body

    async def run(self) -> Response:
        prefill = asyncio.create_task(self._prefill())
        decode = asyncio.create_task(self._decode({"do_remote_prefill": True}))
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and not prefill.result() and not decode.done():
                # No server computes the KV that the decode server waits for. Request again without KV transfer.
                await _cancel(decode)
                decode = asyncio.create_task(self._decode({}))
            answer, chunks, first = await decode
        except BaseException:
            await _cancel(prefill)
            await _cancel(decode)
            raise
        headers = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP_BY_HOP}

        async def pass_through() -> AsyncIterator[bytes]:
            yield first
            async for chunk in chunks:
                yield chunk

        async def end() -> None:
            await answer.aclose()
            await _cancel(prefill)

        return EndingResponse(pass_through(), answer.status_code, headers, end)

    async def _prefill(self) -> bool:
        """Send the request to the prefill server. Return True if it has computed the prompt.

        If it fails or does not respond, logs a warning and returns False.
        """
        try:
            answer = await self._client.post(self._prefill_url, json=prefill_body(self._body), headers=self._headers)
        except httpx.HTTPError as error:
            logger.warning("the prefill server does not respond: %s: %s", type(error).__name__, error)
            return False
        if answer.is_error:
            logger.warning("the prefill server responds with %d: %s", answer.status_code, answer.text[:500])
        return not answer.is_error

    async def _decode(self, transfer: dict[str, bool]) -> tuple[httpx.Response, AsyncIterator[bytes], bytes]:
        """Send the request to the decode server. Return the response, an iterator of later chunks and the first chunk.

        Raises:
            httpx.HTTPError: the decode server does not respond.
        """
        request = self._client.build_request(
            "POST", self._decode_url, json=self._body | {"kv_transfer_params": transfer}, headers=self._headers
        )
        answer = await self._client.send(request, stream=True)
        try:
            chunks = answer.aiter_raw()
            return answer, chunks, await anext(chunks, b"")
        except BaseException:
            await answer.aclose()
            raise


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is None and isinstance(task.result(), tuple):
        await task.result()[0].aclose()


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prefill", required=True, help="URL of the server that computes prompts' KV")
    parser.add_argument("--decode", required=True, help="URL of the server that generates")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    app = create_app(args.prefill.rstrip("/"), args.decode.rstrip("/"))
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
