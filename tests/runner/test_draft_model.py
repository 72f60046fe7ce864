"""Tests of the draft model: it never changes outputs, and all drafts are right if it equals the target model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from metal_engine.engine.metrics import EngineMetrics
from metal_engine.models.paged_model import PagedModel
from metal_engine.request import RequestOptions
from metal_engine.runner.draft_model import DraftModel
from metal_engine.runner.sampler import sample
from metal_engine.step import Drafting
from tests.runner.test_speculation import EVERYTHING, Requests, check_same, params, without
from tests.support.kv_engines import kv_engine
from tests.support.running import add_all, drain
from tests.support.speculation import draft_for_free, draft_model_config
from tests.support.tiny_engine import run_all, tiny_engine, tiny_reference, token_ids
from tools.fixtures.fake_engine import VOCAB_SIZE, byte_ids, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import tiny_model


def blurred(share: float) -> nn.Module:
    """Return the model with noise in its weights, so that some of its predictions agree with the model's."""
    model, rng = tiny_reference(), np.random.default_rng(0)

    def blur(a: mx.array) -> mx.array:
        noise = mx.array(rng.standard_normal(a.shape).astype(np.float32))
        return a + share * a.std() * noise

    model.update(tree_map(blur, model.parameters()))
    return model


def drafting_engine(draft: nn.Module, num_drafts: int = 4, *, may_probe: bool = True, **config: Any) -> SteppedEngine:
    max_draft_len = config.pop("max_draft_len", None)
    engine = tiny_engine(speculative=draft_model_config(num_drafts, max_draft_len), draft=draft, **config)
    draft_for_free(engine, may_probe=may_probe)
    return engine


