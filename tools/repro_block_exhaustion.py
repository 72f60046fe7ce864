"""Fill the KV pool on purpose, and check that it was full and that no output changed.

    python tools/repro_block_exhaustion.py             # less than a minute on two CPU cores
    python tools/repro_block_exhaustion.py --num-prompts 160 --max-tokens 48 --max-num-seqs 64

The prompts run first with ample blocks, then in a pool that is too small: ``--pool-fraction`` of the blocks that the
running requests together need at their end. Every pair of outputs is compared. Two outputs are equal if they have the
same tokens, or if the logits of the first differing tokens are closer than rounding can distinguish
(tools/compare/equal_outputs.py).

The exit status is 0 if the small pool was full and preempted requests, the ample pool preempted no request, and all
outputs are equal. Otherwise, it is 1.
"""

# ruff: noqa: E402  (the imports below may exist only in the project's own Python)
from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("mlx") is None:
    # This Python lacks the engine's packages. Use the environment that `make` has made.
    own_python = ROOT / ".venv" / "bin" / "python"
    if not own_python.is_file() or Path(sys.prefix) == ROOT / ".venv":
        sys.exit(f"{sys.executable} lacks metal-engine's packages: run `make serve` once, then run this tool again")
    os.execv(own_python, [str(own_python), *sys.argv])

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(ROOT))

from metal_engine import LLM, SamplingParams
from tools.compare.equal_outputs import Comparison, compare_outputs

BLOCK_SIZE = 16
KINDS = ("chat question", "passage to summarize", "code to complete", "raw continuation")

SUBJECTS = ["tides", "bridges", "bread", "glaciers", "violins", "bees", "maps", "volcanoes", "clocks", "whales"]
SENTENCES = [
    "The harbour was quiet and the first boats came in slowly with their lamps still lit.",
    "Nobody had expected the letter, and yet everyone knew at once what it would say.",
    "At the edge of the field stood an old mill whose wheel had not turned for years.",
    "Die Straße führt am Fluss entlang, vorbei an kleinen Gärten und roten Dächern.",
    "She measured twice, wrote the numbers down, and only then reached for the saw.",
    "雨の音を聞きながら、彼は古い本を読み続けた。",
]
CODE = """def {name}_{i}(items):
    total = 0
    for item in items:
        total += item.{name}
    return total

"""


