"""Makes docs/dev/kernel_times.md: the model's predictions, and a comparison with published speeds."""

from __future__ import annotations

from collections.abc import Sequence

from . import facts
from .attention import WORKLOADS, Kernels, Workload, mlx, mlx_gathered, ours
from .facts import CHIPS, LLAMA_8B, Chip, Model, Published
from .model import Launch, limit, seconds

HEADER = """# Times of attention on Apple GPUs, by a model

Use this page to compare predicted times of attention in this engine and in MLX, on four Apple GPUs.
`python -m tools.metal_sim time --write` writes this page. **Nothing here is measured.** The slowest resource sets
the time of a launch. [kernels.md](kernels.md#times-by-a-model) has the model and its limits.

- *memory*: bytes over the bandwidth of memory and of the system level cache.
- *issue*: cycles of the compiled instructions over the issue rate, on the busiest core.
- *cache*, *core*: bytes over the rates of the cache that cores share, and of the path into a core.
- *latency*: iterations of the main loop, each of which waits for its loads.
"""


def attention_seconds(launches: Sequence[Launch], chip: Chip) -> float:
    """Return the time in seconds of launches that run one after another, including the time to dispatch them."""
    return sum(seconds(launch, chip) + facts.DISPATCH for launch in launches)


def step_seconds(work: Workload, model: Model, chip: Chip, attention: float, bits: float = 16) -> float:
    """Return the predicted time of a step in seconds, without host time.

    Args:
        attention: seconds of one layer's attention.
        bits: bits per weight, including scales.
    """
    rows = work.requests * work.query
    memory = (model.weights + model.head) * bits / 8 / (chip.bandwidth * facts.BANDWIDTH_SHARE)
    products = 2 * (model.weights * rows + model.head * work.requests)
    issue = products / (256 * chip.cores * chip.clock * facts.PRODUCT_SHARE)
    return max(memory, issue) + model.layers * (facts.LAUNCHES * facts.DISPATCH + attention)


def predicted(published: Published, kernels: Kernels) -> tuple[float, float]:
    """Return the predicted tokens per second of a published measurement, and attention's share of the step's time.

    The prediction is for MLX's attention over contiguous K and V.
    """
    query = published.tokens if published.is_prompt else 1
    work = Workload("", 1, query, published.tokens)
    attention = attention_seconds(mlx(work, published.model, published.chip, kernels), published.chip)
    total = step_seconds(work, published.model, published.chip, attention, published.bits)
    return query / total, published.model.layers * attention / total


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    lines = [columns, ["---"] * text_columns + ["---:"] * (len(columns) - text_columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _predictions(kernels: Kernels) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of two tables: the attention of one layer, and a whole step."""
    layers, steps = [], []
    for chip in CHIPS:
        for work in WORKLOADS:
            found = [make(work, LLAMA_8B, chip, kernels) for make in (ours, mlx_gathered, mlx)]
            times = [attention_seconds(launches, chip) for launches in found]
            cells = [
                f"{time * 1e6:,.0f} ({limit(launches, chip)})" for time, launches in zip(times, found, strict=True)
            ]
            name = f"{chip.name}, {work.name}"
            layers.append([name, *cells, f"{times[0] / times[1]:.2f}", f"{times[0] / times[2]:.2f}"])
            totals = [step_seconds(work, LLAMA_8B, chip, time) for time in times[:2]]
            shares = [LLAMA_8B.layers * time / total for time, total in zip(times, totals, strict=False)]
            tokens = work.requests * work.query
            steps.append(
                [name, *(f"{total * 1e3:,.1f}" for total in totals), *(f"{share:.0%}" for share in shares)]
                + [f"{tokens / total:,.0f}" for total in totals]
            )
    return layers, steps


def page(kernels: Kernels) -> str:
    """Return the text of docs/dev/kernel_times.md."""
    layers, steps = _predictions(kernels)
    compiled = [
        [
            name,
            *(
                f"{x:,.0f}"
                for x in (k.simds, k.resident, k.simds * k.resident, k.keys, k.cycles, k.cycles / k.keys, k.outside)
            ),
        ]
        for name, k in kernels.items()
    ]
    checks = []
    for p in facts.PUBLISHED:
        speed, share = predicted(p, kernels)
        what = f"{'prompt of' if p.is_prompt else 'decode at'} {p.tokens:,}"
        name = f"{p.chip.name}: [{p.engine}]({p.source}), {p.model.name}, {p.bits:g} bits, {what}"
        checks.append([name, f"{p.speed:,.1f}", f"{speed:,.1f}", f"{speed / p.speed:.2f}", f"{share:.0%}"])
    return "\n".join(
        [
            HEADER,
            f"## One layer of {LLAMA_8B.name}\n",
            "Microseconds of attention with 32 query heads, 8 KV heads and head_dim 128 in float16. The limit of\n"
            "the longest launch is in parentheses. *Gathered* is MLX's attention over K and V that two launches\n"
            "gathered from blocks. *Contiguous* is MLX's attention without a gather, as for a single request with its\n"
            "own cache. All requests of a batch have the same length, so MLX pads nothing.\n",
            _table(["", "this engine", "MLX, gathered", "MLX, contiguous", "to gathered", "to contiguous"], layers),
            f"## One step of {LLAMA_8B.name}\n",
            "All layers with weights in float16. M1 has too little memory for these weights. Host time is left out.\n",
            _table(
                ["", "this engine, ms", "MLX gathered, ms", "attention's share", "gathered", "tokens/s", "gathered"],
                steps,
            ),
            "## Published speeds\n",
            "Tokens per second of other engines, and the model's prediction with MLX's attention over contiguous K\n"
            "and V. No figures for M1 and M2 were found. Chips with the same cores take their place.\n",
            _table(["", "published", "predicted", "predicted / published", "attention's share"], checks),
            "## The compiled kernels\n",
            "Cycles of a scheduler, for one SIMD group.\n",
            _table(
                [
                    "kernel",
                    "SIMD groups",
                    "threadgroups on a core",
                    "SIMD groups on a core",
                    "keys of an iteration",
                    "cycles",
                    "cycles of a key",
                    "cycles outside the loop",
                ],
                compiled,
            ),
            "## Facts\n",
            _table(["fact", "value", "source"], facts.FACTS, text_columns=3),
        ]
    )