def watch(engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> list[Drafting]:
    """Record the results of the draft model from now on, step by step."""
    done: list[Drafting] = []
    draft = DraftModel.draft

    def watched(self: DraftModel, table: Any, plan: Any) -> Drafting | None:
        drafting = draft(self, table, plan)
        done.extend([] if drafting is None else [drafting])
        return drafting

    monkeypatch.setattr(DraftModel, "draft", watched)
    return done


def share_accepted(engine: SteppedEngine) -> float:
    return sum(engine.metrics.num_accepted_tokens) / engine.metrics.num_draft_tokens


@pytest.mark.parametrize(
    ("draft", "num_drafts", "config"),
    [
        pytest.param("own", 4, {}, marks=pytest.mark.full),
        ("blurred", 3, {"max_num_batched_tokens": 24}),
        ("blurred", 7, {"num_blocks": 24, "max_num_batched_tokens": 40}),
        ("own", 4, {"ahead": True, "num_blocks": 24, "max_num_batched_tokens": 40}),
        pytest.param("random", 2, {}, marks=pytest.mark.full),
        pytest.param("own", 12, {"block_size": 16}, marks=pytest.mark.full),
        pytest.param("blurred", 5, {"block_size": 1, "num_blocks": 2000}, marks=pytest.mark.full),
        pytest.param(
            "own", 6, {"num_blocks": 12, "max_num_batched_tokens": 9, "max_num_seqs": 9}, marks=pytest.mark.full
        ),
    ],
)
def test_outputs_equal_outputs_without_a_draft_model(draft: str, num_drafts: int, config: dict[str, Any]) -> None:
    models = {
        "own": tiny_reference,
        "random": lambda: tiny_model(7, vocab_size=VOCAB_SIZE),
        "blurred": lambda: blurred(0.04),
    }
    engine = drafting_engine(models[draft](), num_drafts, **config)
    check_same(run_all(engine, EVERYTHING), without())
    assert engine.stats.num_used_blocks == 0
    assert bool(engine.stats.num_preemptions) == (config.get("num_blocks", 100) < 100)
    metrics = engine.metrics
    # A step with drafts waits for the tokens of the previous step. Steps without drafts need not wait.
    assert not config.get("ahead") or min(metrics.num_steps.values()) > 0
    assert metrics.num_drafts and metrics.num_rows["draft"] == metrics.num_draft_tokens
    assert metrics.num_generation_tokens == sum(len(token_ids(outputs)) for outputs in without())
    # With a grammar, hardly any drafts are right, even drafts of the model itself. The share of such requests matters.
    # Requests with grammars have the shortest prompts, and get drafts first if steps are small, and nearly all
    # drafts beside steps ahead.
    low, high = {"own": (0.45, 1.0), "blurred": (0.04, 0.9), "random": (0.0, 0.1)}[draft]
    low = 0.0 if config.get("ahead") else low
    assert low <= share_accepted(engine) <= high


# Requests whose samples the draft model can predict: all requests without a grammar.
PLAIN: Requests = [(prompt, one) for prompt, one in EVERYTHING if one.structured_outputs is None]


@pytest.mark.parametrize(
    ("num_drafts", "config"),
    [
        pytest.param(4, {}, marks=pytest.mark.full),
        (4, {"max_num_batched_tokens": 32}),
        (4, {"num_blocks": 24}),
        (4, {"ahead": True, "max_num_batched_tokens": 32}),
        pytest.param(4, {"block_size": 1, "num_blocks": 2000}, marks=pytest.mark.full),
        (12, {"block_size": 16}),
    ],
)
def test_all_drafts_of_the_model_itself_are_accepted(num_drafts: int, config: dict[str, Any]) -> None:
    """The KV of the draft model is right for greedy and sampled requests, chunks, preemption and resumption."""
    engine = drafting_engine(tiny_reference(), num_drafts, **config)
    run_all(engine, PLAIN)
    assert not config.get("ahead") or min(engine.metrics.num_steps.values()) > 0
    assert bool(engine.stats.num_preemptions) == ("num_blocks" in config and config["num_blocks"] < 100)
    assert share_accepted(engine) == 1.0 and engine.metrics.num_draft_tokens > 40


@pytest.mark.parametrize("width", [VOCAB_SIZE + 64, VOCAB_SIZE - 100])
def test_drafts_stay_right_if_draft_model_logits_have_another_width(width: int) -> None:
    """Noise is drawn for the target's vocabulary, so the same tokens win. Tokens that one model lacks are padding."""
    model = tiny_reference()
    table = model.model.embed_tokens
    if width > VOCAB_SIZE:
        wider = 9 * mx.random.normal((width - VOCAB_SIZE, table.weight.shape[1]), key=mx.random.key(0))
        table.weight = mx.concatenate([table.weight, wider])
    else:
        table.weight = table.weight[:width]
    few = tuple(range(3, 150))
    requests = [(byte_ids("abc def"), params(seed=i, allowed_token_ids=few, max_tokens=40)) for i in range(3)]
    engine = drafting_engine(model)
    expected = run_all(tiny_engine(), requests)
    check_same(run_all(engine, requests), expected)
    assert share_accepted(engine) == 1.0


def test_draft_model_reuses_draft_kv_of_cached_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = byte_ids("a long text that is sent once more " * 4)
    engine = drafting_engine(tiny_reference(), max_num_batched_tokens=512)
    done = watch(engine, monkeypatch)
    first = run_all(engine, [(prompt, params(seed=1))])
    assert done[0].num_tokens > 100
    done.clear()
    run_all(engine, [([*prompt, *token_ids(first[0]), 65, 66, 67], params(seed=1))])
    # The draft model now computes only the tokens of the answer's last step that had no drafts.
    assert max(drafting.num_tokens for drafting in done) < 12
    assert share_accepted(engine) == 1.0


@pytest.mark.parametrize("budget", [64, 15])  # 15: a chunk of one request ends before the last token of a block
def test_draft_model_computes_kv_of_prefixes_loaded_from_a_store(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store has KV of the target model only. Earlier contents of the blocks do not count."""
    prompts = [[(7 * i + j) % 250 + 1 for j in range(60)] for i in range(3)]
    plain = kv_engine(tiny_tokenizer(), None).run(prompts, 20)
    assert kv_engine(tiny_tokenizer(), tmp_path).run(prompts, 20) == plain
    engine = kv_engine(tiny_tokenizer(), tmp_path, draft=PagedModel(tiny_model()), num_blocks=40, budget=budget)
    done = watch(engine.core, monkeypatch)
    others = [[(3 * j + i) % 200 + 2 for j in range(70)] for i in range(3)]
    engine.run(others, 20)  # leave KV in blocks that the prompts then get
    done.clear()
    engine.core.metrics.num_draft_tokens = 0
    engine.core.metrics.num_accepted_tokens.clear()
    assert engine.run(prompts, 20) == plain and engine.stats.as_dict()["blocks_loaded"] > 0
    assert sum(drafting.num_tokens for drafting in done) >= 3 * 50, "they were taken for its own"
    assert share_accepted(engine.core) == 1.0


def test_draft_model_computes_missing_kv_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request has had no drafts for many steps."""
    engine = drafting_engine(tiny_reference(), max_num_batched_tokens=24)
    done = watch(engine, monkeypatch)
    speculation, engine.scheduler.speculation = engine.scheduler.speculation, None
    engine.add_request("a", engine.prepare(byte_ids("some words and then " * 2), params(seed=3, max_tokens=120)))
    for _ in range(60):
        engine.step()
    assert not done
    engine.scheduler.speculation = speculation
    drain(engine)
    assert [drafting.num_tokens for drafting in done[:3]] == [22, 22, 22]
    assert all(not drafting.token_ids["#".join(["a", "0"])] for drafting in done[:3])
    assert share_accepted(engine) == 1.0 and engine.metrics.num_draft_tokens > 10
    assert all(drafting.num_tokens == 0 for drafting in done[6:])


def test_draft_model_recomputes_kv_at_the_positions_of_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection and steps without drafts, it first computes the tokens in place of the rejected drafts."""
    engine = drafting_engine(tiny_reference())
    engine.add_request("a", engine.prepare(byte_ids("what follows"), params(seed=3, max_tokens=120)))
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("metal_engine.runner.drafting.sample", lambda *args: (sample(*args) + 1) % 200)
        engine.step()
    assert share_accepted(engine) < 1.0
    speculation, engine.scheduler.speculation = engine.scheduler.speculation, None
    for _ in range(5):
        engine.step()
    engine.scheduler.speculation = speculation
    engine.metrics.num_accepted_tokens.clear()
    engine.metrics.num_draft_tokens = 0
    drain(engine)
    assert share_accepted(engine) == 1.0 and engine.metrics.num_draft_tokens > 40


def test_the_count_of_rows_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model returns fewer drafts than planned while it catches up, and at the end of its context."""
    engine = drafting_engine(tiny_reference(), max_num_batched_tokens=24, max_draft_len=100)
    counts = []
    for name in ("scheduled", "speculated"):
        count = getattr(EngineMetrics, name)

        def counted(self: EngineMetrics, *args: Any, count: Any = count, **more: Any) -> None:
            count(self, *args, **more)
            counts.append(dict(self.num_rows))

        monkeypatch.setattr(EngineMetrics, name, counted)
    speculation, engine.scheduler.speculation = engine.scheduler.speculation, None
    engine.add_request("a", engine.prepare(byte_ids("some words and then " * 2), params(seed=3, max_tokens=80)))
    for _ in range(10):
        engine.step()
    engine.scheduler.speculation = speculation
    drain(engine)
    for kind, last in engine.metrics.num_rows.items():
        of_kind = [rows.get(kind, 0) for rows in counts]
        assert of_kind == sorted(of_kind) and of_kind[-1] == last
    assert engine.metrics.num_rows["draft"] == engine.metrics.num_draft_tokens > 10


def test_drafts_stop_at_the_draft_model_context_length() -> None:
    requests = [(byte_ids("abcdefgh"), params(seed=2, max_tokens=60))]
    engine = drafting_engine(tiny_reference(), max_draft_len=40)
    check_same(run_all(engine, requests), run_all(tiny_engine(), requests))
    num_prompt = len(requests[0][0])
    assert share_accepted(engine) == 1.0
    assert 40 - num_prompt - 10 < engine.metrics.num_draft_tokens <= 40 - num_prompt


def test_predicted_output_takes_precedence_over_the_draft_model() -> None:
    """With OpenAI's predicted output, drafts are tokens of that text while the answer follows it."""
    prompt, one = byte_ids("what follows is known"), params(seed=4, max_tokens=40)
    expected = run_all(tiny_engine(), [(prompt, one)])
    engine = drafting_engine(tiny_model(7, vocab_size=VOCAB_SIZE))
    options = RequestOptions(predicted_token_ids=token_ids(expected[0])[:20])
    engine.add_request("a", engine.prepare(prompt, one), options)
    outputs = drain(engine)["a"]
    check_same([outputs], expected)
    assert outputs[-1].num_predicted_tokens[0] >= 15


@pytest.mark.parametrize("where", ["DraftModel._sample", "synchronize"])
def test_outputs_are_unchanged_after_a_drafting_failure(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests give the same outputs as without a draft model."""
    expected = run_all(tiny_engine(), PLAIN[:4])
    engine = drafting_engine(tiny_reference())
    add_all(engine, PLAIN[:4])
    first = [output for _ in range(3) for output in engine.step()]

    def fail(*args: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(f"metal_engine.runner.draft_model.{where}", fail)
        assert engine.step() == [] and engine.metrics.num_failed_steps == 1
    rest = drain(engine)
    check_same([[one for one in first if one.request_id == str(i)] + rest[str(i)] for i in range(4)], expected)
    engine.metrics.num_accepted_tokens.clear()
    engine.metrics.num_draft_tokens = 0
    check_same(run_all(engine, PLAIN[:4]), expected)
    assert share_accepted(engine) == 1.0


# With only two tokens, even the guesses of a random model are right sometimes.
GUESSED: Requests = [
    (byte_ids(text), params(allowed_token_ids=(97, 98), max_tokens=50, **fields))
    for text, fields in (
        ("once upon a time there was", {"temperature": 0}),
        ("abc", {"seed": 1}),
        ("a long prompt " * 4, {"seed": 2, "top_p": 0.9}),
        ("what follows is", {"seed": 3, "repetition_penalty": 1.2}),
    )
]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"ahead": True, "num_blocks": 30, "max_num_batched_tokens": 40},
        pytest.param({"max_num_batched_tokens": 9, "max_num_seqs": 9}, marks=pytest.mark.full),
        pytest.param({"block_size": 1, "num_blocks": 2000}, marks=pytest.mark.full),
    ],
)
def test_recurrent_model_outputs_equal_outputs_without_a_draft_model(config: dict[str, Any]) -> None:
    """After a rejection, accepted tokens are recomputed, and further drafts follow them."""
    requests = [*EVERYTHING[::2], *GUESSED]
    hybrid: dict[str, Any] = {"architecture": "qwen3_5", "num_state_slots": 160}
    engine = drafting_engine(tiny_model(7, vocab_size=VOCAB_SIZE), 3, **hybrid, **config)
    check_same(run_all(engine, requests), run_all(tiny_engine(**hybrid), requests))
    assert bool(engine.stats.num_preemptions) == (config.get("num_blocks", 100) < 100)
    assert engine.stats.num_used_blocks == 0
    accepted = engine.metrics.num_accepted_tokens
    assert sum(accepted) > 10 and len(accepted) == 3 and accepted[2] > 0
    assert share_accepted(engine) < 0.9
