"""Profiles a step by operation: the time of each operation when it is evaluated alone.

    python -m tools.benchmarks.profile_step [--model demo] [--num-requests 16] [--prompt-len 150]
        [--step prefill|decode]

Each operation is evaluated alone between two synchronisations, so operations that MLX would overlap or fuse are counted
separately. The last line compares the sum with the same step run as usual. Only the shares are meaningful. On a machine
with other load, ``--cpu-time`` with ``OPENBLAS_NUM_THREADS=1`` is steadier than wall-clock time. More BLAS threads
would spin while they wait.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.core import EngineCore
from metal_engine.loading.build import build_engine
from metal_engine.request import RequestStatus
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs

CLOCK: Callable[[], float] = time.perf_counter


class Clock:
    """Seconds and calls by the name of an operation. The time of a nested operation counts only for that operation."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any], also: Callable[..., Any] = lambda *_: ()) -> Any:
        """Return a function that calls ``function``, evaluates its result and adds the time to ``name``.

        Its arguments are evaluated before the time begins. ``also`` is called with the positional arguments. It returns
        arrays to evaluate in addition, before and after the call, for a function that changes arrays in place.
        """
        import mlx.core as mx

        def run(*args: Any, **kwargs: Any) -> Any:
            mx.eval([a for a in (*args, *kwargs.values()) if isinstance(a, mx.array)])
            mx.eval(also(*args))
            self._inner.append(0.0)
            start = CLOCK()
            result = function(*args, **kwargs)
            mx.eval(_arrays(result), also(*args))
            taken = CLOCK() - start
            self.seconds[name] += taken - self._inner.pop()
            self.calls[name] += 1
            self._inner[-1] += taken
            return result

        return run


def _arrays(result: Any) -> list[Any]:
    import mlx.core as mx

    return [a for a in (result if isinstance(result, tuple | list) else [result]) if type(a) is mx.array]


@contextmanager
def instrumented(clock: Clock) -> Iterator[None]:
    """Time the main operations of all models in this process until the context ends.

    These are linear layers, embeddings, RMSNorm, RoPE, KV writes, attention, Llama's SwiGLU and sampling. Their
    functions are replaced inside the context.
    """
    import mlx.nn as nn
    import mlx_lm.models.llama as llama

    from metal_engine.attention.portable.backend import PortableStep
    from metal_engine.kv_cache.pool import StatePool
    from metal_engine.models.cpu_ops import ProductRMSNorm, TableRoPE
    from metal_engine.models.layer_cache import LayerCache
    from metal_engine.runner import step_sampling

    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, label: str, **kwargs: Any) -> None:
        original = getattr(owner, name)
        replaced.append((owner, name, original))
        setattr(owner, name, clock.timed(label, original, **kwargs))

    def by_shape(owner: Any, label: str) -> None:
        original = owner.__call__

        def call(self: Any, x: Any) -> Any:
            out, inp = self.weight.shape
            return clock.timed(f"{label} {inp} -> {out}", original)(self, x)

        replaced.append((owner, "__call__", original))
        owner.__call__ = call

    # Operations are evaluated while the step is built. References from snapshots would then cause copies of the cache's
    # arrays.
    replaced.append((StatePool, "snapshot", StatePool.snapshot))
    StatePool.snapshot = lambda self: []
    by_shape(nn.Linear, "GEMM")
    replace(nn.Embedding, "as_linear", "LM head")
    replace(nn.Embedding, "__call__", "embedding")
    replace(nn.RMSNorm, "__call__", "RMSNorm")
    replace(ProductRMSNorm, "__call__", "RMSNorm")
    replace(nn.RoPE, "__call__", "RoPE")
    replace(TableRoPE, "__call__", "RoPE")
    replace(LayerCache, "update_and_fetch", "KV write", also=lambda cache, *_: tuple(cache._state.arrays.values()))
    replace(PortableStep, "attend", "attention")
    replace(llama, "swiglu", "SwiGLU")
    replace(step_sampling, "sample", "sampling")
    try:
        yield
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


def make_engine(args: argparse.Namespace) -> BuiltEngine:
    if args.plain:
        from metal_engine.device.blas.load import load_optimized_blas

        load_optimized_blas()
        from metal_engine.models import cpu_ops

        cpu_ops.REPLACEMENTS.clear()
        cpu_ops.use_faster_layers = lambda model: None
    limit = args.budget or max(2 * args.num_requests * args.prompt_len, 64)
    return build_engine(
        EngineArgs(
            model=args.model,
            max_num_batched_tokens=limit,
            max_num_partial_prefills=max(args.num_requests, 1),
            max_long_partial_prefills=1,
            max_attention_work=1 << 60,
            enable_prefix_caching=False,
        )
    )


def prepare(engine: BuiltEngine, args: argparse.Namespace, seed: int) -> None:
    """Add the requests. For a decode step, also run the step that computes their prompts."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=args.repeats + 3, ignore_eos=True)
    for i in range(args.num_requests):
        prompt = [rng.randrange(100, 40_000) for _ in range(args.prompt_len)]
        engine.core.add_request(f"{seed}-{i}", engine.preparer.prepare(prompt, params))
    if args.step == "decode":
        engine.core.step()


def drop(core: EngineCore, args: argparse.Namespace, seed: int) -> None:
    for i in range(args.num_requests):
        core.end_request(f"{seed}-{i}", RequestStatus.FINISHED_ABORTED)


def timed_step(core: EngineCore) -> float:
    start = CLOCK()
    core.step()
    return CLOCK() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--step", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=int, help="tokens per step (default: all prompts in one step)")
    parser.add_argument("--plain", action="store_true", help="mlx-lm's own operations, not models/cpu_ops.py")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of all threads instead of wall-clock time")
    args = parser.parse_args()
    if args.cpu_time:
        global CLOCK
        CLOCK = time.process_time
    engine = make_engine(args)
    core = engine.core
    prepare(engine, args, 0)  # warm up
    core.step()
    drop(core, args, 0)
    usual, clock = [], Clock()
    for seed in range(1, 1 + (args.repeats if args.step == "prefill" else 1)):
        prepare(engine, args, seed)
        repeats = 1 if args.step == "prefill" else args.repeats
        usual += [timed_step(core) for _ in range(repeats)]
        drop(core, args, seed)
        prepare(engine, args, 1000 + seed)
        with instrumented(clock):
            apart = [timed_step(core) for _ in range(repeats)]
        drop(core, args, 1000 + seed)
    steps = args.repeats
    print(f"{args.step} step of {args.num_requests} requests, {args.prompt_len} tokens each; per step:")
    total = sum(clock.seconds.values()) / steps
    for name, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        share = seconds / steps / total
        print(f"  {name:<20}{seconds / steps * 1e3:10.2f} ms{share:8.1%}{clock.calls[name] // steps:6} calls")
    print(f"  {'sum':<20}{total * 1e3:10.2f} ms")
    print(
        f"  run as usual: median {statistics.median(usual) * 1e3:.2f} ms; with each op alone {apart[-1] * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    main()
