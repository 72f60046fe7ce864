"""Clients of every kind at once. Each compares its response with the response to the same request alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.server.hostile.cases import Case

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "number": {"type": "integer"}},
    "required": ["size", "number"],
    "additionalProperties": False,
}
# Percentage of clients that leave before their response is complete.
PERCENT_LEAVING = 20

# Content of a response: text and finish reason of each choice.
Said = list[tuple[str, str | None]]


@dataclass(frozen=True)
class Job:
    """Greedy request.

    Attributes:
        kind: special property of the request.
    """

    kind: str
    path: str
    body: dict[str, Any]


def jobs(number: int, seed: int) -> list[Job]:
    """Return jobs of all kinds, the same for the same seed. Every other job has the prefix of the previous job."""
    rng = random.Random(seed)
    made: list[Job] = []
    text = ""
    for i in range(number):
        text = text[:64] if i % 2 else ""
        text += "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ,.", k=rng.randrange(8, 220)))
        for job in _jobs_of(text, rng.randrange(8, 48)):
            made.append(job)
    return made


def _jobs_of(text: str, max_tokens: int) -> Iterator[Job]:
    common = {"model": "tiny", "max_tokens": max_tokens, "temperature": 0}
    messages = [{"role": "user", "content": text}]
    of_completions: dict[str, dict[str, Any]] = {
        "plain": {},
        "stream": {"stream": True},
        "n": {"n": 3},
        "n, streamed": {"n": 2, "stream": True},
        "log probabilities": {"logprobs": 3},
        "prompt log probabilities": {"logprobs": 1, "echo": True},
        "stops": {"stop": ["e", "Q", "\x07"], "include_stop_str_in_output": True},
        "stop tokens": {"stop_token_ids": list(range(0, 256, 9)), "stream": True},
        "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        "bad words": {"bad_words": list("abcdefgh")},
        "biases": {"logit_bias": {str(token_id): 2.0 for token_id in range(64, 96)}},
        "few tokens": {"allowed_token_ids": list(range(97, 123))},
        "to the end": {"ignore_eos": True, "min_tokens": max_tokens},
        "truncated": {"truncate_prompt_tokens": 8},
        "a regex": {"structured_outputs": {"regex": "[a-z]{4,12}-[0-9]{1,8}"}},
    }
    for kind, fields in of_completions.items():
        yield Job(kind, "/v1/completions", {**common, "prompt": text, **fields})
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    chat = {**common, "messages": messages}
    yield Job("a chat", "/v1/chat/completions", chat)
    yield Job("a schema", "/v1/chat/completions", {**chat, "response_format": form, "stream": True})
    yield Job("a message", "/v1/messages", chat)
    del common["max_tokens"]
    yield Job("a response", "/v1/responses", {**common, "input": text, "max_output_tokens": max_tokens})


def said(job: Job, answer: bytes) -> Said:
    """Return the content of the response to a job, without ids and times."""
    if job.body.get("stream"):
        texts: dict[int, str] = {}
        reasons: dict[int, str | None] = {}
        assert answer.endswith(b"data: [DONE]\n\n"), answer[-300:]
        for event in answer.decode().split("\n\n")[:-2]:
            if event == ": keep-alive":  # a pause of the output on a slow machine
                continue
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                new = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                index = choice["index"]
                texts[index] = texts.get(index, "") + new
                reasons[index] = choice["finish_reason"]
        return [(texts[index], reasons[index]) for index in sorted(texts)]
    content = json.loads(answer)
    if job.path == "/v1/messages":
        return [("".join(block["text"] for block in content["content"]), content["stop_reason"])]
    if job.path == "/v1/responses":
        return [("".join(part["text"] for item in content["output"] for part in item["content"]), content["status"])]
    choices = sorted(content["choices"], key=lambda choice: choice["index"])
    return [(c["message"]["content"] if "message" in c else c["text"], c["finish_reason"]) for c in choices]


@dataclass
class Load:
    """Load from concurrent clients until a given time.

    Attributes:
        solo: content of each job's response without other load.
        told: number of complete responses by kind of job.
        wrong: jobs with a different response, with the expected and actual content.
        num_left: number of disconnected clients.
        seeds: source of the clients' seeds, which differ in each run.
        resident: samples of the server's resident memory in bytes.
    """

    url: str
    jobs: list[Job]
    solo: list[Said] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[Job, Said, Said]] = field(default_factory=list)
    num_left: int = 0
    seeds: random.Random = field(default_factory=lambda: random.Random(0))

    async def ask_alone(self) -> None:
        """Send each job by itself, twice. The second time, its prefix is cached."""
        async with self._session() as session:
            for job in self.jobs:
                first, second = [said(job, await self._ask(session, job)) for _ in range(2)]
                assert first == second, job
                self.solo.append(first)

    async def run(self, num_clients: int, seconds: float) -> None:
        """Send requests from ``num_clients`` clients at once for ``seconds``."""
        end = time.monotonic() + seconds
        async with self._session() as session, asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(self._client(session, random.Random(self.seeds.random()), end))

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=600)
        return aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def _client(self, session: aiohttp.ClientSession, rng: random.Random, end: float) -> None:
        while time.monotonic() < end:
            index = rng.randrange(len(self.jobs))
            job = self.jobs[index]
            if rng.randrange(100) < PERCENT_LEAVING:
                await self._leave(session, job, rng)
                continue
            answer = said(job, await self._ask(session, job))
            self.told[job.kind] += 1
            if answer != self.solo[index]:
                self.wrong.append((job, answer, self.solo[index]))

    async def _ask(self, session: aiohttp.ClientSession, job: Job) -> bytes:
        async with session.post(job.path, json=job.body) as response:
            content = await response.read()
            assert response.status == 200, (job, response.status, content[:300])
            return content

    async def _leave(self, session: aiohttp.ClientSession, job: Job, rng: random.Random) -> None:
        """Send a request and disconnect: while it is prepared, waits or runs, or after a piece of a stream."""
        asking = asyncio.create_task(self._ask_for_a_piece(session, job, rng.randrange(1, 4)))
        await asyncio.wait({asking}, timeout=rng.choice((0.0, 0.01, 0.1, 1.0)))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        self.num_left += 1

    async def _ask_for_a_piece(self, session: aiohttp.ClientSession, job: Job, num_pieces: int) -> None:
        body = {**job.body, "stream": True} if job.path == "/v1/completions" else job.body
        async with session.post(job.path, json=body) as response:
            for _ in range(num_pieces):
                await response.content.readany()


@contextmanager
def hostile_client(send: Callable[[Case], int], cases: list[Case], num_least: int = 0) -> Iterator[list[int]]:
    """Send hostile requests in a thread, ``num_least`` at least. Yields the list of statuses so far."""
    over = threading.Event()
    statuses: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for case in itertools.cycle(cases):
                if over.is_set() and len(statuses) >= num_least:
                    return
                statuses.append(send(case))
        except BaseException as error:  # noqa: BLE001  (raised again in the test's thread)
            failures.append(error)

    sender = threading.Thread(target=run)
    sender.start()
    try:
        yield statuses
    finally:
        over.set()
        sender.join()
    for failure in failures:
        raise failure
