"""Measures the time of steps on a real engine and fits a linear model.

    python -m tools.benchmarks.step_time_model measure tools/benchmarks/steps_demo.json
        (a minute or two; writes the measurements)
    python -m tools.benchmarks.step_time_model fit tools/benchmarks/steps_demo.json

A step's time is modelled as a constant, plus costs per packed row, per (query row, visible key) pair of chunks, and per
decode. The measured contexts are too short to show the effect of a decode's length. The fit minimizes squared relative
errors with coefficients that are not negative.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

STEPS_FILE = Path(__file__).resolve().parent / "steps_demo.json"


@dataclass(frozen=True)
class StepTimeModel:
    """Linear model of a step's time: seconds for the step, and for each row, (row, key) pair of chunks, and decode."""

    per_step: float
    per_row: float
    per_prefill_pair: float
    per_decode: float

    def seconds(self, num_rows: int, prefill_work: int, num_decodes: int) -> float:
        return (
            self.per_step
            + self.per_row * num_rows
            + self.per_prefill_pair * prefill_work
            + self.per_decode * num_decodes
        )


def _features(steps: list[dict[str, float]]) -> np.ndarray:
    return np.array(
        [[1.0, s["num_decodes"] + s["num_prefill_tokens"], s["prefill_work"], s["num_decodes"]] for s in steps]
    )


def fit(steps: list[dict[str, float]]) -> tuple[StepTimeModel, np.ndarray]:
    """Return the fitted model and its relative error on each step.

    Args:
        steps: fields of :class:`tools.benchmarks.engine_timing.TimedStep`.
    """
    features = _features(steps)
    seconds = np.array([s["seconds"] for s in steps])
    used = np.arange(features.shape[1])
    while True:  # Drop columns with negative coefficients. For four columns, this replaces a constrained solver.
        weighted = features[:, used] / seconds[:, None]
        scale = np.linalg.norm(weighted, axis=0)
        coefficients = np.linalg.lstsq(weighted / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (coefficients >= 0).all():
            break
        used = np.delete(used, coefficients.argmin())
    all_coefficients = np.zeros(features.shape[1])
    all_coefficients[used] = coefficients
    return StepTimeModel(*all_coefficients.tolist()), features @ all_coefficients / seconds - 1


def load(path: Path = STEPS_FILE) -> StepTimeModel:
    """Return the model fitted to measured steps. Prints the fit."""
    data = json.loads(path.read_text())
    model, errors = fit(data["steps"])
    print(f"step time of {data['model']} ({data['machine']}), fitted to {len(errors)} measured steps:")
    print(
        f"  {model.per_step * 1e3:.1f} ms + {model.per_row * 1e3:.3f} ms a row + {model.per_prefill_pair * 1e6:.3f} us "
        f"a (row, key) pair of chunks + {model.per_decode * 1e3:.2f} ms a decode"
    )
    percentiles = np.percentile(np.abs(errors), [50, 90])
    print(f"  relative error: median {percentiles[0]:.0%}, 90th percentile {percentiles[1]:.0%}")
    return model


def measure(path: Path, machine: str) -> None:
    """Measure steps of the demo model and write them to ``path``: chunks, batches of decodes, and both together.

    ``machine`` is the description of the machine to write with the measurements.
    """
    from tools.benchmarks.engine_timing import TimedEngine, random_prompt

    engine = TimedEngine("demo", enable_prefix_caching=False, max_num_batched_tokens=512, max_num_partial_prefills=1)
    engine.warm_up()
    scheduler = engine.core.scheduler
    unlimited = replace(scheduler.config, max_attention_work=1 << 62)
    rng = random.Random(0)
    for budget, length in ((32, 128), (128, 512), (512, 1536), (256, 512)):
        scheduler.config = replace(unlimited, max_num_batched_tokens=budget)
        engine.submit(f"chunks-{budget}", random_prompt(rng, length), 1)
        engine.run()
    scheduler.config = unlimited
    for batch, context in ((1, 16), (4, 64), (16, 24), (48, 8), (4, 512)):
        for i in range(batch):
            engine.submit(f"decode-{batch}-{context}-{i}", random_prompt(rng, context), 6)
        engine.run()
    for i in range(8):
        engine.submit(f"both-{i}", random_prompt(rng, 16), 20)
    engine.step()
    scheduler.config = replace(unlimited, max_num_batched_tokens=128)
    engine.submit("both-long", random_prompt(rng, 640), 1)
    engine.run()
    steps = [asdict(step) for step in engine.steps]
    path.write_text(json.dumps({"model": "demo", "machine": machine, "steps": steps}, indent=0) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("measure", "fit"))
    parser.add_argument("file", type=Path, nargs="?", default=STEPS_FILE)
    parser.add_argument("--machine", default="2 cores, Linux")
    args = parser.parse_args()
    if args.what == "measure":
        measure(args.file, args.machine)
    load(args.file)


if __name__ == "__main__":
    main()
