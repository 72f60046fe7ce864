"""Random combinations of features beside a draft head: outputs equal the outputs of undisturbed steps without drafts.

The head is not trained. In most cases, its drafts are replaced by known outputs, so that some drafts are accepted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.pooling_params import PoolingParams
from metal_engine.request import RequestOutput
from metal_engine.runner import head_drafter
from metal_engine.runner.batch import RequestTable
from metal_engine.runner.drafting import DraftTask
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.settings.config import SpeculativeConfig
from tests.support.draft_heads import draft_always, random_head
from tests.support.mixed_requests import ALL_MODELS, MIXED, check_equal, undisturbed
from tests.support.running import drain
from tests.support.speculation import FreeDrafts, KnownAheadTimes, KnownTimes, speculate
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.fake_engine import byte_ids
from tools.fixtures.stepped_engine import SteppedEngine

MODES: list[dict[str, Any]] = [{}, {"ahead": True}, {"behind": True}, {"replay": True}, {"replay": True, "ahead": True}]


class ChangingTimes(KnownTimes):
    """Step times that change at random. Draft rows either cost nothing, or cost more than drafts can gain."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def times(self, num_rows: int, most: int) -> list[float]:
        if self._rng.random() < 0.1:
            self._row_seconds = 0.0 if self._row_seconds else 9.0
        return super().times(num_rows, most)


def make_engine(model: str, mode: dict[str, Any], rng: random.Random) -> SteppedEngine:
    """Return an engine with a random head and a random configuration."""
    lookup = rng.choice([2, 64])
    speculative = SpeculativeConfig(
        method="mtp", num_speculative_tokens=rng.randint(1, 4), prompt_lookup_max=lookup, prompt_lookup_min=lookup
    )
    block_size = rng.choice([1, 4, 8, 16])
    engine = tiny_engine(
        **ALL_MODELS[model], **mode, block_size=block_size, num_blocks=rng.choice([200, 1500]) // block_size,
        max_num_batched_tokens=rng.choice([11, 24, 64]), max_num_seqs=rng.choice([4, 9]),
        max_num_partial_prefills=rng.choice([1, 3]), speculative=speculative, make_head=random_head,
    )  # fmt: skip
    costs = FreeDrafts(may_probe=rng.random() < 0.8)
    ahead = KnownAheadTimes(0.7)
    speculate(engine.scheduler, make_proposer(speculative), ChangingTimes(rng), costs, async_planning=ahead)
    return engine


def replace_drafts(model: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the head's drafts by known outputs, of which most are right. The head still runs."""
    outputs: dict[tuple[int, ...], list[int]] = {}
    for request_id, output in undisturbed(model).items():
        prompt, _ = MIXED[int(request_id.partition("-")[0])]
        outputs.setdefault(tuple(prompt), output.token_ids)
    sample_drafts = head_drafter.sample_drafts

    def replaced(table: RequestTable, tasks: Sequence[DraftTask], logits: mx.array) -> mx.array:
        drafts = sample_drafts(table, tasks, logits)
        tokens: list[int] = drafts.tolist()  # type: ignore[assignment]
        for i, task in enumerate(tasks):
            known = table.token_ids(task.index, len(task.drafts)).tolist()
            prompt = known[: table.num_prompt_tokens(task.index)]
            following = outputs[tuple(prompt)][len(known) - len(prompt) :]
            if following and rng.random() < 0.8:
                tokens[i] = following[0]
        return mx.array(tokens, mx.int32)

    monkeypatch.setattr(head_drafter, "sample_drafts", replaced)


def run_mixed(engine: SteppedEngine, rng: random.Random) -> dict[str, list[RequestOutput]]:
    """Run the requests with random arrivals, pooled requests beside them, and preemptions of all at random steps."""
    arrivals = []
    for i, (prompt, one) in enumerate(MIXED):
        prepared = engine.prepare(prompt, one)
        arrivals += [(f"{i}-{index}", prepared, index) for index in range(one.n)]
    if rng.random() < 0.5:
        pooled = engine.preparer.prepare_pooling([byte_ids("a text for a vector")] * 2, PoolingParams())
        arrivals += [(f"pooled {i}", prepared, 0) for i, prepared in enumerate(pooled)]
    rng.shuffle(arrivals)
    preempts = rng.random() < 0.5

    def arrive() -> None:
        request_id, prepared, index = arrivals.pop()
        engine.add_request(request_id, prepared, index=index)

    def step() -> list[RequestOutput]:
        outputs = engine.step()
        if preempts and rng.random() < 0.05:
            engine.scheduler.preempt_all()
        while arrivals and (rng.random() < 0.4 or not engine.has_requests):
            arrive()
        return outputs

    arrive()
    found = drain(engine, step)
    assert not arrivals
    assert all(output.error is None for outputs in found.values() for output in outputs)
    return {request_id: outputs for request_id, outputs in found.items() if not request_id.startswith("pooled")}


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(i, marks=pytest.mark.full) for i in range(5, 90))])
def test_outputs_with_drafts_equal_outputs_without_drafts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, model = random.Random(seed), list(ALL_MODELS)[seed % len(ALL_MODELS)]
    engine = make_engine(model, MODES[seed % len(MODES)], rng)
    if seed % 4 != 1:
        draft_always(engine)
    # Drafts use free blocks only, and the smallest pools may have none.
    is_likely = seed % 4 != 1 and engine.core.config.cache.num_blocks > 12
    if seed % 4 != 3:
        replace_drafts(model, rng, monkeypatch)
    check_equal(run_mixed(engine, rng), model)
    if is_likely:
        assert engine.metrics.num_draft_tokens > 5
        assert seed % 4 == 3 or any(engine.metrics.num_accepted_tokens)
