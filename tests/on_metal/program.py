"""Runs decode steps in several ways, in a process of its own: ``python -m tests.on_metal.program WAYS``.

``WAYS`` is JSON: arguments of :func:`decode` by the name of a way. On a Mac the steps run on its GPU, and elsewhere on
the fake GPU, which computes no numbers. Prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

from metal_engine.device.command_buffers import MAX_MB, MAX_OPS
from tools.fake_gpu import FakeGpuSettings, install

GPU = None if sys.platform == "darwin" else install()  # must come before MLX is loaded
if GPU is not None:
    GPU.configure(FakeGpuSettings(max_ops=int(os.environ[MAX_OPS]), max_mb=int(os.environ[MAX_MB]), kernel_us=5.0))

import mlx.core as mx  # noqa: E402

from metal_engine.runner.dispatch import choose_dispatch  # noqa: E402
from tests.support.memory import settled_memory  # noqa: E402
from tools.fake_gpu.workload import SMOLLM2, Workload, make_engine  # noqa: E402

# 24 layers of 17 kernels. An array of keys or values takes 16 MiB, and the rest of a step much less.
_CONFIG = SMOLLM2 | {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_CONFIG |= {"vocab_size": 256}
_WORKLOAD = Workload(num_requests=4, num_layers=24, num_blocks=4096, config=_CONFIG, max_tokens=400)
_NUM_STEPS = 20
_NUM_COMPARED = 16  # tokens of each request: the last steps may still be in flight


def decode(ahead: bool, queued: bool, replay: bool) -> dict[str, Any]:
    """Run decode steps.

    Returns:
        ``tokens``: output tokens of each request. ``peak_arrays``: peak of the memory beyond the memory at the start,
        in arrays of the cache. ``replayed``: number of replayed steps.
    """
    mx.random.seed(0)
    engine = make_engine(_WORKLOAD, ahead=ahead, replay=replay, allow_queued_dispatch=queued)
    for _ in range(4):
        engine.step()
    held = settled_memory()
    for _ in range(_NUM_STEPS):
        engine.step()
    peak = mx.get_peak_memory() - held
    requests = engine.scheduler.requests.values()
    return {
        "tokens": [request.token_ids[request.num_prompt_tokens :][:_NUM_COMPARED] for request in requests],
        "peak_arrays": peak / engine.runner.pool.smallest_array_bytes,  # type: ignore[attr-defined]
        "replayed": engine.metrics.num_decode_forwards["replayed"],
    }


def choose() -> dict[str, Any]:
    """Return the choice of dispatch at the start, and whether the runner is as before."""
    mx.random.seed(0)
    engine = make_engine(replace(_WORKLOAD, num_requests=0), ahead=True, replay=True)
    runner: Any = engine.runner
    config = replace(engine.config, device=replace(engine.config.device, kind="metal"))
    dispatch = choose_dispatch(runner, config)
    return {"dispatch": dispatch, "is_queued": runner.allow_queued_dispatch, "refusal": runner.replay_refusal}


if __name__ == "__main__":
    results = {name: decode(**arguments) for name, arguments in json.loads(sys.argv[1]).items()}
    print(json.dumps(results | {"choice": choose()}))
