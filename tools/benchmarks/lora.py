"""Measures the cost of LoRA adapters: steps with adapters, steps without, and steps of an engine without LoRA support.

    python -m tools.benchmarks.lora [--rounds 7] [--rows 16] [--adapters 8] [--rank 16] [--model demo]

Each round has three kinds of steps in rotation:

- `without`: an engine without LoRA support.
- `unused`: an engine with adapters, and requests without an adapter.
- `used`: the same engine, with requests of all adapters in each step.

Each kind first computes the requests' prompts, then decodes. Adapters are random and add to all linear layers of every
block. Prints one line of JSON: medians of a step in ms, and medians of the rounds' ratios to `without`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.loading.build import build_engine
from metal_engine.lora_adapter import Adapter
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write a random adapter in PEFT's format. ``shapes`` has the number of inputs and outputs of each module."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    tensors = {}
    for name, (inputs, outputs) in shapes.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = rng.normal(0, 0.02, shape).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def round_of(engine: BuiltEngine, adapters: list[Adapter | None], args: argparse.Namespace) -> tuple[float, float]:
    """Run ``args.rows`` requests, which use ``adapters`` in rotation. A None in the list means the base model.

    Returns:
        Total seconds of the steps with prompts, and median seconds of a decode step.
    """
    core = engine.core
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=args.steps + 2, ignore_eos=True)
    for i, adapter in enumerate(islice(cycle(adapters), args.rows)):
        prompt = rng.integers(1000, 9000, args.prompt).tolist()
        (prepared,) = engine.preparer.prepare_all([prompt], params, str(time.monotonic_ns()), adapter=adapter)
        core.add_request(str(i), prepared)
    prompts, decodes = 0.0, []
    while core.has_requests:
        start = time.perf_counter()
        outputs = core.step()
        seconds = time.perf_counter() - start
        assert all(output.error is None for output in outputs)
        if len(outputs) == args.rows and not any(output.finished for output in outputs):
            decodes.append(seconds)
        else:
            prompts += seconds
    return prompts, statistics.median(decodes[1:])


def engines(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, BuiltEngine, list[Adapter | None]]]:
    settings = {"max_num_seqs": args.rows, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    settings["max_num_partial_prefills"] = args.rows
    plain = build_engine(EngineArgs(model=args.model, **settings))
    yield "without", plain, [None]
    import mlx.nn as nn

    linear = {
        name: (module.weight.shape[1], module.weight.shape[0])
        for name, module in plain.core.runner._model.model.named_modules()  # type: ignore[attr-defined]
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    modules = {f"a{i}": write_adapter(folder / str(i), linear, args.rank, i) for i in range(args.adapters)}
    adapted = build_engine(EngineArgs(model=args.model, lora_modules=modules, **settings))
    yield "unused", adapted, [None]
    assert adapted.adapters is not None
    yield "used", adapted, list(adapted.adapters.adapters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    for name, default in (("rounds", 7), ("rows", 16), ("adapters", 8), ("rank", 16), ("steps", 12), ("prompt", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = list(engines(args, Path(folder)))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in kinds}
    for i in range(args.rounds + 1):
        # rotate, so that slow changes of the machine affect all kinds
        for name, engine, adapters in kinds[i % 3 :] + kinds[: i % 3]:
            times[name].append(round_of(engine, adapters, args))
    result: dict[str, object] = {name: getattr(args, name) for name in ("model", "rows", "adapters", "rank", "rounds")}
    for part, title in enumerate(("prompts", "decode")):
        # the first round is a warm-up
        of_kind = {name: [one[part] for one in pairs[1:]] for name, pairs in times.items()}
        result[f"{title}_ms"] = {name: round(1000 * statistics.median(one), 1) for name, one in of_kind.items()}
        ratios = {
            name: statistics.median(a / b for a, b in zip(of_kind[name], of_kind["without"], strict=True))
            for name in ("unused", "used")
        }
        result[f"{title}_ratio"] = {name: round(ratio, 3) for name, ratio in ratios.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
