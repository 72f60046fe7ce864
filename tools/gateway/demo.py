"""`make gateway`: two servers, their shared KV store and the gateway in front of them, on this machine.

    python -m tools.gateway.demo [MODEL] [--port 9000]

Sends some requests, prints the server of each response and the source of its KV, prints commands to try, and runs until
Ctrl-C. A server that ends is restarted, as by launchd.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TextIO

import httpx

from metal_engine import __version__
from tools.fixtures.ports import free_port
from tools.gateway.processes import (
    NotStartedError,
    gateway,
    healthy_servers,
    model_server,
    shared_store,
    transfer_config,
)

STORY = "Once upon a time there was a fox who lived at the edge of a wide and quiet forest. "
OPENINGS = ["Who is the fox? ", "Where does the fox live? ", "What does the fox eat? ", "Is the fox alone? "]
_LOOK_SECONDS = 0.5


class GatewayFleet:
    """Two servers of a model on their own store, and the gateway in front of them.

    Args:
        stack: ends all processes on exit.
        log: file for the output of the processes.
    """

    def __init__(self, stack: ExitStack, model: str, port: int, log: TextIO) -> None:
        self._stack, self._model, self._log = stack, model, log
        self.store = stack.enter_context(shared_store(log))
        # Each server saves its KV and loads the other's. KV is exchanged only through the store.
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for number in (1, 2):
            print(f"starting server {number} of 2 on {model} ...", flush=True)
            self.start(free_port())
        urls = list(self.processes)
        self.url, self._gateway = stack.enter_context(
            gateway("--worker-urls", *urls, num_servers=2, log=log, port=port)
        )

    def start(self, port: int) -> None:
        flags = ["--kv-transfer-config", transfer_config(self.store), "--log-level", "warning"]
        url, process = self._stack.enter_context(model_server(self._model, *flags, log=self._log, port=port))
        self.processes[url] = process

    def watch(self) -> NoReturn:
        """Restart servers that end, forever. Prints changes of the list of servers that the gateway uses.

        Raises:
            NotStartedError: the gateway has ended, or a restarted server did not become ready.
        """
        known = healthy_servers(self.url)
        while True:
            time.sleep(_LOOK_SECONDS)
            if self._gateway.poll() is not None:
                raise NotStartedError(f"the gateway has ended with status {self._gateway.returncode}")
            for url, process in list(self.processes.items()):
                if process.poll() is not None:
                    print(f"{url} has ended with status {process.returncode}; restarting it ...", flush=True)
                    self.start(int(url.rpartition(":")[2]))
                    print(f"{url} is ready again", flush=True)
                    known = []  # report the list again, even if it is unchanged
            now = healthy_servers(self.url)
            if sorted(now) != sorted(known):
                print(f"the gateway sends requests to {' and '.join(sorted(now)) or 'no server'}", flush=True)
                known = now


def complete(url: str, model: str, prompt: str) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()
    assert isinstance(answer, dict)
    return answer


def show(fleet: GatewayFleet, model: str) -> None:
    """Run four conversations of two turns through the gateway, and print the results.

    Then sends the first turn of the first conversation to each server directly, and prints the number of tokens that
    came from the store.
    """
    for opening in OPENINGS:
        prompt = opening + STORY * 4
        for turn in (1, 2):
            answer = complete(fleet.url, model, prompt)
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{opening!r} turn {turn}: {usage['prompt_tokens']} prompt tokens, {cached} of them cached")
            prompt += answer["choices"][0]["text"] + " And then? "
    for number, url in enumerate(fleet.processes, 1):
        counts = httpx.get(f"{url}/health").raise_for_status().json()["kv_transfer"]
        print(
            f"server {number} computed {counts['prompt_tokens_computed']} prompt tokens and found "
            f"{counts['prompt_tokens_local']} in its cache"
        )
    from_store = 0
    for url in fleet.processes:
        usage = complete(url, model, OPENINGS[0] + STORY * 4)["usage"]
        from_store = max(from_store, usage["prompt_tokens_details"]["kv_store_tokens"])
    print(f"the same prompt at the server that had not seen it: {from_store} tokens came from the store")


def what_to_try(fleet: GatewayFleet, model: str, log: str) -> str:
    question = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    pids = ", ".join(f"{process.pid} ({url})" for url, process in fleet.processes.items())
    return f"""
The gateway is at {fleet.url}, for any OpenAI or Anthropic client. Try:

  curl {fleet.url}/v1/chat/completions -H 'content-type: application/json' -d '{question}'
  curl {fleet.url}/workers                 which servers there are, and whether they are well
  curl {fleet.url}/get_loads               how many requests each has
  metal-engine bench serve --base-url {fleet.url} --model {model} --tokenizer {model}
  kill -9 PID of a server: {pids}
    and ask again meanwhile: the other answers, and the first is started again

Logs: {log}. docs/several-macs.md has the commands for several Macs. Ctrl-C ends all of it.
"""


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--port", type=int, default=9000, help="port of the gateway; 0 for a free port")
    args = parser.parse_args()

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore SIGINT
        signal.signal(number, interrupt)
    log = Path(tempfile.gettempdir()) / "metal-engine-gateway.log"
    with ExitStack() as stack, log.open("w", encoding="utf-8") as lines:
        try:
            print(f"metal-engine {__version__}", flush=True)
            fleet = GatewayFleet(stack, args.model, args.port or free_port(), lines)
            model = httpx.get(f"{next(iter(fleet.processes))}/v1/models").json()["data"][0]["id"]
            show(fleet, model)
            print(what_to_try(fleet, model, str(log)), flush=True)
            fleet.watch()
        except NotStartedError as error:
            print(f"{error}; its log is {log}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second signal would leave processes running
                signal.signal(number, signal.SIG_IGN)
            print("\nending the gateway, then the servers and the store: some seconds", flush=True)
            stack.close()
            return 0


if __name__ == "__main__":
    sys.exit(main())
