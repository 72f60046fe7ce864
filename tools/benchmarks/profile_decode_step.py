"""Profiles decode steps of 32 requests on the demo model: measures the time of each part of a step.

    python -m tools.benchmarks.profile_decode_step
    python -m tools.benchmarks.profile_decode_step --requests 1 --steps 100

Engines with and without `--async-scheduling` alternate, so that other load on the machine affects both. Parts are timed
by wrapping their functions. A part's time excludes the parts that it calls. "device" is the time that the engine's
thread waits: with asynchronous scheduling, the parts before it run while the device is busy.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from metal_engine.engine.async_engine import AsyncEngine, _Mailbox
from metal_engine.engine.engine_client import EngineClient
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.loading.build import build_engine
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from tools.benchmarks.engine_timing import random_prompt
from tools.fixtures.stepped_engine import SteppedCore

PARTS = {
    "schedule": "scheduler: token allotments",
    "pack": "conversion of the plan to NumPy arrays",
    "validate": "check of the batch",
    "upload": "index arrays to the device",
    "attention plan": "attention's units, their indices and masks",
    "model graph": "graph of the forward",
    "attention graph": "graph of attention and KV writes, of all layers",
    "sampling graph": "graph of sampling",
    "dispatch": "async_eval; on a CPU it returns when little work remains",
    "device": "waiting for the device",
    "read": "copy of tokens to the host",
    "update": "scheduler: processing of sampled tokens",
    "delivery": "outputs to the event loop",
    "other": "everything else in a step",
}
WAITING = ("dispatch", "device")
TURNS = 6


class Profile:
    """Measures the time of each part of a step, by wrapping the functions that belong to the part.

    The time of a part excludes other parts that its functions call.
    """

    def __init__(self) -> None:
        self._parts: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # time spent in nested parts of each open part

    def wrap(self, owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self._parts[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        setattr(owner, name, timed)

    def step(self, step: Callable[[], None]) -> dict[str, float]:
        """Run one step. Return the seconds of each part by name, of ``other`` work, and in ``total``."""
        self._parts.clear()
        self._inner = [0.0]
        start = time.perf_counter()
        step()
        total = time.perf_counter() - start
        return {**self._parts, "other": total - self._inner[0], "total": total}


def instrument(profile: Profile) -> None:
    """Wrap the functions of a step's parts in all engines of the process."""
    import mlx.core as mx

    from metal_engine.attention.portable import backend as portable
    from metal_engine.models.layer_cache import LayerCache
    from metal_engine.models.paged_model import PagedModel
    from metal_engine.runner import batch, model_runner, pending_step, step_sampling
    from metal_engine.scheduling.scheduler import Scheduler

    for owner, name, part in (
        (Scheduler, "schedule", "schedule"),
        (Scheduler, "update", "update"),
        (AsyncEngine, "_on_outputs", "delivery"),
        (batch.RequestTable, "pack", "pack"),
        (batch.PackedBatch, "validate", "validate"),
        (model_runner.ModelRunner, "_build", "upload"),
        (portable, "plan_work", "attention plan"),
        (PagedModel, "forward", "model graph"),
        (LayerCache, "attend", "attention graph"),
        (LayerCache, "_write", "attention graph"),
        (step_sampling.StepSampling, "build", "sampling graph"),
        (step_sampling.StepSampling, "result", "read"),
        (mx, "async_eval", "dispatch"),
        (pending_step.PendingStep, "wait", "device"),
        (model_runner.ModelRunner, "finish", "read"),
        (batch.RequestTable, "append_tokens", "read"),
    ):
        profile.wrap(owner, name, part)


class Answers:
    """Engine with requests in decode, stepped directly. Outputs go to the queues of an event loop, as in a server.

    Args:
        num_steps: the requests are long enough for twice this number of steps.
        ahead: True for asynchronous scheduling, which plans one step ahead.
        replay_decodes: value of the engine setting with this name.
    """

    def __init__(
        self, model: str, num_requests: int, num_steps: int, ahead: bool, replay_decodes: str = "never"
    ) -> None:
        self.steps: list[dict[str, float]] = []
        engine = build_engine(
            EngineArgs(
                model=model,
                dtype="float32",
                async_scheduling=ahead,
                replay_decodes=replay_decodes,
                num_gpu_blocks_override=num_requests * (80 + 3 * num_steps) // 16 + num_requests,
                max_num_batched_tokens=512,
                max_num_seqs=max(64, num_requests),
            )
        )
        self.core = engine.core
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._clients = AsyncEngine(EngineThread(lambda: engine))
        self._clients._loop = self._loop
        client = EngineClient(SteppedCore(self.core), engine.preparer.tokenizer, seed=0)
        self._clients._client = client
        rng = random.Random(0)
        params = SamplingParams(temperature=0.0, max_tokens=2 * num_steps + 40, ignore_eos=True)
        for i in range(num_requests):
            self._clients._queues[str(i)] = _Mailbox(0, max_unread=1000)
            prompt = random_prompt(rng, rng.randint(40, 80))
            client.submit(str(i), engine.preparer.prepare(prompt, params))
        while any(r.num_output_tokens < 2 for r in self.core.scheduler.requests.values()):
            self.step()

    def step(self) -> None:
        self._clients._on_outputs(self.core.step())


def print_table(by_mode: dict[bool, list[dict[str, float]]]) -> None:
    def median(steps: list[dict[str, float]], part: str) -> float:
        return 1e6 * statistics.median(step.get(part, 0.0) for step in steps)

    print("| part | one by one, us | one ahead, us | |")
    print("| --- | --- | --- | --- |")
    for part, what in PARTS.items():
        times = [median(by_mode[ahead], part) for ahead in (False, True)]
        print(f"| {part} | {times[0]:,.0f} | {times[1]:,.0f} | {what} |")
    for name, left_out in (("host", WAITING), ("total", ())):
        sums = [
            1e6 * statistics.median(s["total"] - sum(s.get(part, 0.0) for part in left_out) for s in by_mode[ahead])
            for ahead in (False, True)
        ]
        print(f"| **{name}** | {sums[0]:,.0f} | {sums[1]:,.0f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each engine, twice")
    args = parser.parse_args()
    if args.steps < TURNS:
        parser.error(f"--steps must be at least {TURNS}, one for each round")
    args.steps -= args.steps % TURNS

    answers = {ahead: Answers(args.model, args.requests, args.steps, ahead) for ahead in (False, True)}
    profile = Profile()

    def measure() -> dict[bool, list[dict[str, float]]]:
        """Return the times of both engines' steps, measured a few steps at a time in rotation."""
        by_mode: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for turn in range(TURNS):
            for ahead in (False, True) if turn % 2 else (True, False):
                by_mode[ahead] += [profile.step(answers[ahead].step) for _ in range(args.steps // TURNS)]
        return by_mode

    plain = {ahead: [step["total"] for step in steps] for ahead, steps in measure().items()}
    medians = {ahead: 1e6 * statistics.median(times) for ahead, times in plain.items()}
    print(f"{args.requests} requests, one token each; medians of {args.steps} steps.")
    print(
        f"Without wrapping: one by one {medians[False]:,.0f} us, one ahead {medians[True]:,.0f} us a step, ratio "
        f"{medians[True] / medians[False]:.3f}; means {1e6 * statistics.mean(plain[False]):,.0f} and "
        f"{1e6 * statistics.mean(plain[True]):,.0f} us, ratio "
        f"{statistics.mean(plain[True]) / statistics.mean(plain[False]):.3f}.\n"
    )
    instrument(profile)
    print_table(measure())


if __name__ == "__main__":
    main()
