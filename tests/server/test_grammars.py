"""Grammars that would take gigabytes and minutes are refused, delay no other request, and end with their request."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from metal_engine.grammars.process import MAX_GROWTH
from tests.grammars.hostile import NESTED_REPEATS, PATTERNS, descendants
from tests.server.test_errors import check_error
from tests.server.test_lifecycle import process
from tests.support.serving import MODEL, Served, wait_until

full = pytest.mark.full
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
SCHEMA = PATTERNS["json"]
OBJECT = {"type": "object", "properties": {"a": SCHEMA}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/completions", {"prompt": "a", "structured_outputs": PATTERNS}, "structured_outputs"),
        pytest.param(
            "/v1/completions", {"prompt": "a", "structured_outputs": NESTED_REPEATS}, "structured_outputs", marks=full
        ),
        pytest.param(
            "/v1/chat/completions", {**MESSAGES, "response_format": JSON_SCHEMA}, "response_format", marks=full
        ),
        pytest.param(
            "/v1/chat/completions", {**MESSAGES, "tools": [TOOL], "tool_choice": "required"}, "tools", marks=full
        ),
        pytest.param(
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "text",
            marks=full,
        ),
    ],
)
def test_what_explodes_is_a_400_and_holds_nobody_up(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(served.post, path, {"model": MODEL, **body})
        while not refused.done():
            answer = served.post("/v1/completions", {"model": MODEL, "prompt": "b", "max_tokens": 3})
            assert answer.status_code == 200
        assert refused.result().status_code == 400
        error = refused.result().json()["error"]
        assert "takes more time or memory to compile than a grammar may" in error["message"]
        assert error["param"].startswith(param)


def test_a_client_that_leaves_ends_compiling(served: Served) -> None:
    served.post(
        "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
    )
    before = descendants()
    body = {"model": MODEL, "prompt": "a", "structured_outputs": PATTERNS}
    with httpx.Client(timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{served.url}/v1/completions", json=body)
    wait_until(lambda: not descendants() - before, "the end of the grammar's process")


def test_ending_the_server_does_not_wait_for_compiling() -> None:
    with process(shutdown_timeout=0.1) as server:
        first = threading.Thread(target=_ignore, args=(server.url,))
        first.start()
        wait_until(lambda: len(descendants(server.popen.pid)) == 2, "the tokenizer's process and the grammar's")
        server.popen.terminate()
        status, log = server.end()
        first.join(60)
        assert status == 0 and "Traceback" not in log


def _ignore(url: str) -> None:
    body = {"prompt": "a", "structured_outputs": PATTERNS}
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def _resident_bytes(pids: set[int]) -> dict[int, int]:
    command = ["ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids))]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    return {int(pid): int(rss) << 10 for pid, rss in (line.split() for line in listing.splitlines())}


@full
def test_whole_reproductions_take_bounded_memory_while_others_are_answered() -> None:
    with process() as server, ThreadPoolExecutor(8) as pool:

        def post(body: dict[str, Any]) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)

        assert post({"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a"}}).status_code == 200
        own, idle = server.popen.pid, max(_resident_bytes(descendants(server.popen.pid)).values())
        before = _resident_bytes({own})[own]
        hostile = [
            # All texts differ, so that each is compiled.
            {"prompt": "a", "structured_outputs": wanted | {"whitespace_pattern": " " * i}}
            for i in range(1, 6)
            for wanted in (PATTERNS, NESTED_REPEATS)
        ]
        posts = [pool.submit(post, body) for body in hostile]
        while not all(p.done() for p in posts):
            assert post({"prompt": "b", "max_tokens": 2}).status_code == 200
            resident = _resident_bytes({own} | descendants(own))
            assert resident.pop(own, 0) < before + MAX_GROWTH
            assert all(size < idle + 3 * MAX_GROWTH for size in resident.values())
            assert len(resident) <= 2 + 2  # the tokenizer's process, the first kept one, and two that compile
        for p in posts:
            check_error(p.result(), 400, "structured_outputs")
        assert "error" in json.loads(posts[0].result().text)
