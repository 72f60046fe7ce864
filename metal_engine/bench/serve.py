"""``metal-engine bench serve``: sends requests to a server and measures latencies and throughput as clients see
them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from metal_engine.bench.args import BenchServeArgs
from metal_engine.bench.client import BenchClient, RequestRecord, open_session
from metal_engine.bench.datasets import BenchRequest, arrival_times, make_requests
from metal_engine.bench.images import random_images
from metal_engine.bench.plots import check_plots, plot_run
from metal_engine.bench.report import check_output, table, write_json
from metal_engine.bench.server_memory import server_peak_bytes
from metal_engine.bench.server_metrics import parse_counts, parse_kv_cache_dtype, read_metrics
from metal_engine.bench.stats import Summary, summarize
from metal_engine.bench.tokens import load_prompt_tokenizer
from metal_engine.errors import ConfigError

_READY_POLL_SECONDS = 0.5
# Minimum time to wait for one response, so that a single attempt can succeed without `--ready-timeout`.
_LEAST_READY_SECONDS = 10.0
# Fields of each request that are copied to the result file.
_RESULT_FIELDS = ("prompt_len", "cached_len", "image_len", "output_len", "asked_len", "finish_reason", "error")


def bench_serve(args: BenchServeArgs) -> Summary:
    """Run the benchmark, print its table, and write the requested files.

    Raises:
        ConfigError: the server cannot be reached, settings are invalid, or a file cannot be written.
    """
    check_extra_body(args)
    check_output(args.save_result, "--save-result")
    if args.plot:
        check_plots(args.plot)
        check_output(args.plot, "--plot")
    model = asyncio.run(find_model(args))
    name = args.tokenizer or model
    requests = make_requests(args, args.seed, lambda: load_prompt_tokenizer(name))
    rng = np.random.default_rng([args.seed, 2])  # a separate generator, so that prompts do not change with images
    requests = [replace(request, images=random_images(rng, args.images, *args.image_sides)) for request in requests]
    summary, records = asyncio.run(measure(args, model, requests))
    print(table(summary))
    for error in sorted({r.error for r in records if r.error}):
        print(f"failed: {error} ({sum(r.error == error for r in records)} times)")
    if args.save_result:
        write_json(args.save_result, run_json(args, model, summary, records))
    if args.plot:
        plot_run(records, Path(args.plot))
    return summary


def check_extra_body(args: BenchServeArgs) -> None:
    """Raise ConfigError if ``--extra-body`` is not a JSON object."""
    try:
        if args.extra_body is not None and not isinstance(json.loads(args.extra_body), dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ConfigError("--extra-body", f"must be a JSON object: {error}") from error


async def find_model(args: BenchServeArgs) -> str:
    """Wait until the server responds. Return the name of the model to request.

    It is ``--model``, or the first model that the server lists.

    Raises:
        ConfigError: the server does not respond within ``--ready-timeout``, refuses the request with a status 4xx, or
            lists no model.
    """
    url = f"{args.base_url.rstrip('/')}/v1/models"
    deadline = time.monotonic() + args.ready_timeout
    async with open_session(args) as session:
        while True:
            try:
                seconds = max(deadline - time.monotonic(), _LEAST_READY_SECONDS)
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=seconds)) as response:
                    body = await response.text()
                    if response.status == 200:
                        break
                    problem = f"status {response.status}: {' '.join(body.split())[:200]}"
                    if 400 <= response.status < 500:  # the server responds, and a later attempt gets the same response
                        raise ConfigError("--base-url", f"{url} responds with {problem}")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = str(error) or "it does not respond"
            if time.monotonic() >= deadline:
                raise ConfigError("--base-url", f"no server at {args.base_url} (--base-url): {problem}")
            await asyncio.sleep(_READY_POLL_SECONDS)
    if args.model is not None:
        return args.model
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError("--model", f"{url} lists no model: set one with --model") from error


async def measure(
    args: BenchServeArgs, model: str, requests: Sequence[BenchRequest]
) -> tuple[Summary, list[RequestRecord]]:
    """Warm up the server, then send all requests at their arrival times, at most ``max_concurrency`` at once.

    Returns:
        The summary, and the records in the order of the requests.

    Raises:
        ConfigError: a warm-up request failed.
    """
    due = arrival_times(len(requests), args.request_rate, args.burstiness, args.seed)
    slots = asyncio.Semaphore(args.max_concurrency or len(requests))
    async with BenchClient(args, model) as client, open_session(args) as session:
        await _warm_up(args, client, requests)
        before = parse_counts(await read_metrics(session, args.base_url))
        with _progress(args.progress) as progress:
            bar = progress.add_task("Requests", total=len(requests), running=0, rate=0.0)
            start = time.perf_counter()
            running = tokens = 0

            async def one(request: BenchRequest, after: float) -> RequestRecord:
                nonlocal running, tokens
                await asyncio.sleep(start + after - time.perf_counter())
                async with slots:
                    running += 1
                    progress.update(bar, running=running)
                    record = await client.send(request)
                running -= 1
                tokens += record.output_len
                rate = tokens / (time.perf_counter() - start)
                progress.update(bar, advance=1, running=running, rate=rate)
                return record

            records = await asyncio.gather(*(one(r, t) for r, t in zip(requests, due.tolist(), strict=True)))
        metrics = await read_metrics(session, args.base_url)
    after = parse_counts(metrics)
    summary = summarize(
        records,
        percentiles=args.percentile_values,
        goodput=args.goodput_limits,
        server_peak_bytes=server_peak_bytes(args.base_url),
        speculation=None if after is None else after.since(before),
        kv_cache_dtype=parse_kv_cache_dtype(metrics, model),
    )
    return summary, records


async def _warm_up(args: BenchServeArgs, client: BenchClient, requests: Sequence[BenchRequest]) -> None:
    # Texts and images differ from the start of all measured prompts, so that no measured prompt is in the prefix cache.
    rng = np.random.default_rng([args.seed, 3])
    warmups = [
        BenchRequest(
            f"Warm-up {i}: " + requests[i % len(requests)].prompt[-400:],
            min(8, requests[0].output_len),
            images=random_images(rng, args.images, *args.image_sides),
        )
        for i in range(args.num_warmups)
    ]
    for record in await asyncio.gather(*map(client.send, warmups)):
        if record.error:
            raise ConfigError(None, f"the server failed a warm-up request: {record.error}")


def _progress(wanted: bool) -> Progress:
    """Return a progress display on standard error: finished requests, running requests, and tokens per second."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} running, {task.fields[rate]:.1f} tok/s"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not (wanted and console.is_terminal))


def run_json(args: BenchServeArgs, model: str, summary: Summary, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return all data of the run for a JSON file: settings without the API key, summary, and every request."""
    settings = {k: v for k, v in asdict(args).items() if k != "api_key"}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "settings": settings | {"request_rate": str(args.request_rate)},
        "summary": summary.to_json(),
        "requests": [request_json(record) for record in records],
    }


def request_json(record: RequestRecord) -> dict[str, Any]:
    """Return one request for the result file. Times are in seconds.

    ``started`` is a time of ``time.perf_counter``. ``ttft`` and ``latency`` are relative to it, or None without text.
    ``itls`` are the times between consecutive events.
    """
    return {
        "started": record.started,
        "ttft": record.ttft if record.token_times else None,
        "itls": record.itls,
        "latency": record.latency if record.token_times else None,
        **{name: getattr(record, name) for name in _RESULT_FIELDS},
    }
