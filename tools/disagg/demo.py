"""`make disagg`: a prefill server, a decode server and the proxy in front of them, on this machine.

Prints how many tokens each server computed. The only argument is MODEL (default: demo).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from tools.disagg.proxy import create_app
from tools.fixtures.ports import free_port

STORY = "Once upon a time there was a fox who lived at the edge of a wide and quiet forest. "
PROMPTS = [STORY * 8 + "One morning", "The tide comes in twice a day. " * 20 + "At noon", STORY * 4 + "At night"]


@contextmanager
def serving(model: str, role: str, directory: str, *flags: str) -> Iterator[str]:
    """Yield the URL of a new server process, once it is ready.

    Args:
        role: role in the transfer of KV: ``kv_producer`` or ``kv_consumer``.
        directory: folder of the KV store.

    Raises:
        SystemExit: the server process exited during its start.
    """
    port = free_port()
    transfer = {"kv_connector": "disk", "kv_role": role, "kv_connector_extra_config": {"path": directory}}
    command = [sys.executable, "-m", "metal_engine", "serve", model, "--port", str(port)]
    command += ["--kv-transfer-config", json.dumps(transfer), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the {role} server has ended with status {process.returncode}")
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def proxying(prefill: str, decode: str) -> Iterator[str]:
    """Run the proxy in a thread and yield its URL."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(create_app(prefill, decode), host="127.0.0.1", port=port, log_level="warning")
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def complete(url: str, prompt: str, answers: list[dict[str, Any]]) -> None:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    started = time.perf_counter()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()
    answers.append(answer | {"seconds": time.perf_counter() - started, "prompt": prompt})


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(model, "kv_producer", directory) as prefill,
        serving(model, "kv_consumer", directory) as decode,
        proxying(prefill, decode) as proxy,
    ):
        answers: list[dict[str, Any]] = []
        threads = [threading.Thread(target=complete, args=(proxy, prompt, answers)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            usage = answer["usage"]
            print(f"{answer['prompt'][:30]!r}...: {answer['choices'][0]['text']!r}")
            print(
                f"  {usage['prompt_tokens']} prompt tokens, {usage['prompt_tokens_details']['kv_store_tokens']} of "
                f"them loaded as KV; {usage['completion_tokens']} generated; {answer['seconds']:.1f} s"
            )
        for name, url in (("prefill server", prefill), ("decode server", decode)):
            counts = httpx.get(f"{url}/health").json()["kv_transfer"]
            print(
                f"{name}: computed {counts['prompt_tokens_computed']} prompt tokens, found "
                f"{counts['prompt_tokens_local']} in its cache, received {counts['prompt_tokens_store']}; saved "
                f"{counts['blocks_saved']} blocks"
            )


if __name__ == "__main__":
    main()