def make_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Return ``count`` prompts as token ids. The four ``KINDS`` alternate. Prompts have tens to hundreds of tokens."""
    rng = random.Random(seed)

    def chat(text: str) -> list[int]:
        return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])

    def prompt(kind: int) -> list[int]:
        subject = rng.choice(SUBJECTS)
        if kind == 0:
            return chat(f"What should a beginner know about {subject}? Answer in {rng.randint(2, 9)} sentences.")
        if kind == 1:
            passage = " ".join(rng.choice(SENTENCES) for _ in range(rng.randint(4, 12)))
            return chat(f"Summarize this for someone who loves {subject}: {passage}")
        if kind == 2:
            functions = "".join(CODE.format(name=subject, i=i) for i in range(rng.randint(1, 6)))
            return llm.tokenizer.encode(functions + f"def {subject}_average(items):")
        return llm.tokenizer.encode(f"{rng.choice(SENTENCES)} {rng.choice(SENTENCES)} And the {subject}")

    return [prompt(i % len(KINDS)) for i in range(count)]


def pool_size(prompts: Sequence[list[int]], max_tokens: int, max_num_seqs: int, fraction: float) -> int:
    """Return the number of blocks of the small pool.

    The small pool has ``fraction`` of the blocks that the ``max_num_seqs`` largest requests together need at their end.
    It has at least the blocks of the largest request, which could not run otherwise.
    """
    final = sorted((-(-(len(p) + max_tokens - 1) // BLOCK_SIZE) for p in prompts), reverse=True)
    return max(final[0], int(fraction * sum(final[:max_num_seqs])))


@contextmanager
def live_view(llm: LLM, title: str, console: Console, guess: float = 0.0) -> Iterator[None]:
    """Show block usage, request counts and the time left until the ``with`` statement ends.

    If the console is not a terminal, prints only one line at the start and one at the end.

    Args:
        guess: expected seconds, used until enough requests have ended for an estimate.
    """
    stop = threading.Event()
    start = time.monotonic()
    most_open = 0

    def time_left(num_open: int) -> str:
        nonlocal most_open
        most_open = max(most_open, num_open)
        num_ended, elapsed = most_open - num_open, time.monotonic() - start
        total = elapsed * most_open / num_ended if num_ended else guess
        left = f"about {max(total - elapsed, 1):.0f} s left" if total else "no estimate yet"
        return f"{num_ended} of {most_open} answers, {elapsed:.0f} s, {left}"

    def draw() -> Group:
        stats = llm.stats
        usage = stats.num_used_blocks / stats.num_blocks
        counts = Text(
            f"  running {stats.num_running:4d}   waiting {stats.num_waiting:4d}   "
            f"preemptions {stats.num_preemptions:5d}"
        )
        blocks = Text(f"  blocks {stats.num_used_blocks}/{stats.num_blocks} ({usage:.0%})")
        ended = Text(f"  {time_left(stats.num_running + stats.num_waiting)}")
        bar = ProgressBar(total=stats.num_blocks, completed=stats.num_used_blocks, width=60)
        return Group(Text(title, style="bold"), bar, blocks, counts, ended)

    if not console.is_terminal:
        console.print(title)
    with Live(draw(), console=console, auto_refresh=False, transient=True) as live:

        def redraw() -> None:
            while not stop.wait(0.2):
                live.update(draw(), refresh=True)

        thread = threading.Thread(target=redraw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
    console.print(f"{title}: {time.monotonic() - start:.0f} s")


def compare_all(model_name: str, prompts: Any, ample: Any, tight: Any) -> list[Comparison]:
    """Compare pairs of outputs. Pairs that differ are checked with a separate copy of the model."""
    reference: list[Any] = []

    def model() -> Any:
        if not reference:
            from metal_engine.checkpoints.loader import load
            from metal_engine.device.blas.load import load_optimized_blas
            from metal_engine.device.info import device_info
            from metal_engine.settings.args import EngineArgs

            device = device_info(load_optimized_blas())
            reference.append(load(EngineArgs(model=model_name, dtype="float32"), device).model)
        return reference[0]

    return [
        Comparison() if a.token_ids == b.token_ids else compare_outputs(model(), p, a.token_ids, b.token_ids)
        for p, a, b in zip(prompts, ample, tight, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="as for `metal-engine serve` (default: demo)")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens each request generates")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="requests running at once")
    parser.add_argument(
        "--pool-fraction",
        type=float,
        default=0.35,
        help="size of the tight pool, relative to the running requests' blocks",
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=None, help="tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.num_prompts < 1 or args.max_tokens < 1 or not args.pool_fraction > 0:
        parser.error("--num-prompts, --max-tokens and --pool-fraction must be positive")
    console = Console()
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)

    def engine(num_blocks: int | None) -> LLM:
        return LLM(
            args.model,
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
        )

    # First ample blocks, up to the available memory, for the reference outputs.
    console.print(f"Loading {args.model}: twice, some seconds each")
    start = time.monotonic()
    with engine(None) as llm:
        prompts = make_prompts(llm, args.num_prompts, args.seed)
        with live_view(llm, f"1 of 2: ample pool, {llm.stats.num_blocks} blocks", console):
            results = [llm.generate(prompts, params, use_tqdm=False)]
        stats = [llm.stats]
    tight_blocks = pool_size(prompts, args.max_tokens, args.max_num_seqs, args.pool_fraction)
    # The tight run recomputes preempted requests and runs fewer requests per step.
    guess = 1.5 * (time.monotonic() - start)
    with engine(tight_blocks) as llm:
        with live_view(llm, f"2 of 2: tight pool, {tight_blocks} blocks", console, guess):
            results.append(llm.generate(prompts, params, use_tqdm=False))
        stats.append(llm.stats)
    comparisons = compare_all(args.model, prompts, *results)

    table = Table("", "ample pool", "tight pool", title=f"{args.num_prompts} prompts, {args.max_tokens} tokens each")
    table.add_row("blocks", *(str(s.num_blocks) for s in stats))
    table.add_row("peak usage", *(f"{s.peak_used_blocks / s.num_blocks:.1%}" for s in stats))
    table.add_row("preemptions", *(str(s.num_preemptions) for s in stats))
    console.print(table)
    same = sum(c.same for c in comparisons)
    near_ties = sum(c.equal and not c.same for c in comparisons)
    different = [i for i, c in enumerate(comparisons) if not c.equal]
    console.print(f"outputs: {same} the same, {near_ties} near ties, {len(different)} different")
    for i in different:
        console.print(f"  prompt {i} ({KINDS[i % len(KINDS)]}): {comparisons[i]}")

    failures = []
    if stats[1].num_preemptions == 0:
        failures.append("preemption never happened: the pool was not exhausted (lower --pool-fraction)")
    if stats[1].peak_used_blocks < stats[1].num_blocks:
        failures.append("the pool was never full (lower --pool-fraction)")
    if stats[0].num_preemptions:
        failures.append("the ample run preempted: it is no reference")
    if different:
        failures.append(f"{len(different)} outputs differ")
    for failure in failures:
        console.print(f"[bold red]FAILED[/]: {failure}")
    if not failures:
        console.print("[bold green]OK[/]: the pool was exhausted, requests were preempted, all outputs are equal")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
