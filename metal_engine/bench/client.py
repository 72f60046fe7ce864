"""Streaming client that records the arrival time of each part of a response, and checks the response."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from metal_engine.bench.args import BenchServeArgs
from metal_engine.bench.datasets import BenchRequest

# Maximum size of one line of a stream in bytes. Longer lines are errors.
_LONGEST_LINE = 16 << 20
_NO_USAGE = "no usage, so tokens cannot be counted"


@dataclass
class RequestRecord:
    """Result of a request. Times are seconds of ``time.perf_counter``.

    Attributes:
        started: time when the request was sent.
        ended: time when the response was complete or had failed.
        token_times: arrival times of events with text, which may have several tokens each. For an embedding, the
            arrival time of the vector.
        prompt_len: number of prompt tokens in the server's ``usage``.
        cached_len: number of cached tokens among the prompt tokens; 0 if the server does not report it.
        image_len: number of image tokens among the prompt tokens; 0 if the server does not report it.
        output_len: number of output tokens in the server's ``usage``.
        asked_len: requested number of output tokens; 0 for an embedding.
        finish_reason: last ``finish_reason`` in the response; empty if there is none.
        error: reason of a failure; empty for a response as requested.
    """

    started: float = 0.0
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    prompt_len: int = 0
    cached_len: int = 0
    image_len: int = 0
    output_len: int = 0
    asked_len: int = 0
    finish_reason: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to its first text."""
        return self.token_times[0] - self.started

    @property
    def latency(self) -> float:
        """Seconds from sending the request to its last text, or to the vector."""
        return self.token_times[-1] - self.started

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is only one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive events with text."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


class Rejected(Exception):
    """Raised if a response is not as requested. The message has the reason."""


class BenchClient:
    """Sends requests to one server. Use it as an async context manager: sending needs its session."""

    def __init__(self, args: BenchServeArgs, model: str) -> None:
        self._args = args
        self._model = model
        self._extra = json.loads(args.extra_body) if args.extra_body else {}

    async def __aenter__(self) -> BenchClient:
        self._session = open_session(self._args)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, request: BenchRequest) -> RequestRecord:
        """Send one request, wait for its end, and return its record. A failure is recorded in ``error``, not raised."""
        record = RequestRecord(asked_len=request.output_len)
        record.started = time.perf_counter()
        try:
            if self._args.endpoint == "embeddings":
                await self._embed(request, record)
            else:
                await self._stream(request, record)
                self._check(request, record)
            self._check_prompt(request, record)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, Rejected) as error:
            kind = "" if isinstance(error, Rejected) else f"{type(error).__name__}: "
            record.error = f"{kind}{error}"
        record.ended = time.perf_counter()
        return record

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_len,
            "temperature": self._args.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._args.ignore_eos:
            body["ignore_eos"] = True
        if self._args.endpoint == "chat":
            body["messages"] = request.chat_messages
        else:
            body["prompt"] = request.prompt
        return {**body, **self._extra}

    async def _embed(self, request: BenchRequest, record: RequestRecord) -> None:
        record.asked_len = 0
        body = {"model": self._model, "input": request.prompt, "encoding_format": "base64", **self._extra}
        url = self._args.base_url.rstrip("/") + "/v1/embeddings"
        async with self._session.post(url, json=body) as response:
            if response.status != 200:
                raise Rejected(f"status {response.status}: {' '.join((await response.text()).split())[:500]}")
            data = await response.read()
            record.token_times.append(time.perf_counter())
        try:
            answer = json.loads(data)
            vectors = [entry["embedding"] for entry in answer["data"]]
            record.prompt_len = answer["usage"]["prompt_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise Rejected(f"an answer that is not OpenAI's JSON: {error!r}: {data[:200]!r}") from error
        if len(vectors) != 1 or not vectors[0]:
            raise Rejected(f"{len(vectors)} vectors, or an empty one, for one input")

    async def _stream(self, request: BenchRequest, record: RequestRecord) -> None:
        path = "/v1/chat/completions" if self._args.endpoint == "chat" else "/v1/completions"
        url = self._args.base_url.rstrip("/") + path
        async with self._session.post(url, json=self._body(request)) as response:
            if response.status != 200:
                raise Rejected(f"status {response.status}: {' '.join((await response.text()).split())[:500]}")
            done = False
            async for line in response.content:
                now = time.perf_counter()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip().decode("utf-8")
                if data == "[DONE]":
                    done = True
                    continue
                try:
                    self._note(json.loads(data), now, record)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise Rejected(f"an event that is not OpenAI's JSON: {error!r}: {data[:200]}") from error
            if not done:
                raise Rejected("the stream ended without [DONE]")

    def _note(self, event: dict[str, Any], now: float, record: RequestRecord) -> None:
        if event.get("error"):
            raise Rejected(f"error in the stream: {event['error']}")
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            # Reasoning has its own field, with one of two names.
            text = text or delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text:
                record.token_times.append(now)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        if usage := event.get("usage"):
            record.prompt_len = usage["prompt_tokens"]
            record.output_len = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.cached_len = details.get("cached_tokens") or 0
            record.image_len = details.get("image_tokens") or 0

    def _check(self, request: BenchRequest, record: RequestRecord) -> None:
        if not record.output_len:
            raise Rejected(_NO_USAGE)
        if not record.token_times:
            raise Rejected("no text")
        if not record.finish_reason:
            raise Rejected("no finish_reason")
        wrong = record.output_len != request.output_len if self._args.ignore_eos else False
        if wrong or record.output_len > request.output_len:
            raise Rejected(f"{record.output_len} tokens, but {request.output_len} were requested")

    def _check_prompt(self, request: BenchRequest, record: RequestRecord) -> None:
        if not record.prompt_len:
            raise Rejected(_NO_USAGE)
        if request.prompt_len is not None and record.prompt_len < request.prompt_len:
            raise Rejected(f"{record.prompt_len} prompt tokens were read, but {request.prompt_len} were sent")


def open_session(args: BenchServeArgs) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=args.request_timeout),
        read_bufsize=_LONGEST_LINE,
    )
