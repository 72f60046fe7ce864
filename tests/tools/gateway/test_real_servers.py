"""The gateway in front of real servers on the demo model that share KV through a Valkey server; and `make gateway`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.engine_child import is_running
from tests.support.gateway import before_pair
from tests.support.ranked_server import children_of
from tests.support.serving import DEADLINE, wait_until
from tools.gateway.demo import STORY
from tools.gateway.processes import model_server, shared_store, transfer_config

ROOT = Path(__file__).resolve().parents[3]
BLOCK_SIZE = 16


@pytest.mark.full
def test_the_decode_server_loads_kv_computed_by_the_prefill_server() -> None:
    """All whole blocks of the prompt are loaded, except the last token's block. The text is the same."""
    with ExitStack() as stack:
        store = stack.enter_context(shared_store())
        prefill, decode = (
            stack.enter_context(model_server("demo", "--kv-transfer-config", transfer_config(store, role)))[0]
            for role in ("kv_producer", "kv_consumer")
        )
        url = stack.enter_context(before_pair(prefill, decode))
        for opening in ("One", "Two", "Three"):
            body = {"model": "demo", "prompt": opening + STORY * 25, "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()
            usage = answer["usage"]
            whole = (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert whole > 400 and usage["prompt_tokens_details"]["kv_store_tokens"] == whole
            alone = httpx.post(f"{prefill}/v1/completions", json=body, timeout=600).json()
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"]


class Demo:
    """`make gateway` and its output so far."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tools.gateway.demo", "--port", "0"]
        self.popen = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stdout:
            self.text += line

    def end(self) -> None:
        """Stop the demo and its processes if the demo is still running."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGINT)
        self.popen.wait(DEADLINE)

    def wait_for(self, pattern: str) -> re.Match[str]:
        wait_until(lambda: re.search(pattern, self.text) is not None or self.popen.poll() is not None, pattern)
        found = re.search(pattern, self.text)
        assert found is not None, self.text
        return found


@pytest.mark.full
def test_the_demo_runs_starts_a_dead_server_again_and_ends_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.serving.DEADLINE", 10 * DEADLINE)  # longer, because models are loaded
    demo = Demo()
    try:
        url = demo.wait_for(r"The gateway is at (http\S+),")[1]
        assert int(demo.wait_for(r"seen it: (\d+) tokens came from the store")[1]) >= 64
        pids = [int(pid) for pid in re.findall(r"(\d+) \(http", demo.text)]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=600)
        assert answer.status_code == 200, answer.text
        demo.wait_for(r"is ready again")
        demo.wait_for(r"sends requests to http\S+ and http")
        children = children_of(demo.popen.pid)
        assert pids[1] in children and len(children) == 4, "two servers, the store and the gateway"
        demo.popen.send_signal(signal.SIGINT)
        assert demo.popen.wait(DEADLINE) == 0, demo.text
        assert not [pid for pid in children if is_running(pid)]
    finally:
        demo.end()
