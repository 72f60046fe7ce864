"""Sources of answers for ``metal-engine chat``: a running server, or a model loaded into this process."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, urlsplit

from metal_engine.answers.chat_answers import ChatAnswers
from metal_engine.answers.deltas import TextDelta
from metal_engine.answers.tool_plan import NO_TOOLS
from metal_engine.errors import one_line

if TYPE_CHECKING:
    from metal_engine.llm import LLM
    from metal_engine.sampling_params import SamplingParams

Message = dict[str, str]

# Seconds. A server on this machine responds at once.
_CONNECT_TIMEOUT = 2.0
# Maximum size of a list of models or an error. They are much smaller.
_MAX_BODY = 1 << 20
# Maximum number of characters of a server's message to show.
_MAX_MESSAGE = 500
# Maximum size of one stream event, which has the text of one step.
_MAX_LINE = 1 << 22


@dataclass(frozen=True, slots=True)
class Piece:
    """Next part of an answer. ``num_tokens`` is the number of the answer's tokens so far; 0 if unknown."""

    text: str
    num_tokens: int
    is_reasoning: bool = False


class AnswerError(Exception):
    """Raised if there is no answer, or if the answer ended early. The message is one line for the user."""


class ServerError(Exception):
    """Raised if a request to a server failed, or if the server does not serve the model. The message has the reason."""


class ChatBackend(Protocol):
    """Interface to a source of answers. ``name`` is its description for the user."""

    name: str

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        """Yield the answer to a conversation as it arrives. Closing the generator aborts the answer.

        Raises:
            AnswerError: there is no answer, or the answer ended early.
        """
        ...


class LocalModel:
    """Source of answers from a model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        # This import loads MLX, which must not happen before the engine has set up its BLAS.
        from metal_engine.checkpoints.answer_formats import find_answer_format

        self.name = f"{llm.config.model.name}, loaded into this process"
        self._llm = llm
        self._params = params
        self._format = find_answer_format(llm.tokenizer.hf_tokenizer, "none")

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        llm, params = self._llm, self._params
        try:
            prompt = llm.tokenizer.apply_chat_template(messages)
            answers = ChatAnswers.for_prompt(self._format, NO_TOOLS, prompt, llm.tokenizer.decode)
            if answers.needs_special_tokens:
                params = params.changed(skip_special_tokens=False)
            reader = answers.reader(incremental=True)
            with closing(llm.stream(prompt, params)) as outputs:
                for output in outputs:
                    for delta in reader.add(output.text, (), output.finish_reason):
                        if isinstance(delta, TextDelta):
                            yield Piece(delta.text, output.num_output_tokens, delta.kind == "reasoning")
                    yield Piece("", output.num_output_tokens)  # count tokens that have no visible text yet
        except (ValueError, RuntimeError) as error:
            raise AnswerError(one_line(error)) from error


class RemoteModel:
    """Source of answers from a server with OpenAI's API, which may be another program.

    Args:
        url: URL such as ``http://127.0.0.1:8000``, with or without ``/v1`` at its end.
        body: fields of every request besides its messages: the model, and given sampling parameters.
        api_key: key to send; None for no key.
    """

    def __init__(self, url: str, body: Mapping[str, Any], api_key: str | None = None) -> None:
        self.name = f"{body['model']} on {url}"
        self._url = url
        self._api_key = api_key
        self._body = {**body, "stream": True}
        self._body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        try:
            body = json.dumps({**self._body, "messages": messages})
            connection, response = _request(self._url, self._api_key, "POST", "/chat/completions", body)
            with closing(connection), closing(response):
                if response.status != 200:
                    raise AnswerError(_problem(response))
                yield from _pieces(_events(response))
        except (OSError, http.client.HTTPException) as error:
            raise AnswerError(f"{self._url} does not respond: {one_line(error)}") from error


def served_models(url: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """Return a server's entries of ``/v1/models``, each with an ``id``, in the server's order.

    Raises:
        ServerError: the server cannot be reached, rejects the key, or does not implement OpenAI's API.
    """
    try:
        connection, response = _request(url, api_key, "GET", "/models", timeout=_CONNECT_TIMEOUT)
        with closing(connection), closing(response):
            if response.status in (401, 403):
                raise ServerError(f"{url} rejects the request: {_problem(response)}")
            cards = json.loads(response.read(_MAX_BODY))["data"]
            return [{**card, "id": str(card["id"])} for card in cards]
    except ConnectionRefusedError as error:
        raise ServerError(f"no server responds at {url}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{url} does not respond: {one_line(error)}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ServerError(f"{url} does not speak OpenAI's API: its /v1/models is not a list of models") from error


def _request(
    url: str, api_key: str | None, method: str, path: str, body: str | None = None, timeout: float | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = _connection(parts)
    headers = {"Content-Type": "application/json", "Accept": "*/*"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        connection.connect()
        assert connection.sock is not None
        connection.sock.settimeout(timeout)
        # Events of a stream are small and must arrive at once.
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        base = parts.path.rstrip("/").removesuffix("/v1")
        connection.request(method, f"{base}/v1{path}", body and body.encode(), headers)
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _connection(parts: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_CONNECT_TIMEOUT)


def _problem(response: http.client.HTTPResponse) -> str:
    """Return the error message of a server's response; ``status N`` if the response has none. Reads the response."""
    text = response.read(_MAX_BODY).decode(errors="replace")
    try:
        return _one_line(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return f"status {response.status}"


def _one_line(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON events of a stream up to ``[DONE]``.

    Raises AnswerError if an event is an error or is not a JSON object, or if the stream ends before ``[DONE]``.
    """
    while line := response.readline(_MAX_LINE):
        name, _, data = line.decode(errors="replace").partition(":")
        if name != "data":
            continue  # comments, and lines between events
        if data.strip() == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise AnswerError("the server sent an event that is not JSON") from error
        if not isinstance(event, dict):
            raise AnswerError("the server sent an event that is not a JSON object")
        if event.get("error"):
            problem = event["error"]
            raise AnswerError(_one_line(problem.get("message") if isinstance(problem, dict) else problem))
        yield event
    raise AnswerError("the server ended the answer early")


def _pieces(events: Iterator[dict[str, Any]]) -> Iterator[Piece]:
    num_tokens = 0
    for event in events:
        usage = event.get("usage")
        if isinstance(usage, dict) and isinstance(count := usage.get("completion_tokens"), int):
            num_tokens = count
        delta: dict[str, Any] = {}
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning") or delta.get("reasoning_content")
        if reasoning:
            yield Piece(reasoning, num_tokens, True)
        yield Piece(delta.get("content") or "", num_tokens)
