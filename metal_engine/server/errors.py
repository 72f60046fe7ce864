"""Error responses in the shape of OpenAI's API, or of the API that the request's path belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from metal_engine.engine.transport import EngineDeadError
from metal_engine.errors import ContextLengthError, short
from metal_engine.server.response_bodies import ErrorBody, ErrorDetail
from metal_engine.text.long_text import TextTooLongError

# Key in the ASGI scope for the code of an error, which metrics count by cause.
ERROR_CODE = "metal_engine.error_code"

# Code of errors about requests that exceed the model's context length.
_TOO_LONG = "context_length_exceeded"
# Maximum length of a message in characters. A message may quote the request.
_MAX_ERROR = 1000


class APIError(HTTPException):
    """Error to report to the client. If a route raises it, it becomes the response.

    Args:
        status: HTTP status.
        message: description of the problem.
        where: path of the value at fault, e.g. ``messages[0].role``. It becomes the start of the message.
        param: request field at fault, if any. Default: the field at the start of ``where``.
        code: machine-readable code, e.g. ``context_length_exceeded``: OpenAI's, or this server's own.
        headers: additional response headers.
        context: error with the sizes of a request that exceeds the model's context length; None for another problem.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        where: str = "",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        context: ContextLengthError | None = None,
    ) -> None:
        super().__init__(status, where + message, headers)
        # Escapes in JSON can produce lone surrogates, which cannot be encoded in a response.
        self.message = (where + message)[:_MAX_ERROR].encode("utf-8", "replace").decode("utf-8")
        self.where = where
        self.param = param or re.split(r"[.\[]", where)[0] or None
        self.code = code
        self.context = context

    @property
    def body(self) -> ErrorBody:
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        return ErrorBody(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))


def invalid(message: str, param: str | None = None, code: str | None = None, *, where: str = "") -> APIError:
    """Return an error with status 400. The arguments are those of :class:`APIError`."""
    return APIError(400, message, where=where, param=param, code=code)


def beyond_context(error: ContextLengthError, param: str) -> APIError:
    """Return an error with status 400 for a request that exceeds the model's context length."""
    return APIError(400, str(error), param=param, code=_TOO_LONG, context=error)


def invalid_prompt(error: ValueError, param: str) -> APIError:
    """Return an error with status 400 for a prompt that the tokenizer has rejected."""
    code = _TOO_LONG if isinstance(error, TextTooLongError) else None
    return invalid(f": {error}", code=code, where=param)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Within this context, replace the field at fault in each APIError by the client's name of that field.

    Args:
        names: map from a field of the converted body to the field of the client's body. A key may also be a path within
            a field, such as ``response_format.json_schema``. A path is replaced only in the message.
    """
    try:
        yield
    except APIError as error:
        param = error.param or ""
        if param in names:
            error.param = names[param]
            if error.where:
                place = max((name for name in names if _is_within(error.where, name)), key=len, default=param)
                error.message = names[place] + error.message.removeprefix(place)
        raise


def _is_within(place: str, outer: str) -> bool:
    """Return True if the path ``place`` is ``outer`` itself or a path within it."""
    return place == outer or place.startswith((f"{outer}.", f"{outer}["))


# Maximum length of a model name or path in an error message.
_MAX_NAME = 200


def model_not_found(model: str, served: Sequence[str]) -> APIError:
    """Return an error with status 404 for an unknown model. The message lists the served models."""
    shown = model[:_MAX_NAME] + "..." * (len(model) > _MAX_NAME)
    there = ", ".join(f"`{name}`" for name in served)
    message = f"The model `{shown}` does not exist. This server has {there}."
    return APIError(404, message, param="model", code="model_not_found")


def model_not_loaded() -> APIError:
    """Return an error with status 503 for a GET request whose model is not loaded. GET requests do not load models."""
    problem = "the model is not loaded, and a GET request does not load it: send a prompt first"
    return APIError(503, problem, param="model", code="model_not_loaded")


OVERLOADED = "overloaded"
SHUTTING_DOWN = "shutting_down"
# Default Retry-After. A full queue may have free places after a few steps. Clients increase their delay by themselves.
_RETRY_AFTER_SECONDS = 1


def unavailable(
    message: str,
    *,
    code: str = OVERLOADED,
    param: str | None = None,
    retry_after: int = _RETRY_AFTER_SECONDS,
    closes: bool = False,
) -> APIError:
    """Return an error with status 503 and ``Retry-After``, for a request that may succeed later.

    Args:
        retry_after: delay in seconds after which the client may send the request again.
        closes: True if the connection is closed after the response.
    """
    headers = {"retry-after": str(retry_after)}
    if closes:
        headers["connection"] = "close"
    return APIError(503, message, code=code, param=param, headers=headers)


def shutting_down() -> APIError:
    """Return an error with status 503 for a request that arrives during shutdown, or is queued when shutdown begins."""
    return unavailable("the server is shutting down", code=SHUTTING_DOWN, closes=True)


def engine_dead(error: BaseException) -> APIError:
    message = str(error) if isinstance(error, EngineDeadError) else f"the engine has stopped: {error!r}"
    return APIError(503, message, code="engine_dead")


def to_api_error(error: Exception) -> APIError:
    """Convert an exception raised while a request was served to an error for its client.

    An exception of an unexpected type becomes status 500 without the exception's text.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RequestValidationError):
        return from_validation(error.errors())
    if isinstance(error, EngineDeadError):
        return engine_dead(error)
    if isinstance(error, RecursionError):  # shallow enough to parse, too deep to walk
        return invalid("the body is nested too deeply")
    # The exception's text may contain anything, so it is logged and not sent to the client.
    return APIError(500, "internal error", code="internal_error")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_ANTHROPIC_PATHS = "/v1/messages"
