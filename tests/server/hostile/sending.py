"""Sends a case and checks the response."""

from __future__ import annotations

import http.client
import json
from contextlib import suppress
from dataclasses import dataclass

from tests.server.hostile.cases import Case

# Seconds after which a server without a response counts as hanging. No figure depends on it.
DEADLINE = 600.0


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


def exchange(port: int, case: Case, body: bytes) -> Answer:
    """Send a case with this body on a new connection.

    The server may respond and close the connection before it has read the whole body. The response is still read.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    try:
        connection.putrequest(case.method, case.path, skip_accept_encoding=True)
        for name, value in {**case.headers, "content-length": str(len(body))}.items():
            connection.putheader(name, value.encode("latin-1"))
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.endheaders(body or None)
        response = connection.getresponse()
        return Answer(response.status, response.read())
    finally:
        connection.close()


def check_answer(case: Case, answer: Answer) -> None:
    """Check for an allowed status, the endpoint's shape of an error, and no failure within a stream."""
    start = answer.body[:300]
    assert answer.status < 500, (case.name, answer.status, start)
    if case.status is not None:
        assert answer.status == case.status, (case.name, answer.status, start)
    if answer.status >= 400 and case.method != "HEAD":
        error = json.loads(answer.body)
        if case.path.startswith("/v1/messages"):
            assert error["type"] == "error"
            names = {"type", "message"}
        else:
            names = {"message", "type", "param", "code"}
        if case.path.startswith("/api/"):
            assert set(error) == {"error"} and isinstance(error["error"], str) and error["error"], (case.name, start)
        else:
            assert set(error["error"]) == names and error["error"]["message"], (case.name, start)
        # The message names the problem and does not repeat the input.
        assert len(answer.body) < 2_000, (case.name, len(answer.body))
    else:
        for failure in (b'"server_error"', b'"api_error"', b"Traceback"):
            assert failure not in answer.body, (case.name, answer.body[-500:])
