"""Compares outputs with and without speculation, for single requests and for batches.

    python -m tools.benchmarks.speculation                    # everything
    python -m tools.benchmarks.speculation --streams 1        # prompt by prompt
    python -m tools.benchmarks.speculation --model TARGET --draft-model DRAFT --peer
    python -m tools.benchmarks.speculation --draft-model RANDOM --slowdown

Two engines in one process, one of them with speculation, alternate on the same requests: tasks that copy (edits,
answers from a context, code) and questions without copying. Outputs are greedy and must be equal.

For single requests, times cover only steps without prefill. Outputs with a loop are excluded, because repetitions are
easily predicted. For batches, throughput includes the prompts, and the number of outputs with a loop is printed.

With ``--peer``, mlx-lm computes the same prompts one at a time, without and with the same draft model. Both models must
then be directories, for example synthetic pairs written by ``tools/fixtures/export_mlx.py``.

With ``--slowdown``, the only figure is the time of all questions with speculation, relative to the time without. Use it
with drafts that are rejected, for example from a model with random weights (``export_mlx.py --random-weights``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.loading.build import build_engine
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs

_LETTER = """Dear Ms. Okafor, thank you for your order of 12 March. The two oak shelves left our workshop in Bremen \
this morning and should arrive on Thursday between nine and noon. Please check the parcels for damage before you sign. \
If a board is scratched, take a photograph and send it to service@example.com within seven days. Kind regards, Jonas"""
_REPORT = """The harbour was closed from 02:15 to 06:40 because of fog. Four container ships waited at anchor \
outside the breakwater: the Alma, the Corvus, the Selene and the Brightwater. The Corvus reported a fault in its \
steering gear at 03:05 and was towed to berth 9 by the tug Heron. Nobody was hurt. Traffic resumed at 06:40."""
_CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("balance is too low")
        self.balance -= amount
        return self.balance
"""
_TABLE = """name,city,joined,points
Ada,Lisbon,2021-04-02,310
Bruno,Turin,2019-11-23,275
Chidi,Lagos,2022-01-17,402
Dana,Haifa,2020-08-30,188
Emil,Aarhus,2018-05-09,530
"""
COPYING = {
    "letter, a name changed": f"Rewrite this letter with the name Ms. Okafor replaced by Mr. Lindqvist:\n\n{_LETTER}",
    "letter, repeated": f"Repeat the following letter word for word.\n\n{_LETTER}",
    "report, quoted": f"{_REPORT}\n\nQuote the sentences of this report about ships, exactly as they stand.",
    "report, repeated": f"Repeat this text exactly, and write nothing else:\n\n{_REPORT}",
    "code, a method added": f"Add a method `close` to this class and print the whole class:\n\n```python\n{_CODE}```",
    "table, repeated": f"Print this table again, unchanged:\n\n{_TABLE}",
}
CHAT = {
    "a question": "Why is the sky blue in the day and red in the evening?",
    "advice": "How do I keep basil alive in my kitchen over the winter?",
    "a story": "Tell me a short story about a lighthouse keeper and a whale.",
    "an explanation": "Explain to a child what a computer does when it is asked to add two numbers.",
    "a plan": "Plan a weekend in Lisbon for two people who like music and do not like crowds.",
    "an opinion": "Should a small company let people work from home? Give reasons for and against.",
}


@dataclass
class Run:
    """Results of some requests.

    Attributes:
        answers: output token ids by request.
        steps: (rows, seconds, tokens) of steps without prefill. Not meaningful if steps overlap.
        seconds: total time, including prompts.
        first_seconds: time to the first token of any request.
        num_drafts, num_accepted: number of tokens proposed, and of tokens accepted.
    """

    answers: dict[str, list[int]] = field(default_factory=dict)
    steps: list[tuple[int, float, int]] = field(default_factory=list)
    seconds: float = 0.0
    first_seconds: float = 0.0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.answers.values())) / self.seconds

    @property
    def token_seconds(self) -> float:
        """Time per token in steps without prefill, in seconds."""
        return sum(seconds for _, seconds, _ in self.steps) / sum(tokens for _, _, tokens in self.steps)

    @property
    def later_token_seconds(self) -> float:
        """Time per token after the first token, in seconds."""
        return (self.seconds - self.first_seconds) / max(1, sum(map(len, self.answers.values())) - 1)

    @property
    def step_tokens(self) -> float:
        return statistics.mean(tokens for _, _, tokens in self.steps)

    @property
    def step_seconds(self) -> float:
        return statistics.mean(seconds for _, seconds, _ in self.steps)


