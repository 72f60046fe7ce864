"""Grammars that would take gigabytes and minutes are refused, delay no other request, and end with their request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.grammars.hostile import PATTERNS, descendants
from tests.server.test_errors import check_error
from tests.server.test_lifecycle import process
from tests.support.serving import MODEL, Served, wait_until


def test_an_explosive_grammar_gets_a_400_without_delaying_other_requests(served: Served) -> None:
    """The hostile requests have other grammars, in all places of a request."""
    with ThreadPoolExecutor() as pool:
        body = {"model": MODEL, "prompt": "a", "structured_outputs": PATTERNS}
        refused = pool.submit(served.post, "/v1/completions", body)
        while not refused.done():
            assert served.post("/v1/completions", {"model": MODEL, "prompt": "b", "max_tokens": 3}).status_code == 200
        error = check_error(refused.result(), 400, "structured_outputs")
        assert "takes more time or memory to compile than a grammar may" in error["message"]


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
    with process(shutdown_timeout=0.1) as server, ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "structured_outputs": PATTERNS}
        pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        wait_until(lambda: len(descendants(server.popen.pid)) == 2, "the tokenizer's process and the grammar's")
        server.popen.terminate()
        status, log = server.end()
        assert status == 0 and "Traceback" not in log
