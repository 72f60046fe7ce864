"""Functions that tests run on the fake GPU.

``python -m tests.tools.fake_gpu.on_device NAME ARGUMENTS`` runs one function. Without arguments, the command runs the
calls on stdin: a JSON list ``[NAME, ARGUMENTS]`` per line.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import sys
import traceback
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tools.fake_gpu import FakeGpu, FakeGpuSettings, install

GPU: FakeGpu = install()  # must come before MLX is loaded

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from metal_engine.attention import choice, tuning  # noqa: E402
from metal_engine.cli.banner import startup_rows  # noqa: E402
from metal_engine.device.command_buffers import kernels_of_step  # noqa: E402
from metal_engine.kv_cache.pool import StatePool  # noqa: E402
from metal_engine.kv_cache.rows import step_rows  # noqa: E402
from metal_engine.loading.build import build_engine  # noqa: E402
from metal_engine.models.paged_model import PagedModel  # noqa: E402
from metal_engine.runner.dispatch import choose_dispatch  # noqa: E402
from metal_engine.runner.model_runner import ModelRunner  # noqa: E402
from metal_engine.runner.pending_step import PendingStep  # noqa: E402
from metal_engine.sampling_params import SamplingParams  # noqa: E402
from metal_engine.scheduling.scheduler import Scheduler  # noqa: E402
from metal_engine.settings.args import EngineArgs  # noqa: E402
from tests.support.checkpoint_files import VOCAB_SIZE, write_checkpoint  # noqa: E402
from tools.fake_gpu import host as of_host  # noqa: E402
from tools.fake_gpu.measure import measure  # noqa: E402
from tools.fake_gpu.workload import HYBRID, SMOLLM2, Workload, make_engine, make_model, prepare  # noqa: E402
from tools.fixtures.architectures import configuration  # noqa: E402
from tools.fixtures.stepped_engine import SteppedEngine  # noqa: E402

# 24 layers of 17 kernels, which give as many command buffers as the demo model at the limits below.
TINY = SMOLLM2 | {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
TINY |= {"vocab_size": 256}
WORKLOAD = Workload(num_requests=4, num_layers=24, num_blocks=4096, config=TINY, max_tokens=400)
TINY_HYBRID = HYBRID | {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 256}
HYBRID_WORKLOAD = replace(WORKLOAD, num_layers=16, config=TINY_HYBRID)
NUM_STEPS = 12


def _engine(ahead: bool, settings: FakeGpuSettings, workload: Workload = WORKLOAD, **runner: Any) -> SteppedEngine:
    GPU.configure(settings)
    engine = make_engine(workload, ahead=ahead, **runner)
    pool: StatePool = engine.runner.pool  # type: ignore[attr-defined]
    GPU.configure(replace(settings, pool_array_bytes=pool.smallest_array_bytes))
    return engine


def timeline() -> dict[str, Any]:
    """Run ten dependent kernels of one millisecond each."""
    a = mx.ones((8, 8))
    mx.eval(a)
    GPU.configure(FakeGpuSettings(kernel_us=1000.0, max_ops=3))
    GPU.counts(reset=True)
    for _ in range(10):
        a = mx.abs(a)
    mx.eval(a)
    return asdict(GPU.counts())


def per_byte() -> dict[str, Any]:
    """Run a kernel that reads and writes one MiB, an in-place write of one row to 4 MiB, and a gather of one row."""
    a, pool, row = mx.zeros((1 << 18,)), mx.zeros((1 << 10, 1 << 10)), mx.zeros((1, 1 << 10))
    at = mx.array([3])
    mx.eval(a, pool, row, at)
    mx.synchronize()
    GPU.configure(FakeGpuSettings(us_per_mb=1024.0))
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
    """Write to an array with no other reference, to one held by Python, and to the input of a running kernel."""
    copies = []

    def written(array: mx.array) -> mx.array:
        array[mx.array([1])] = 2.0
        return array

    GPU.configure(FakeGpuSettings())
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


def decode(
    ahead: bool = False,
    behind: bool = False,
    max_ops: int = 24,
    max_mb: int = 4096,
    late: bool = False,
    hold: bool = False,
    replay: bool = False,
    hybrid: bool = False,
) -> dict[str, Any]:
    """Run decode steps.

    Args:
        late: True for a late device. Otherwise, kernels take 5 us, so the device waits for the host.
        hold: True to keep a reference to the pool's arrays during each step.
    """
    settings = FakeGpuSettings(kernel_us=0.0 if late else 5.0, max_ops=max_ops, max_mb=max_mb, is_late=late)
    workload = HYBRID_WORKLOAD if hybrid else WORKLOAD
    engine = _engine(ahead, settings, workload, allow_queued_dispatch=behind, replay=replay)
    held: list[Any] = []

    def before_step(step: int) -> None:
        held[:] = [engine.runner.pool.snapshot()] if hold else []  # type: ignore[attr-defined]

    for _ in range(3):
        engine.step()
    engine.metrics.num_decode_forwards.clear()
    measured = measure(GPU, engine, NUM_STEPS, before_step)
    array_bytes, bytes_per_request = GPU.settings.pool_array_bytes, engine.runner.pool.bytes_per_request  # type: ignore[attr-defined]
    return {
        "forwards": engine.metrics.num_decode_forwards,
        **asdict(measured.counts),
        "commits_per_step": measured.counts.commits / NUM_STEPS,
        "peak_arrays": measured.peak_bytes / array_bytes,
        "peak_states": measured.peak_bytes / (WORKLOAD.num_requests * bytes_per_request) if hybrid else 0.0,
        "num_arrays": 2 * WORKLOAD.num_layers,
    }


def prefill(behind: bool) -> dict[str, Any]:
    """Run the chunks of a long prompt on a late device, most of which sample nothing, then the decode steps."""
    engine = _engine(True, FakeGpuSettings(max_ops=24, max_mb=4096, is_late=True), allow_queued_dispatch=behind)
    for request_id in list(engine.request_ids):
        engine.abort_request(request_id)
    while engine.has_requests:
        engine.step()
    prepared = prepare(engine, replace(WORKLOAD, prompt_len=400, max_tokens=10), 0)
    engine.scheduler.config = replace(engine.scheduler.config, max_num_batched_tokens=70)
    engine.add_request("long", prepared)
    GPU.counts(reset=True)
    num_steps = engine.num_steps
    while engine.has_requests:
        engine.step()
    return {**asdict(GPU.counts()), "num_steps": engine.num_steps - num_steps}


def choose(max_ops: int, num_blocks: int = 4096, replay: bool = False, hybrid: bool = False) -> dict[str, Any]:
    """Return the choices made for a model at its start, and counts of its steps, on a late device."""
    GPU.configure(FakeGpuSettings(max_ops=max_ops, max_mb=4096))
    workload = HYBRID_WORKLOAD if hybrid else WORKLOAD
    engine = make_engine(replace(workload, num_requests=0, num_blocks=num_blocks), ahead=True, replay=replay)
    runner: Any = engine.runner
    # Outside the check, because the extra memory of the first steps would hide what they copy.
    mx.eval(runner._model.model.parameters(), [list(state.arrays.values()) for state in runner.pool.states])
    mx.synchronize()
    GPU.configure(replace(GPU.settings, is_late=True, pool_array_bytes=runner.pool.smallest_array_bytes))
    GPU.counts(reset=True)
    config = replace(engine.config, device=replace(engine.config.device, kind="metal"))
    dispatch = choose_dispatch(runner, config)
    is_clean = not runner._steps and not runner._table._index_of
    found = {
        "dispatch": dispatch,
        "allow_queued_dispatch": runner.allow_queued_dispatch,
        "is_clean": is_clean,
        "replays": runner.replays,
    }
    num_traces = runner.replay.num_traces if replay else 0
    return found | {"pool_copies": GPU.counts().pool_copies, "num_traces": num_traces}


def order(behind: bool) -> dict[str, Any]:
    """Return the order of plans, dispatches, waits and token updates in three steps, as ``seen``.

    ``unfinished`` has, for each wait, how many command buffers of other steps were unfinished on the device after it.

    Args:
        behind: True if steps are dispatched while the previous step runs.
    """
    engine = _engine(True, FakeGpuSettings(kernel_us=5.0, max_ops=24, max_mb=4096), allow_queued_dispatch=behind)
    GPU.configure(replace(GPU.settings, is_late=True))
    seen: list[str] = []
    unfinished: list[int] = []

    def note(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append(what)
            return original(*args, **kwargs)

        setattr(owner, name, noted)

    note(Scheduler, "schedule", "plan")
    note(mx, "async_eval", "give")
    note(ModelRunner, "_build", "build")
    note(PendingStep, "wait", "wait")
    wait = PendingStep.wait

    def counted(step: PendingStep) -> None:
        wait(step)
        finished = GPU.counts().finished
        mx.synchronize()
        unfinished.append(GPU.counts().finished - finished)

    PendingStep.wait = counted  # type: ignore[method-assign]
    for _ in range(3):
        engine.step()
        seen.append("tokens")
    return {"seen": seen, "unfinished": unfinished}


def tune(folder: str, setting: str, start: int) -> dict[str, Any]:
    """Build and run a whole engine with a value of ``--attention-tuning``. Its files are in ``folder``.

    ``start`` is the number of the start. Results of equal calls are cached.

    Checks of numbers are skipped, because the fake GPU computes no numbers. Tuning uses the device's clock. The
    simulated GPU is ten times as slow as the fake GPU, so the test waits a tenth of its time.
    """
    GPU.configure(FakeGpuSettings(kernel_us=0.2, us_per_mb=50.0))
    choice.Tuner = partial(tuning.Tuner, clock=lambda: 1e-8 * GPU.counts().busy_ns)  # type: ignore[assignment, misc]
    tuning.STEPS = ((1, 16_383),), ((40, 0),)
    checks = (
        ("metal_engine.attention.choice", "try_kernel"),
        ("metal_engine.attention.tuning", "try_kernel"),
        ("metal_engine.models.check", "check_paged_model"),
        ("metal_engine.runner.replay_check", "check_replay"),
    )
    for module, name in checks:
        setattr(importlib.import_module(module), name, lambda *_, **__: None)
    config = TINY | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}
    checkpoint = Path(folder, "model")
    if not checkpoint.exists():
        write_checkpoint(checkpoint, config=config, dtype=mx.float16)
    args = EngineArgs(model=str(checkpoint), attention_tuning=setting, num_gpu_blocks_override=64, max_model_len=512)
    GPU.counts(reset=True)
    engine = build_engine(args)
    core = engine.core
    kinds = [str(cut) for cut in core.runner._backend.cuts.values()]
    for i in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        core.add_request(str(i), engine.preparer.prepare([1] * 30, params))
    num_tokens = 0
    while core.has_requests:
        num_tokens += sum(len(output.token_ids) for output in core.step())
    kernels = GPU.counts().kernels
    facts = startup_rows(core.config, "http://here", ("tiny",))
    engine.close()
    return {
        "cuts": kinds, "banner": facts.get("tuning"), "kernels": kernels, "tokens": num_tokens,
        "tuned": core.config.attention_layers.tuned,
    }  # fmt: skip


def host(hybrid: bool = False) -> dict[str, Any]:
    """Return the output of ``python -m tools.fake_gpu host`` for a few steps of a small model."""
    told = io.StringIO()
    args = {"requests": 4, "layers": 4 if hybrid else 2, "steps": 12, "kernel_us": 1.0}
    with redirect_stdout(told):
        status = of_host.run(
            GPU, Namespace(**args, hybrid=hybrid, enable_prefix_caching=hybrid, profile=None, no_figures=True)
        )
    return {"status": status, "told": told.getvalue().splitlines()}


class _OneKernel:
    """Attention as a single kernel for every shape."""

    def attend(self, q: mx.array, state: Any, **options: Any) -> mx.array:
        return mx.abs(q)[..., : state.spec.latent_dim or state.spec.v_head_dim]


def count_kernels_of_architectures() -> dict[str, list[int]]:
    """Return, by architecture, the kernels of a decode of its tiny model, and the estimate for its layers."""
    names = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3_text", "qwen3_moe", "gpt_oss", "mixtral")
    rows = step_rows(np.arange(1, 5, dtype=np.int32)[:, None], np.full(4, 3, np.int32), np.ones(4, np.int32), 16)
    found = {}
    for name in names:
        config = configuration(name)
        model = PagedModel(make_model(config, quantized=False))
        model.pool.allocate(8, 16)
        mx.eval(model.model.parameters())
        attention: Any = _OneKernel()
        mx.synchronize()
        GPU.counts(reset=True)
        mx.eval(model(mx.zeros((4,), mx.int32), rows, attention), model.pool.writes_done_marker())
        mx.synchronize()
        found[name] = [GPU.counts().kernels, kernels_of_step(config) or 0]
    return found


def run_calls() -> None:
    """Run the calls on stdin. Write a line with the result of each call, or with its error, to stdout."""
    results, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            reply = {"result": globals()[name](**arguments)}
        except Exception:  # noqa: BLE001
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=results, flush=True)
        gc.collect()
        mx.synchronize()
        mx.clear_cache()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        run_calls()
    else:
        print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
