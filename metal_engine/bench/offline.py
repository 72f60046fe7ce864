"""``metal-engine bench throughput`` and ``latency``: benchmarks of the engine alone, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.progress import Progress

from metal_engine.bench.args import BenchLatencyArgs, BenchThroughputArgs
from metal_engine.bench.datasets import BenchRequest, make_requests, random_text
from metal_engine.bench.report import check_output, write_json
from metal_engine.bench.tokens import load_prompt_tokenizer
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.errors import ConfigError, PromptError
from metal_engine.loading.build import build_engine
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs


def bench_throughput(engine_args: EngineArgs, args: BenchThroughputArgs) -> dict[str, Any]:
    """Run all requests concurrently. Print the throughput, write the requested file, and return the result.

    Raises:
        ConfigError: the dataset or the file of the result cannot be used, or a request does not fit into the engine.
        RuntimeError: a request failed.
    """
    check_output(args.save_result, "--save-result")
    name = engine_args.tokenizer or engine_args.model
    requests = make_requests(args, engine_args.seed, lambda: load_prompt_tokenizer(name))
    engine = build_engine(engine_args)
    try:
        _check(engine, requests)
        _run(engine, [BenchRequest("Warm up.", 4)], show=False)
        engine.core.scheduler.prefix_cache.forget()
        num_warm_up_steps = engine.core.num_steps
        run, input_tokens = _run(engine, requests, show=True)
    finally:
        engine.close()
    seconds, output_tokens = run.seconds, run.num_output_tokens
    result = {
        "requests": len(requests),
        "seconds": seconds,
        "steps": engine.core.num_steps - num_warm_up_steps,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": len(requests) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (input_tokens + output_tokens) / seconds,
        "peak_memory_mib": peak_memory_bytes() / (1 << 20),
        "kv_cache_dtype": engine.core.config.model.kv_dtype,
    }
    _report("Throughput", result, args.save_result)
    return result


def bench_latency(engine_args: EngineArgs, args: BenchLatencyArgs) -> dict[str, Any]:
    """Time repeated runs of the same batch, from the start to the last token. Print and return the result.

    The prefix cache is cleared between runs.

    Raises:
        ConfigError: the file of the result cannot be used, or a request does not fit into the engine.
        RuntimeError: a request failed.
    """
    check_output(args.save_result, "--save-result")
    tokenizer = load_prompt_tokenizer(engine_args.tokenizer or engine_args.model)
    rng = np.random.default_rng(engine_args.seed)
    prompts = [
        BenchRequest(random_text(tokenizer, rng, args.input_len), args.output_len) for _ in range(args.batch_size)
    ]
    engine = build_engine(engine_args)
    seconds = []
    try:
        _check(engine, prompts)
        for i in range(-args.num_iters_warmup, args.num_iters):
            run, _ = _run(engine, prompts, show=False)
            engine.core.scheduler.prefix_cache.forget()
            if i >= 0:
                seconds.append(run.seconds)
    finally:
        engine.close()
    result = {
        "iterations": args.num_iters,
        "batch_size": args.batch_size,
        "mean_seconds": float(np.mean(seconds)),
        **{f"p{p}_seconds": float(np.percentile(seconds, p)) for p in (10, 50, 90, 99)},
        "peak_memory_mib": peak_memory_bytes() / (1 << 20),
        "kv_cache_dtype": engine.core.config.model.kv_dtype,
    }
    _report("Latency", result, args.save_result)
    return result


@dataclass(frozen=True)
class OfflineRun:
    """Result of requests that started together.

    Attributes:
        seconds: time from the first submission to the last token.
        first_token_seconds: time from the first submission to each request's first token.
        token_ids: output tokens of each request.
        num_cached_tokens: number of each request's prompt tokens that were in the prefix cache or a store.
    """

    seconds: float
    first_token_seconds: list[float]
    token_ids: list[list[int]]
    num_cached_tokens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def run_requests(
    engine: BuiltEngine,
    prompts: Sequence[list[int]],
    output_lens: Sequence[int],
    on_finished: Callable[[], None] = lambda: None,
) -> OfflineRun:
    """Run greedy requests to their ends, and ignore end-of-sequence tokens.

    Args:
        prompts: token ids of each prompt.
        output_lens: number of output tokens of each request.
        on_finished: function to call at the end of each request.

    Raises:
        RuntimeError: a request failed.
    """
    core, preparer = engine.core, engine.preparer
    first_token = [0.0] * len(prompts)
    cached = [0] * len(prompts)
    token_ids: list[list[int]] = [[] for _ in prompts]
    start = time.perf_counter()
    for i, (prompt, output_len) in enumerate(zip(prompts, output_lens, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        core.add_request(str(i), preparer.prepare(prompt, params))
    while core.has_requests:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            i = int(output.request_id)
            if output.token_ids and not token_ids[i]:
                first_token[i], cached[i] = time.perf_counter() - start, output.num_cached_tokens
            token_ids[i] += output.token_ids
            if output.finished:
                on_finished()
    return OfflineRun(time.perf_counter() - start, first_token, token_ids, cached)


def _check(engine: BuiltEngine, requests: Sequence[BenchRequest]) -> None:
    """Raise ConfigError if the model cannot generate, or if a request does not fit into its context or KV cache."""
    preparer = engine.preparer
    for request in requests:
        try:
            preparer.prepare(preparer.tokenizer.encode(request.prompt), SamplingParams(max_tokens=request.output_len))
        except PromptError as error:
            raise ConfigError(None, f"the engine cannot run a request of the benchmark: {error}") from error


def _run(engine: BuiltEngine, requests: Sequence[BenchRequest], *, show: bool) -> tuple[OfflineRun, int]:
    """Run requests to their ends. Return the result, and the number of prompt tokens of all requests.

    Args:
        show: True to show the progress.

    Raises:
        RuntimeError: a request failed, or a wrong number of tokens was generated.
    """
    prompts = [engine.preparer.tokenizer.encode(request.prompt) for request in requests]
    with Progress(disable=not show, transient=True) as progress:
        task = progress.add_task("Requests", total=len(requests))
        output_lens = [request.output_len for request in requests]
        run = run_requests(engine, prompts, output_lens, lambda: progress.update(task, advance=1))
    if run.num_output_tokens != sum(output_lens):
        raise RuntimeError(f"{run.num_output_tokens} tokens were generated, but {sum(output_lens)} were requested")
    return run, sum(map(len, prompts))


def peak_memory_bytes() -> int:
    """Return MLX's peak memory in bytes, including weights and KV cache."""
    import mlx.core as mx

    return int(mx.get_peak_memory())


def _report(title: str, result: dict[str, Any], path: str | None) -> None:
    print(f"{title}:")
    for name, value in result.items():
        shown = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
        print(f"  {name.replace('_', ' '):<26}{shown:>14}")
    if path is not None:
        write_json(path, result)
