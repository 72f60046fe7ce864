"""Helpers of several sections: kernels, engines, and mlx-lm on the same weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from math import nan
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step

from metal_engine.attention.sample_steps import forget_errors
from metal_engine.bench.offline import OfflineRun, run_requests
from metal_engine.checkpoints import loader
from metal_engine.device.info import device_info, is_virtual_gpu
from metal_engine.doctor.figures import not_measured
from metal_engine.doctor.plan import Plan
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.errors import one_line
from metal_engine.loading.build import build_engine
from metal_engine.settings.args import EngineArgs

T = TypeVar("T")

NO_KERNEL = not_measured("errors of the kernels", "the kernels need Metal, or the simulator of a checkout")
# Turns off the kernels of attention and of recurrent layers.
MLX_FLAG = "--attention-backend mlx"
# Errors that MLX raises for a kernel that does not compile or run.
KERNEL_ERRORS = (RuntimeError, ValueError)

# Factor for tolerances on virtual GPUs. Virtual machines of macOS 26 sum in another order than Macs: comparisons within
# 1e-4 fail there, and pass on a Mac.
_VIRTUAL_TOLERANCE = 50.0
_SPECIAL_TOKENS = 100  # first ids of a vocabulary, where control tokens often are


def has_metal() -> bool:
    """Return True if MLX computes on a GPU with Metal."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def kernel_factory(plan: Plan) -> Callable[..., Any] | None:
    """Return ``mx.fast.metal_kernel`` on a GPU, the simulator's function elsewhere, or None without a simulator."""
    if has_metal():
        return mx.fast.metal_kernel
    if not plan.simulator:
        return None
    factory: Callable[..., Any] = import_module(plan.simulator).metal_kernel
    return factory


def failed_kernel(error: Exception) -> tuple[float, str]:
    """Return NaN as the numerical error of a kernel that failed, and a description of the exception ``error``.

    Discards the errors that MLX keeps for the next evaluation after such a failure.
    """
    forget_errors()
    return nan, f"{type(error).__name__}: {one_line(error)}"


def tolerance(allowed: float) -> float:
    """Return the allowed error on this device: ``allowed``, or on a virtual GPU 50 times ``allowed``."""
    return allowed * (_VIRTUAL_TOLERANCE if is_virtual_gpu() else 1.0)


def use_engine(plan: Plan, use: Callable[[BuiltEngine], T], model: str, **settings: Any) -> T:
    """Build an engine, pass it to ``use``, and close it. Return the result of ``use``.

    Runs in a thread of its own, because closing an engine ends the MLX streams of its thread.

    Args:
        settings: fields of :class:`EngineArgs`.
    """
    if "num_gpu_blocks_override" not in settings:
        settings["kv_cache_memory_bytes"] = plan.kv_cache_bytes

    def run() -> T:
        engine = build_engine(EngineArgs(model=model, **settings))
        try:
            return use(engine)
        finally:
            engine.close()

    return in_thread(run)


def use_plain_model(use: Callable[[loader.LoadedModel], T], model: str) -> T:
    """Load a model without the engine, and pass it to ``use``. Return the result of ``use``."""
    return in_thread(lambda: use(load_plain_model(model)))


def load_plain_model(model: str) -> loader.LoadedModel:
    """Load a model as an mlx-lm model, without the engine."""
    return loader.load(EngineArgs(model=model), device_info())


def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a new thread. Return its result or raise its error.

    Before the return, releases the memory of models that the function no longer uses.
    """
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(function).result()
    gc.collect()
    mx.clear_cache()
    return result


def random_prompts(num_prompts: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens. Times do not depend on a prompt's contents."""
    first = min(_SPECIAL_TOKENS, vocab_size // 2)
    return np.random.default_rng(seed).integers(first, vocab_size, (num_prompts, length)).tolist()


def run_random(
    engine: BuiltEngine, num_requests: int, prompt_tokens: int, output_tokens: int, *, seed: int
) -> OfflineRun:
    """Run greedy requests with prompts of random tokens, and return their times and tokens.

    Each output has ``output_tokens`` tokens, because EOS is ignored. Raises RuntimeError if a request fails.
    """
    prompts = random_prompts(num_requests, prompt_tokens, engine.core.config.model.vocab_size, seed)
    return run_requests(engine, prompts, [output_tokens] * num_requests)


def mlx_lm_run(model: nn.Module, prompts: Sequence[list[int]], output_len: int) -> OfflineRun:
    """Generate greedily with mlx-lm: with its batch generator, or for one prompt with its loop for one sequence."""
    if len(prompts) == 1:
        return _mlx_lm_single(model, prompts[0], output_len)
    generator = BatchGenerator(model, max_tokens=output_len, stream=mx.default_stream(mx.default_device()))
    start = time.perf_counter()
    places = {uid: place for place, uid in enumerate(generator.insert(list(prompts)))}
    token_ids: list[list[int]] = [[] for _ in prompts]
    first_token = [0.0] * len(prompts)
    try:
        while any(len(ids) < output_len for ids in token_ids):
            for response in generator.next_generated():
                place = places[response.uid]
                if not token_ids[place]:
                    first_token[place] = time.perf_counter() - start
                token_ids[place].append(int(response.token))
    finally:
        generator.close()
    return OfflineRun(time.perf_counter() - start, first_token, token_ids, [0] * len(prompts))


def _mlx_lm_single(model: nn.Module, prompt: list[int], output_len: int) -> OfflineRun:
    start = time.perf_counter()
    token_ids: list[int] = []
    first_token = 0.0
    stream = mx.default_stream(mx.default_device())
    for token, _ in generate_step(mx.array(prompt), model, stream, max_tokens=output_len):
        token_ids.append(int(token))
        first_token = first_token or time.perf_counter() - start
    return OfflineRun(time.perf_counter() - start, [first_token], [token_ids], [0])


def decode_seconds(run: OfflineRun) -> float:
    """Return the mean time of a decode step in seconds, after all requests have a first token."""
    steps = max(map(len, run.token_ids)) - 1
    return (run.seconds - max(run.first_token_seconds)) / max(steps, 1)
