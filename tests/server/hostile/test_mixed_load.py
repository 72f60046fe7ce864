"""Many clients of every kind together with hostile clients: greedy outputs equal those of a client alone."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.hostile.cases import Case
from tests.server.hostile.mixed_load import Load, hostile_client, jobs
from tests.server.hostile.sending import check_answer, exchange
from tests.server.hostile.suite import QUICK, every_case
from tests.support.checkpoint_files import write_checkpoint, write_tokenizer
from tests.support.probed_server import ProbedServer, probed_server
from tools.fixtures.fake_engine import TOOL_TEMPLATE

# The blocks are too few for the running requests, so that some are preempted. The store keeps evicted KV.
FLAGS = (
    *("--served-model-name", "tiny", "--tool-call-parser", "json_tools", "--max-model-len", "640"),
    *("--max-num-batched-tokens", "256", "--max-num-seqs", "64", "--block-size", "8"),
    *("--log-level", "warning"),
)
# Stored responses grow to their limit. With the default limit, they would exceed the leak that the test looks for.
CONFIG = "max-stored-responses: 8\n"


# Growth allowed for an idle server after every request was sent once, in bytes. For memory in use, it is less than a
# leak of 20 MiB in the whole run. Most resident memory is kept by allocators for later.
MAX_MORE_IN_USE = 12 << 20
MAX_MORE_RESIDENT = 32 << 20


def send_hostile(server: ProbedServer, case: Case) -> int:
    """Send a hostile request, check the response, and return its status.

    Any status except a 5xx other than "overloaded" is right: the cases were written for another server's limits, and
    the queue may be full.
    """
    answer = exchange(server.port, case, case.body())
    if not (answer.status == 503 and b'"overloaded' in answer.body):
        check_answer(replace(case, status=None), answer)
    return answer.status


@contextmanager
def resident_memory(server: ProbedServer) -> Iterator[list[int]]:
    """Yield samples of the server's resident memory in bytes, without memory kept by the allocator."""
    over = threading.Event()
    sizes: list[int] = []

    def watch() -> None:
        while not over.wait(2):
            server.reset(trim=True)
            sizes.append(server.resident)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield sizes
    finally:
        over.set()
        watcher.join()


def when_idle(server: ProbedServer) -> dict[str, int]:
    """Return the memory of the idle server in bytes: resident, and in use."""
    server.wait_until_idle()
    held: list[dict[str, int]] = []
    for _ in range(5):  # a thread can still be working for a disconnected client
        time.sleep(1)
        server.reset(trim=True)
        held.append({"resident": server.resident, **server.bytes_in_use()})
    return {name: min(one[name] for one in held) for name in held[0]}


def fill(server: ProbedServer, load: Load, cases: list[Case], num_clients: int) -> None:
    """Send each hostile request once, then run the load for a while.

    This fills caches to their bounds and starts threads. Python's allocator also reaches its peak and keeps most of
    that memory. Any later growth is a leak.
    """
    for case in cases:
        send_hostile(server, case)
    asyncio.run(load.run(num_clients, 30))


def counts(server: ProbedServer) -> dict[str, float]:
    """Return the counters and gauges of ``/metrics`` that have no label besides the model's name."""
    return {
        sample.name.removeprefix("metal_engine:"): sample.value
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text)
        for sample in family.samples
        if set(sample.labels) == {"model_name"}
    }


def has_seen_all(load: Load, after: dict[str, float]) -> bool:
    """Return True if each kind of request has a response, and KV was saved to the store and loaded from it."""
    names = ("num_preemptions_total", "kv_transfer_blocks_saved_total", "kv_transfer_blocks_loaded_total")
    return set(load.told) == {job.kind for job in load.jobs} and all(after[name] for name in names)


@pytest.mark.parametrize(
    ("num_clients", "seconds", "num_texts", "num_blocks"),
    [(24, 2, 1, 100), pytest.param(150, 300, 4, 100, marks=pytest.mark.full)],
)
def test_outputs_under_mixed_load_equal_outputs_of_a_lone_client(
    tmp_path: Path, num_clients: int, seconds: float, num_texts: int, num_blocks: int
) -> None:
    model = write_checkpoint(tmp_path / "model")
    write_tokenizer(model, chat_template=TOOL_TEMPLATE)
    cases = [case for case in every_case() if seconds > 60 or case.name in QUICK]
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    flags = ("--num-gpu-blocks-override", str(num_blocks), "--kv-cache-dir", str(tmp_path / "kv"))
    with probed_server(model, tmp_path, *FLAGS, *flags, "--config", str(config)) as server:
        load = Load(server.url, jobs(num_texts, seed=20261122))
        asyncio.run(load.ask_alone())
        if seconds > 60:
            fill(server, load, cases, num_clients)
            before = when_idle(server)
        with hostile_client(partial(send_hostile, server), cases) as statuses, resident_memory(server) as resident:
            asyncio.run(load.run(num_clients, seconds))
            for _ in range(10):  # a busy machine may need more time
                if has_seen_all(load, counts(server)):
                    break
                asyncio.run(load.run(num_clients, seconds))
        server.wait_until_idle()
        after = counts(server)
        print(f"{load.told.total()} answers, {load.num_left} clients left, {len(statuses)} hostile requests; {after}")
        assert not load.wrong, (len(load.wrong), load.wrong[:3])
        assert has_seen_all(load, after) and load.num_left and statuses
        assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0
        assert after["failed_steps_total"] == 0
        assert server.health()["status"] == "ok"
        if seconds > 60:
            half = len(resident) // 2
            first, second = statistics.median(resident[:half]), statistics.median(resident[half:])
            print(f"resident: {first / 2**20:.0f} MiB in the first half, {second / 2**20:.0f} MiB in the second")
            assert second < first + (32 << 20)
            grown = {name: held - before[name] for name, held in when_idle(server).items()}
            print(f"idle: {before} bytes before, {grown} more after")
            assert max(grown["malloc"], grown["python"]) < MAX_MORE_IN_USE, grown
            assert grown["resident"] < MAX_MORE_RESIDENT, grown
