"""Measures the gain of drafts on a model with recurrent states, for several shares of right drafts.

    python -m tools.benchmarks.speculation_recurrent                    # a synthetic hybrid
    python -m tools.benchmarks.speculation_recurrent --model mamba      # or any other model

After a rejected draft, such a model recomputes the accepted drafts from the state before them. Two engines in one
process, one of them with speculation, alternate on the same requests. A first run gives the outputs. Drafts are the
known outputs, each token right with a given probability, so the drafts are synthetic. Without ``--model``, the weights
are synthetic too: random numbers in Qwen 3.5's architecture. As in a server, measured step times determine how many
drafts are tried. With ``--async-scheduling``, both engines plan steps asynchronously, the second one only
if that is faster than drafts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from metal_engine.device.blas.load import load_optimized_blas
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.core import EngineCore
from metal_engine.loading.build import build_engine
from metal_engine.request import Request
from metal_engine.scheduling.speculation.acceptance import SourceAcceptance
from metal_engine.scheduling.speculation.speculation import Speculation
from metal_engine.settings.args import EngineArgs
from tools.benchmarks.hybrid_chat import write_model
from tools.benchmarks.speculation import CHAT, Run, run

_CONFIG = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'


class KnownAnswers:
    """Source of drafts from known outputs. Implements :class:`metal_engine.scheduling.speculation.proposals.Proposer`.

    Args:
        answers: output tokens by prompt.
        rightness: probability that a draft is right if the drafts before it are right.
    """

    def __init__(self, answers: dict[tuple[int, ...], list[int]], rightness: float) -> None:
        self.acceptance = SourceAcceptance()
        self._answers = answers
        self._rightness = rightness
        self._random = random.Random(0)

    def begin_step(self) -> None:
        """Do nothing: drafts do not depend on the step."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        answer = self._answers.get(tuple(request.token_ids[: request.num_prompt_tokens]), [])
        drafts = answer[request.num_output_tokens : request.num_output_tokens + num_tokens]
        return [token_id ^ (self._random.random() > self._rightness) for token_id in drafts]

    def record_result(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Do nothing: results are not counted."""

    def forget(self, request_id: str) -> None:
        """Do nothing: no state of a request is stored."""


def propose(core: EngineCore, proposer: KnownAnswers) -> None:
    """Make an engine take its drafts from ``proposer``. Discard what it has measured about the gain of drafts."""
    scheduler = core.scheduler
    scheduler.speculation = Speculation(core.config.scheduler, scheduler.blocks, proposer, states=scheduler.states)


def compare(pair: tuple[BuiltEngine, BuiltEngine], streams: int, rightness: float, args: argparse.Namespace) -> int:
    """Print the gain of drafts that are right with probability ``rightness``. Return the number of wrong outputs."""
    without, speculating = pair
    texts = list(CHAT.values())
    encode = without.preparer.tokenizer.encode
    prompts = {str(i): encode(f"({i}) {texts[i % len(texts)]}") for i in range(streams)}
    plain = run(without, prompts, args.max_tokens)
    answers = {tuple(prompt): plain.answers[name] for name, prompt in prompts.items()}
    propose(speculating.core, KnownAnswers(answers, rightness))
    run(speculating, prompts, args.max_tokens)  # measures step times, as a server does in its first seconds
    runs: list[tuple[Run, Run]] = []
    for _ in range(args.repeats):
        runs.append((run(without, prompts, args.max_tokens), run(speculating, prompts, args.max_tokens)))
    ratio = statistics.median(p.tokens_per_second / o.tokens_per_second for p, o in runs)
    plain, ours = runs[-1]
    steps = speculating.core.metrics.num_steps
    print(
        f"{streams:7}  {rightness:9.2f}  {1e3 / plain.tokens_per_second:16.2f}  {1e3 / ours.tokens_per_second:7.2f}  "
        f"{ratio:5.2f}  {ours.step_tokens / streams:11.2f}  {ours.num_accepted:5} of {ours.num_drafts:5}"
        + (f"  {steps['ahead']} ahead, {steps['after']} after" if args.async_scheduling else ""),
        flush=True,
    )
    return sum(plain.answers[name] != ours.answers[name] for name in prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="checkpoint to use instead of the synthetic model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--rightness", type=float, nargs="+", default=[0.0, 0.5, 0.8, 0.9, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--async-scheduling", action="store_true")
    parser.add_argument("--speculative-config", default=_CONFIG)
    args = parser.parse_args()
    load_optimized_blas()  # before MLX is loaded
    with tempfile.TemporaryDirectory() as name:
        if args.model is None:
            write_model(Path(name))
        common: dict[str, Any] = {"model": args.model or name, "dtype": "float32", "max_num_seqs": max(args.streams)}
        common |= {"max_num_batched_tokens": 512, "async_scheduling": args.async_scheduling}
        plain = build_engine(EngineArgs(**common))
        pair = plain, build_engine(EngineArgs(**common, speculative_config=args.speculative_config))
        print("streams  rightness  ms/token without     with  ratio  tokens/step  accepted")
        num_different = sum(compare(pair, streams, p, args) for streams in args.streams for p in args.rightness)
    print(f"answers that differ: {num_different}")


if __name__ == "__main__":
    main()
