"""Measures the gain or cost of a draft head, for several shares of right drafts, numbers of drafts and of streams.

    python -m tools.benchmarks.draft_heads FOLDER_WITH_THE_HEAD
    python -m tools.benchmarks.draft_heads FOLDER_WITH_THE_HEAD --right own 0 0.8 --drafts 3 --streams 1 16

Two engines in one process, one of them with the head, alternate on the same questions. Outputs are greedy and must be
equal. With ``--right own``, the head's own drafts are used. Otherwise they are replaced by tokens of the known outputs,
each right with a given probability. The head and the LM head still run, so the measured costs include the head's.
Drafts from n-grams are off.

Elapsed and CPU times are relative to the run without drafts. They cover prompts and outputs. CPU times are comparable
even if other programs use the machine. The engine chooses the number of drafts by elapsed time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.loading.build import build_engine
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.scheduling.speculation.speculation import Speculation
from metal_engine.settings.args import EngineArgs
from tools.benchmarks.speculation import CHAT, Run, run

if TYPE_CHECKING:
    import mlx.core as mx

    from metal_engine.runner.batch import RequestTable
    from metal_engine.runner.drafting import DraftTask

Answers = dict[tuple[int, ...], list[int]]
_NO_LOOKUPS = 64


@contextmanager
def drafts_right(answers: Answers, rightness: float) -> Iterator[None]:
    """Within this context, replace the head's drafts by known outputs, each token right with the given probability.

    Args:
        answers: output token ids by the token ids of the prompt.
        rightness: probability that a draft equals the known output.
    """
    import mlx.core as mx

    from metal_engine.runner import head_drafter

    rng, sample_drafts = random.Random(0), head_drafter.sample_drafts

    def replaced(table: RequestTable, tasks: Sequence[DraftTask], logits: mx.array) -> mx.array:
        tokens = []
        for task in tasks:
            known = table.token_ids(task.index, len(task.drafts)).tolist()
            num_prompt_tokens = table.num_prompt_tokens(task.index)
            rest = answers[tuple(known[:num_prompt_tokens])][len(known) - num_prompt_tokens :]
            tokens.append((rest[0] if rest else 0) ^ (rng.random() >= rightness))
        return mx.depends([mx.array(tokens, mx.int32)], [sample_drafts(table, tasks, logits)])[0]

    head_drafter.sample_drafts = replaced  # type: ignore[assignment]
    try:
        yield
    finally:
        head_drafter.sample_drafts = sample_drafts


def restart(engine: BuiltEngine) -> None:
    """Discard what an engine has measured about drafts: step times and acceptance."""
    core, scheduler = engine.core, engine.core.scheduler
    speculative = core.config.scheduler.speculative
    assert speculative is not None
    proposer = make_proposer(speculative)
    scheduler.speculation = Speculation(core.config.scheduler, scheduler.blocks, proposer, states=scheduler.states)


def timed(engine: BuiltEngine, groups: list[dict[str, list[int]]], max_tokens: int) -> tuple[Run, float]:
    """Run groups of prompts in sequence. Return the results and the CPU time in seconds."""
    began, done = time.process_time(), Run()
    for prompts in groups:
        part = run(engine, prompts, max_tokens)
        done.answers |= part.answers
        done.seconds += part.seconds
        done.num_drafts += part.num_drafts
        done.num_accepted += part.num_accepted
        done.steps += part.steps
    return done, time.process_time() - began


class Questions:
    """Prompts of some requests, and their outputs without drafts.

    Args:
        streams: number of requests at once. With 1, each question waits for the answer to the question before.

    Attributes:
        groups: token ids of prompts by request id. A group's requests run at the same time.
        outputs: output token ids without drafts, by request id.
        by_prompt: output token ids without drafts, by the token ids of the prompt.
    """

    def __init__(self, without: BuiltEngine, streams: int, args: argparse.Namespace) -> None:
        texts = list(CHAT.values())[: args.questions]
        if streams > 1:  # each request has its own prefix
            texts = [f"({i}) {texts[i % len(texts)]}" for i in range(streams)]
        encode = without.preparer.tokenizer.apply_chat_template
        prompts = {str(i): encode([{"role": "user", "content": text}]) for i, text in enumerate(texts)}
        self.streams = streams
        self.groups = [prompts] if streams > 1 else [{name: prompt} for name, prompt in prompts.items()]
        self.outputs = timed(without, self.groups, args.max_tokens)[0].answers
        self.by_prompt = {tuple(prompts[name]): output for name, output in self.outputs.items()}


def compare(
    engines: tuple[BuiltEngine, BuiltEngine], questions: Questions, right: str, args: argparse.Namespace
) -> tuple[str, int]:
    """Run the questions on both engines in rotation. Return a row of the table, and the number of outputs that differ.

    Args:
        engines: engine without drafts, and engine with the head.
        right: probability that a draft is right, or "own" for the head's own drafts.
    """
    without, drafting = engines
    groups = questions.groups
    restart(drafting)
    turns = []
    with nullcontext() if right == "own" else drafts_right(questions.by_prompt, float(right)):
        if not args.cold:
            timed(drafting, groups, args.max_tokens)  # measures step times, as a server does in its first minute
        for turn in range(args.repeats):
            order = (drafting, without) if turn % 2 else (without, drafting)
            done = {id(engine): timed(engine, groups, args.max_tokens) for engine in order}
            turns.append((*done[id(without)], *done[id(drafting)]))
    elapsed = statistics.median(ours.seconds / plain.seconds for plain, _, ours, _ in turns)
    cpu = sorted(ours / plain for _, plain, _, ours in turns)
    ours = turns[-1][2]
    row = (
        f"{elapsed:5.2f}  {statistics.median(cpu):8.3f}  {cpu[0]:8.3f} to {cpu[-1]:5.3f}  "
        f"{ours.step_tokens / questions.streams:11.2f}  {ours.num_accepted:5} of {ours.num_drafts:5}"
    )
    return row, sum(ours.answers[name] != output for name, output in questions.outputs.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("head", help="file or folder of the draft head")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--right", nargs="+", default=["own", "0", "0.5", "0.8"], help="probabilities, or own")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3], help="largest number of drafts")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--questions", type=int, default=6, help="number of different questions, at most 6")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--cold", action="store_true", help="begin with an engine that has measured nothing")
    args = parser.parse_args()
    common: dict[str, Any] = {"model": args.model, "dtype": "float32", "max_num_seqs": 16}
    common |= {"num_gpu_blocks_override": 600, "max_num_batched_tokens": 512}
    without = build_engine(EngineArgs(**common))
    config = {"method": "mtp", "model": args.head, "prompt_lookup_min": _NO_LOOKUPS}
    questions = [Questions(without, streams, args) for streams in args.streams]
    num_different = 0
    print("streams  right  drafts   time  CPU time  least to greatest  tokens/step  accepted", flush=True)
    for num_drafts in args.drafts:
        speculative = json.dumps(config | {"num_speculative_tokens": num_drafts})
        engines = without, build_engine(EngineArgs(**common, speculative_config=speculative))
        for one in questions:
            for right in args.right:
                row, different = compare(engines, one, right, args)
                num_different += different
                print(f"{one.streams:7}  {right:>5}  {num_drafts:6}  {row}", flush=True)
    print(f"outputs that differ: {num_different}")


if __name__ == "__main__":
    main()