def run(engine: BuiltEngine, prompts: dict[str, list[int]], max_tokens: int) -> Run:
    """Send all prompts at once with an empty cache, and step until all are done."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    done = Run({name: [] for name in prompts})
    core = engine.core
    metrics = core.metrics
    core.scheduler.prefix_cache.forget()
    for name, prompt in prompts.items():
        core.add_request(name, engine.preparer.prepare(prompt, params))
    drafts, accepted = metrics.num_draft_tokens, sum(metrics.num_accepted_tokens)
    started = time.perf_counter()
    while core.has_requests:
        rows = dict(metrics.num_rows)
        begin = time.perf_counter()
        outputs = core.step()
        seconds = time.perf_counter() - begin
        num_tokens = 0
        if outputs and not done.first_seconds:
            done.first_seconds = time.perf_counter() - started
        for output in outputs:
            done.answers[output.request_id] += output.token_ids
            num_tokens += len(output.token_ids)
        new = {kind: count - rows.get(kind, 0) for kind, count in metrics.num_rows.items()}
        if new["decode"] and not (new["chunk"] or new["fresh"]):
            done.steps.append((new["decode"] + new.get("draft", 0), seconds, num_tokens))
    done.seconds = time.perf_counter() - started
    done.num_drafts = metrics.num_draft_tokens - drafts
    done.num_accepted = sum(metrics.num_accepted_tokens) - accepted
    return done


def loops(answer: list[int]) -> bool:
    """Return True if an output contains the same sequence of 8 tokens at least three times."""
    return max(Counter(zip(*(answer[i:] for i in range(8)), strict=False)).values(), default=0) >= 3


class Pair:
    """An engine without speculation, and an engine with speculation. Measurements alternate between them."""

    def __init__(self, args: argparse.Namespace) -> None:
        common: dict[str, Any] = {"model": args.model, "dtype": "float32", "max_num_seqs": 64}
        common |= {"num_gpu_blocks_override": 2400, "max_num_batched_tokens": 512}
        common |= {"async_scheduling": args.async_scheduling}
        self.without = build_engine(EngineArgs(**common))
        self.speculating = build_engine(EngineArgs(**common, speculative_config=args.speculative_config))
        self.max_tokens = args.max_tokens
        self.num_different = 0

    def prompt(self, text: str) -> list[int]:
        return self.without.preparer.tokenizer.apply_chat_template([{"role": "user", "content": text}])

    def turns(self, prompts: dict[str, list[int]], repeats: int) -> list[tuple[Run, Run]]:
        """Run the prompts ``repeats`` times without and with speculation, in alternating order.

        Adds the number of outputs that differ to ``num_different``.
        """
        runs = []
        for turn in range(repeats):
            order = (self.speculating, self.without) if turn % 2 else (self.without, self.speculating)
            by_engine = {id(engine): run(engine, prompts, self.max_tokens) for engine in order}
            plain, ours = by_engine[id(self.without)], by_engine[id(self.speculating)]
            self.num_different += sum(plain.answers[name] != ours.answers[name] for name in prompts)
            runs.append((plain, ours))
        return runs


def one_by_one(pair: Pair, kind: str, texts: dict[str, str], repeats: int, *, is_ahead: bool) -> None:
    """Print results for one request at a time, without requests whose outputs loop.

    If steps overlap (``is_ahead``), the time of a single step is not known. Times then include the whole output after
    its first token.
    """
    print(f"\n{kind}, one at a time{', one step ahead' if is_ahead else ''}: medians of {repeats}")
    of_steps = "" if is_ahead else "  tokens/step  step ratio  bound"
    print(f"{'':24}  tokens  ms/token  with drafts  ratio{of_steps}  accepted")
    for name, text in texts.items():
        runs = pair.turns({name: pair.prompt(text)}, repeats)
        plain, ours = runs[-1]
        answer = plain.answers[name]
        if loops(answer):
            print(f"{name:24}  {len(answer):6}  loops, left out")
            continue
        times = [[r.later_token_seconds if is_ahead else r.token_seconds for r in turn] for turn in runs]
        without, drafted = (statistics.median(column) for column in zip(*times, strict=True))
        if not is_ahead:
            step_ratio = statistics.median(o.step_seconds / p.step_seconds for p, o in runs)
            bound = 1.15 * step_ratio / ours.step_tokens
            of_steps = f"  {ours.step_tokens:11.2f}  {step_ratio:10.2f}  {bound:5.2f}"
        print(
            f"{name:24}  {len(answer):6}  {1e3 * without:8.1f}  {1e3 * drafted:11.1f}  {drafted / without:5.2f}"
            f"{of_steps}  {ours.num_accepted} of {ours.num_drafts}",
            flush=True,
        )


def at_once(pair: Pair, kind: str, texts: dict[str, str], streams: int, repeats: int) -> None:
    """Print the throughput of ``streams`` requests at once. Each request has its own prefix."""
    each = list(texts.values())
    prompts = {f"{i}": pair.prompt(f"({i}) {each[i % len(each)]}") for i in range(streams)}
    runs = pair.turns(prompts, repeats)
    ratios = sorted(o.tokens_per_second / p.tokens_per_second for p, o in runs)
    plain, ours = runs[-1]
    rates = f"{plain.tokens_per_second:.1f} tokens/s without, {ours.tokens_per_second:.1f} with"
    print(
        f"{kind}, {streams} at once: {rates}, "
        f"median ratio of {repeats} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); "
        f"{ours.num_accepted} of {ours.num_drafts} drafts accepted, "
        f"{sum(map(len, ours.answers.values()))} tokens, {sum(map(loops, ours.answers.values()))} answers loop",
        flush=True,
    )


def slowdown(pair: Pair, texts: dict[str, str], repeats: int) -> None:
    """Print the total time of whole outputs, including prompts, with speculation relative to the time without."""
    seconds, num_drafts, num_accepted = [0.0, 0.0], 0, 0
    for text in texts.values():
        runs = pair.turns({"": pair.prompt(text)}, repeats)
        for i in range(2):
            seconds[i] += statistics.median(both[i].seconds for both in runs)
        num_drafts += sum(ours.num_drafts for _, ours in runs)
        num_accepted += sum(ours.num_accepted for _, ours in runs)
    print(
        f"{len(texts)} questions, one at a time, medians of {repeats}: slowdown {seconds[1] / seconds[0]:.3f} "
        f"({seconds[0]:.1f} s without, {seconds[1]:.1f} s with; {num_accepted} of {num_drafts} drafts accepted)"
    )


def peer(pair: Pair, args: argparse.Namespace) -> None:
    """Print mlx-lm's results with the same models, prompts and limits, for one request at a time."""
    config = pair.speculating.core.config.scheduler.speculative
    assert config is not None and config.model is not None
    texts = {"copying": COPYING, "chat": CHAT}.get(args.only, COPYING | CHAT)
    prompts = {name: pair.prompt(text) for name, text in texts.items()}
    request = {"model": args.model, "draft_model": config.model, "num_draft_tokens": config.num_speculative_tokens}
    request |= {"max_tokens": args.max_tokens, "prompts": prompts}
    command = [sys.executable, "-m", "tools.benchmarks.mlx_lm_drafting"]
    done = subprocess.run(command, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True)
    print(f"\nmlx-lm {version('mlx-lm')} with the same draft model, one at a time")
    print(f"{'':24}  tokens  ms/token  with drafts  ratio  from the draft model")
    for name, answer in json.loads(done.stdout).items():
        plain, ours = answer["without"], answer["with"]
        without, drafted = (1e3 * a["seconds"] / max(1, len(a["tokens"]) - 1) for a in (plain, ours))
        print(
            f"{name:24}  {len(ours['tokens']):6}  {without:8.1f}  {drafted:11.1f}  {drafted / without:5.2f}  "
            f"{ours['drafted']}{'' if plain['tokens'] == ours['tokens'] else '  (answers differ)'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16, 32], help="requests at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--speculative-config",
        default='{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
    )
    parser.add_argument("--draft-model", help="draft model with three drafts, instead of --speculative-config")
    parser.add_argument("--only", choices=["copying", "chat"], help="run only one kind of tasks")
    parser.add_argument("--async-scheduling", action="store_true", help="both engines plan one step ahead")
    parser.add_argument("--peer", action="store_true", help="also run mlx-lm with the same draft model")
    parser.add_argument("--slowdown", action="store_true", help="print only the slowdown of questions, as one figure")
    args = parser.parse_args()
    if args.draft_model is not None:
        config = {"method": "draft_model", "model": args.draft_model, "num_speculative_tokens": 3}
        args.speculative_config = json.dumps(config)
    pair = Pair(args)
    for engine in (pair.without, pair.speculating):  # warm up
        run(engine, {"warm-up": pair.prompt(COPYING["table, repeated"])}, args.max_tokens)
    if args.slowdown:
        slowdown(pair, CHAT, args.repeats)
    for streams in [] if args.slowdown else args.streams:
        for kind, texts in (("copying", COPYING), ("chat", CHAT)):
            if args.only not in (None, kind):
                continue
            if streams == 1:
                one_by_one(pair, kind, texts, args.repeats, is_ahead=args.async_scheduling)
            else:
                at_once(pair, kind, texts, streams, args.repeats)
    if args.peer:
        peer(pair, args)
    print(f"\nanswers that differ: {pair.num_different}")


if __name__ == "__main__":
    main()
