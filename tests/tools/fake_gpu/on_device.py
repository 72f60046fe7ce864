"""What tests run in a process with the fake GPU: ``python -m tests.tools.fake_gpu.on_device NAME ARGUMENTS``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from tools.fake_gpu import FakeGpu, Settings, install

GPU: FakeGpu = install()  # before MLX is loaded

import mlx.core as mx  # noqa: E402

from metal_engine.engine.core import EngineCore  # noqa: E402
from tools.fake_gpu.measure import measure  # noqa: E402
from tools.fake_gpu.workload import SMOLLM2, Workload, make_engine  # noqa: E402

# 24 layers of 17 kernels: as many command buffers as with the demo model, at the limits below.
TINY = SMOLLM2 | {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
TINY |= {"vocab_size": 256}
WORKLOAD = Workload(num_requests=4, num_layers=24, num_blocks=4096, config=TINY, max_tokens=400)
NUM_STEPS = 20


def _engine(ahead: bool, settings: Settings, **runner: Any) -> EngineCore:
    GPU.configure(settings)
    engine = make_engine(WORKLOAD, ahead=ahead, **runner)
    arrays = [a for state in engine._runner._pool.states for a in state.arrays.values()]  # type: ignore[attr-defined]
    GPU.configure(replace(settings, pool_array_bytes=min(a.nbytes for a in arrays)))
    return engine


def timeline() -> dict[str, Any]:
    """Ten kernels of a millisecond, one after the other."""
    a = mx.ones((8, 8))
    mx.eval(a)
    GPU.configure(Settings(kernel_us=1000.0, max_ops=3))
    GPU.counts(reset=True)
    for _ in range(10):
        a = mx.abs(a)
    mx.eval(a)
    return asdict(GPU.counts())


def per_byte() -> dict[str, Any]:
    """A kernel that reads a MiB and writes one; a row written to 4 MiB in place; a row gathered from them."""
    a, pool, row = mx.zeros((1 << 18,)), mx.zeros((1 << 10, 1 << 10)), mx.zeros((1, 1 << 10))
    at = mx.array([3])
    mx.eval(a, pool, row, at)
    mx.synchronize()
    GPU.configure(Settings(us_per_mb=1024.0))
    times = []
    GPU.counts(reset=True)
    mx.eval(mx.abs(a))
    times.append(GPU.counts(reset=True).busy_ns)
    pool[at] = row
    mx.eval(pool)
    times.append(GPU.counts(reset=True).busy_ns)
    mx.eval(mx.take(pool, at, axis=0))
    times.append(GPU.counts(reset=True).busy_ns)
    return {"us": [round(time / 1000) for time in times]}


def donation() -> dict[str, Any]:
    """Writes to an array that nobody else has, that Python has, and that an unfinished kernel reads."""
    copies = []

    def written(array: mx.array) -> mx.array:
        array[mx.array([1])] = 2.0
        return array

    GPU.configure(Settings())
    for case in ("own", "held", "read"):
        array = mx.zeros((64, 64))
        mx.eval(array)
        mx.synchronize()
        GPU.counts(reset=True)
        held = array.reshape(array.shape) if case == "held" else None
        if case == "read":
            with GPU.held():
                mx.async_eval(mx.abs(array))
                array = written(array)
                mx.async_eval(array)
                copies.append(GPU.counts().copies)
        else:
            array = written(array)
            mx.eval(array)
            copies.append(GPU.counts().copies)
        del held
    return {"copies": copies}


def decode(ahead: bool = False, max_ops: int = 24, max_mb: int = 4096, hold: bool = False) -> dict[str, Any]:
    """Steps of answers under way; ``hold``: somebody keeps the pool's arrays as each step finds them."""
    engine = _engine(ahead, Settings(kernel_us=5.0, max_ops=max_ops, max_mb=max_mb))
    held: list[Any] = []

    def before_step(step: int) -> None:
        held[:] = [engine._runner._pool.snapshot()] if hold else []  # type: ignore[attr-defined]

    for _ in range(3):
        engine.step()
    measured = measure(GPU, engine, NUM_STEPS, before_step)
    array_bytes = GPU.settings.pool_array_bytes
    return {
        **asdict(measured.counts),
        "commits_per_step": measured.counts.commits / NUM_STEPS,
        "peak_arrays": measured.peak_bytes / array_bytes,
        "num_arrays": 2 * WORKLOAD.num_layers,
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