_OLLAMA_PATHS = "/api/"


def anthropic_error(error: APIError) -> dict[str, Any]:
    """Return the body of the error in the shape of Anthropic's API.

    Anthropic's API has no code for a request that exceeds the context length. Clients such as Claude Code recognize the
    messages and read the numbers in them. They then shorten the conversation, or reduce ``max_tokens``.
    """
    kind = _ANTHROPIC_TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    message = _too_long_for_anthropic(error) if error.code == _TOO_LONG else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def _too_long_for_anthropic(error: APIError) -> str:
    sizes = error.context
    if sizes is None:  # the prompt was not tokenized
        return f"prompt is too long: {error.message}"
    if not sizes.max_tokens:
        return f"prompt is too long: {sizes.num_prompt_tokens} tokens > {sizes.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {sizes.num_prompt_tokens} + {sizes.max_tokens} > "
        f"{sizes.limit}, decrease input length or `max_tokens` and try again"
    )


def error_response(error: APIError, scope: Scope) -> JSONResponse:
    """Return the error as a response in the shape of the API that the request's path belongs to.

    Stores the error's code in the scope, for metrics.
    """
    scope[ERROR_CODE] = error.code
    path: str = scope["path"]
    content: dict[str, Any] = error.body.model_dump()
    if path.startswith(_ANTHROPIC_PATHS):
        content = anthropic_error(error)
    elif path.startswith(_OLLAMA_PATHS):
        content = {"error": error.message}
    return JSONResponse(content, status_code=error.status_code, headers=error.headers)


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers that return an error response for exceptions of routes, and for requests without a route."""
    for kind in (HTTPException, RequestValidationError, EngineDeadError, RecursionError, Exception):
        app.add_exception_handler(kind, _on_error)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    api_error = to_api_error(error)
    if api_error is not error and api_error.status_code in (404, 405):  # raised by Starlette without details
        api_error.message += f": {request.method} {request.url.path[:_MAX_NAME]}"
    return error_response(api_error, request.scope)


_MAX_MESSAGE = 400
_MAX_WHERE = 300

ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(model: type[ModelT], value: Any) -> ModelT:
    """Validate a body that FastAPI does not validate: a large body, or a body converted from another API's format.

    Raises:
        APIError: status 400, naming the field at fault.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error


def from_validation(errors: Sequence[Any]) -> APIError:
    """Return an error with status 400 about the first field at fault, with all problems of that field.

    Args:
        errors: problems that pydantic found in a request, as from :meth:`RequestValidationError.errors`. Not empty.
            Each path begins with a part of the request, such as ``body``.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return invalid(f"the body is not valid JSON: {reason} (at character {first['loc'][-1]})")
    path = first["loc"][1:]
    if not path:
        return invalid("the body must be a JSON object, sent with `Content-Type: application/json`")
    param = str(path[0])
    # A field with a union type yields one error for each type.
    about_param = [e for e in errors if e["loc"][1:2] == path[:1]]
    reasons = dict.fromkeys(map(_reason, about_param))
    place = _dotted(path) if len(reasons) == 1 else param
    where = place[:_MAX_WHERE]
    return invalid(f": {' | '.join(reasons)}"[: _MAX_MESSAGE - len(where)], param=param, where=where)


# pydantic's errors about a value that is not a JSON object. Their messages have names of Python's types.
_NOT_AN_OBJECT = ("dict_type", "model_type", "model_attributes_type")


def _reason(error: Mapping[str, Any]) -> str:
    """Return the message about one of pydantic's errors."""
    if error["type"] in _NOT_AN_OBJECT:
        return f"Input should be an object, got {short(error['input'])}"
    reason: str = error["msg"]
    return reason


def _dotted(path: Sequence[str | int]) -> str:
    """Return the path of a field as text: ``("messages", 0, "role")`` -> ``messages[0].role``."""
    text = str(path[0])
    for part in path[1:]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text
