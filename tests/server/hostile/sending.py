"""Sends a case and looks at its answer."""

from __future__ import annotations

import http.client
import json
from contextlib import suppress
from dataclasses import dataclass

from tests.server.hostile.cases import Case

# A server that has not answered after so many seconds hangs; no figure depends on it.
DEADLINE = 600.0


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


def exchange(port: int, case: Case, body: bytes) -> Answer:
    """Send a case with this body, on a connection of its own.

    A server may answer and close before it has read everything: then what it said is still read.
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
    """A status that the case allows, an error in the shape of its endpoint, and no failure within a stream."""
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
        # It tells what is wrong, and does not send back what came.
        assert len(answer.body) < 2_000, (case.name, len(answer.body))
    else:
        for failure in (b'"server_error"', b'"api_error"', b"Traceback"):
            assert failure not in answer.body, (case.name, answer.body[-500:])
