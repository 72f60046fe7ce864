"""Every error leaves the server in OpenAI's shape, wherever it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from metal_engine.engine.engine_thread import EngineDeadError
from metal_engine.engine.tokenizer import TextTooLongError
from metal_engine.server.openai.protocol import ErrorBody, ErrorDetail

# Where an error's code is left in the ASGI scope, for whoever counts errors by their cause.
ERROR_CODE = "metal_engine.error_code"


class APIError(Exception):
    """An error to tell the client.

    Args:
        status: HTTP status.
        message: what is wrong.
        where: what the message is to begin with: ``param``, and where in it, as in ``messages[0].role``.
        param: the request field at fault, if one is.
        code: OpenAI's machine-readable code, if there is one for it.
        headers: to send with it.
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
    ) -> None:
        super().__init__(where + message)
        self.status = status
        # JSON may smuggle in lone surrogates, which could not be sent back.
        self.message = (where + message).encode("utf-8", "replace").decode("utf-8")
        self._where, self._rest = where, message
        self.param = param
        self.code = code
        self.headers = headers

    def renamed(self, names: Mapping[str, str]) -> APIError:
        """The error by the name under which the client knows the field at fault, if ``names`` has it."""
        new = names.get(self.param or "")
        if new is None or self.param is None:
            return self
        where = self._where and new + self._where.removeprefix(self.param)
        return APIError(self.status, self._rest, where=where, param=new, code=self.code, headers=self.headers)

    @property
    def body(self) -> ErrorBody:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return ErrorBody(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))


def invalid(message: str, param: str | None = None, code: str | None = None, *, where: str = "") -> APIError:
    """A 400."""
    return APIError(400, message, where=where, param=param, code=code)


def invalid_prompt(error: ValueError, param: str) -> APIError:
    """A 400 for what the tokenizer refuses."""
    code = "context_length_exceeded" if isinstance(error, TextTooLongError) else None
    return invalid(f": {error}", param=param, code=code, where=param)


def model_not_found(model: str) -> APIError:
    return APIError(404, f"The model `{model}` does not exist.", param="model", code="model_not_found")


def engine_dead(error: BaseException) -> APIError:
    message = str(error) if isinstance(error, EngineDeadError) else f"the engine has stopped: {error!r}"
    return APIError(503, message, code="engine_dead")


def to_api_error(error: Exception) -> APIError:
    """What to tell the client about an exception raised while its request was served."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_dead(error)
    if isinstance(error, RecursionError):  # deep enough to parse, too deep to look at
        return invalid("the body is nested too deeply")
    # Its text may hold anything; the log has it.
    return APIError(500, "internal error", code="internal_error")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_ANTHROPIC_PATHS = "/v1/messages"


def anthropic_error(error: APIError) -> dict[str, Any]:
    """The error in Anthropic's shape."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: APIError, headers: Mapping[str, str] | None = None, *, path: str = "") -> JSONResponse:
    """The error as a response, in the shape that the clients of a path know."""
    content = anthropic_error(error) if path.startswith(_ANTHROPIC_PATHS) else error.body.model_dump()
    return JSONResponse(content, status_code=error.status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer with :class:`ErrorBody` whatever a route raises, and where there is no route."""
    app.add_exception_handler(APIError, _on_error)
    app.add_exception_handler(EngineDeadError, _on_error)
    app.add_exception_handler(RecursionError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    api_error = to_api_error(error)
    request.scope[ERROR_CODE] = api_error.code
    return error_response(api_error, api_error.headers, path=request.url.path)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(from_validation(error.errors()), path=request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = f"{message}: {request.method} {request.url.path}"
    return error_response(APIError(error.status_code, message), error.headers, path=request.url.path)


_MAX_MESSAGE = 400
_MAX_WHERE = 300

ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(model: type[ModelT], fields: Mapping[str, Any]) -> ModelT:
    """A body made here of what a client sent in another form.

    Raises:
        APIError: 400, naming the field at fault.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        raise from_validation([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error


def from_validation(errors: Sequence[Any]) -> APIError:
    """One 400 for what pydantic found wrong with a body; names the first field at fault."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return invalid(f"the body is not valid JSON: {reason} (at character {first['loc'][-1]})")
    path = first["loc"][1:]
    if not path:
        return invalid("the body must be a JSON object, sent with `Content-Type: application/json`")
    param = str(path[0])
    # A field that may have several types gives one error for each of them.
    about_param = [e for e in errors if e["loc"][1:2] == path[:1]]
    reasons = dict.fromkeys(e["msg"] for e in about_param)
    place = _dotted(path) if len(reasons) == 1 else param
    where = place[:_MAX_WHERE]
    return invalid(f": {' | '.join(reasons)}"[: _MAX_MESSAGE - len(where)], param=param, where=where)


def _dotted(path: Sequence[str | int]) -> str:
    """``("messages", 0, "role")`` -> ``messages[0].role``."""
    text = str(path[0])
    for part in path[1:]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text
