"""Tests of draft heads: they never change outputs, and their drafts are those of an uncached float64 computation."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.qwen3_5.config import TextConfig
from mlx_vlm.speculative.drafters.qwen3_5_mtp.config import Qwen3_5MTPConfig
from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

from metal_engine.models.draft_head import DraftHead, PagedDraftHead
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import RequestOutput
from metal_engine.runner.head_drafter import HeadDrafter
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import Drafting
from tests.runner.test_speculation import EVERYTHING, Requests, check_same, params
from tests.support.draft_heads import HeadReference, draft_always, head_engine, head_outputs, random_head, watch_drafts
from tests.support.kv_engines import kv_engine
from tests.support.running import add_all, drain
from tests.support.speculation import draft_for_free, head_config
from tests.support.sweeps import diagonal
from tests.support.tiny_engine import run_all, run_pooling, tiny_engine, tiny_reference, token_ids
from tools.fixtures.fake_engine import byte_ids, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import tiny_model

# Greedy requests whose prompts and outputs have different lengths.
GREEDY: Requests = [
    (byte_ids(f"{chr(97 + i)}{i} prompt number {i} " * (1 + i % 3)), params(temperature=0, max_tokens=14 + i))
    for i in range(5)
]
SHARED: Requests = [
    (byte_ids("a prefix that all prompts of this test share, word for word; ") + byte_ids(f"{i} and more"), one)
    for i, (_, one) in enumerate(GREEDY)
]
HYBRID: dict[str, Any] = {"architecture": "qwen3_5", "num_state_slots": 200}


def drafter_of(engine: SteppedEngine) -> HeadDrafter:
    found = engine.runner._drafter  # type: ignore[attr-defined]
    assert isinstance(found, HeadDrafter)
    return found


class Reference(HeadReference):
    """Greedy drafts of the random head of the tiny Qwen3.5, computed without a cache from float64 arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_reference(architecture="qwen3_5")
        self.text = self.model.language_model
        self.head = random_head(self.model)
        self.embeddings = np.array(self.text.model.embed_tokens.weight).astype(np.float64)
        tied = self.text.args.tie_word_embeddings
        self.lm_head = self.embeddings if tied else np.array(self.text.lm_head.weight).astype(np.float64)

    def logits(self, known: list[int], drafts: list[int]) -> np.ndarray:
        hidden = np.array(self.text.model(mx.array(known[:-1])[None])[0]).astype(np.float64)
        following, rows = list(known[1:]), []
        for draft in drafts:
            output = head_outputs(self.head, self.text.args, self.embeddings[following], hidden)
            rows.append(output[-1] @ self.lm_head.T)
            hidden, following = np.concatenate([hidden, output[-1:]]), [*following, draft]
        return np.array(rows)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_draft_head_output_equals_mlx_vlm_output(reference: Reference) -> None:
    args = reference.text.args
    names = {field.name for field in fields(TextConfig)}
    text_config = TextConfig(**{name: value for name, value in vars(args).items() if name in names})
    theirs = Qwen3_5MTPDraftModel(Qwen3_5MTPConfig(text_config=text_config))
    theirs.load_weights(tree_flatten(reference.head.parameters()))  # the names are the same, too
    embeddings, hidden = mx.random.normal((2, 1, 9, args.hidden_size))
    ours = reference.head(embeddings, hidden, mask="causal")
    expected = theirs._forward_hidden(embeddings, hidden, None, mx.arange(9)[None])
    assert mx.allclose(ours, expected, rtol=1e-5, atol=1e-5) and mx.abs(expected).max() > 1


@pytest.mark.parametrize(
    ("requests", "config"),
    [
        (GREEDY, {}),
        (GREEDY, {"max_num_batched_tokens": 13, "max_num_seqs": 4}),
        (GREEDY, {"num_blocks": 10, "max_num_batched_tokens": 20}),
        pytest.param(GREEDY, {"ahead": True}, marks=pytest.mark.full),
        (SHARED, {"max_num_seqs": 2}),
        pytest.param(GREEDY, {"replay": True}, marks=pytest.mark.full),
        (GREEDY, {"replay": True, "ahead": True, "max_num_batched_tokens": 13}),
    ],
    ids=["packed", "chunked", "preempted", "ahead", "cached", "replayed", "replayed ahead"],
)
def test_draft_head_drafts_match_an_uncached_float64_reference(
    reference: Reference, requests: Requests, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = head_engine(**HYBRID, **config)
    found = watch_drafts(monkeypatch)
    run_all(engine, requests)
    assert bool(engine.stats.num_preemptions) == ("num_blocks" in config)
    assert len(found) > 20 and max(len(drafts) for _, drafts in found) == 3
    assert max(reference.gap(known, drafts) for known, drafts in found) < 1e-4
    replay = drafter_of(engine).replay
    assert (replay is not None and replay.num_traces > 2 and replay.refusal is None) == ("replay" in config)


def test_draft_head_with_a_separate_embedding_table_matches_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference()
    table = mx.array(reference.embeddings[::-1].astype(np.float32))
    reference.embeddings = np.array(table).astype(np.float64)

    def make_head(model: nn.Module) -> DraftHead:
        head = random_head(model)
        head.embed_tokens = nn.Embedding(*table.shape)
        head.embed_tokens.weight = table
        return head

    engine = tiny_engine(speculative=head_config(3), make_head=make_head, **HYBRID)
    draft_for_free(engine)
    draft_always(engine)
    found = watch_drafts(monkeypatch)
    run_all(engine, GREEDY[:2])
    assert len(found) > 5 and max(reference.gap(known, drafts) for known, drafts in found) < 1e-4


def test_acceptance_is_that_of_the_reference(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few allowed tokens, some drafts of a random head are right."""
    few = (97, 98, 99)
    requests = [(prompt, params(temperature=0, allowed_token_ids=few, max_tokens=24)) for prompt, _ in GREEDY[:2]]
    engine = head_engine(**HYBRID)
    found = watch_drafts(monkeypatch)
    outputs = run_all(engine, requests)
    texts = [[*prompt, *token_ids(output)] for (prompt, _), output in zip(requests, outputs, strict=True)]
    num_accepted = 0
    for known, drafts in found:
        (text,) = (text for text in texts if text[: len(known)] == known)
        for logits, right in zip(reference.logits(known, drafts), text[len(known) :], strict=False):
            if few[logits[list(few)].argmax()] != right:
                break
            num_accepted += 1
    assert engine.metrics.num_draft_tokens == sum(len(drafts) for _, drafts in found) > 40
    assert sum(engine.metrics.num_accepted_tokens) == num_accepted > 5


@pytest.fixture(scope="module")
def without() -> list[list[RequestOutput]]:
    return run_all(tiny_engine(), EVERYTHING)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"num_blocks": 24, "max_num_batched_tokens": 40},
        {"ahead": True},
        {"replay": True},
        pytest.param({"replay": True, "behind": True}, marks=pytest.mark.full),
        pytest.param({"behind": True}, marks=pytest.mark.full),
        pytest.param({"block_size": 1, "num_blocks": 2000}, marks=pytest.mark.full),
    ],
)
def test_outputs_equal_outputs_without_a_draft_head(without: list[list[RequestOutput]], config: dict[str, Any]) -> None:
    engine = head_engine(**config)
    check_same(run_all(engine, EVERYTHING), without)
    assert engine.stats.num_used_blocks == 0 and engine.metrics.num_draft_tokens > 100
    assert bool(engine.stats.num_preemptions) == ("num_blocks" in config and config["num_blocks"] < 100)
    assert bool(engine.metrics.num_decode_forwards["replayed"]) == ("replay" in config)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        pytest.param("qwen3_5", {"num_state_slots": 200}, marks=pytest.mark.full),
        ("qwen3_next", {"num_state_slots": 200, "max_num_batched_tokens": 24}),
        pytest.param("qwen3_5_moe", {"num_state_slots": 200, "ahead": True}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.full),
        ("deepseek_v32", {"ahead": True}),
        pytest.param("glm4_moe", {}, marks=pytest.mark.full),
        pytest.param("mimo", {"block_size": 16}, marks=pytest.mark.full),
        pytest.param("ernie4_5_moe", {}, marks=pytest.mark.full),
    ],
)
def test_outputs_of_each_architecture_equal_outputs_without_a_draft_head(
    architecture: str, config: dict[str, Any]
) -> None:
    # In the first third, scores at the edge of a selection differ by only 1e-6, so that batching decides.
    requests = EVERYTHING[2::3]
    expected = run_all(tiny_engine(architecture=architecture, **config), requests)
    engine = head_engine(architecture=architecture, **config)
    check_same(run_all(engine, requests), expected)
    assert engine.metrics.num_draft_tokens > 50


def test_pooled_prompts_beside_do_not_matter() -> None:
    prompt = byte_ids("a text for a vector")
    requests: list[tuple[list[int], PoolingParams | SamplingParams]] = [
        (byte_ids("what follows"), params(temperature=0, max_tokens=20)),
        (prompt, PoolingParams(pooling_type="MEAN")),
        (prompt, PoolingParams(pooling_type="LAST")),
    ]
    expected = run_pooling(tiny_engine(), requests)
    engine = head_engine()
    found = run_pooling(engine, requests)
    assert found[0] == expected[0] and engine.metrics.num_draft_tokens
    for vector, other in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(vector, other, atol=1e-5)


def test_prompts_compute_only_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second forward computes the output of the rows that sample. The output of the first forward is not used."""
    engine, num_rows = head_engine(), []
    call = PagedDraftHead.__call__

    def watched(self: PagedDraftHead, token_ids: mx.array, *args: Any) -> mx.array:
        num_rows.append(token_ids.size)
        return call(self, token_ids, *args)

    monkeypatch.setattr(PagedDraftHead, "__call__", watched)
    engine.add_request("0", engine.prepare(byte_ids("p" * 30), params(temperature=0, max_tokens=4)))
    engine.step()
    assert num_rows == [30, 1]
    drain(engine)
    assert num_rows[2:] == [1, 3, 2, 1]  # the second draft, then steps with two, one and no drafts


def test_without_requested_drafts_only_kv_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps without requests for drafts, no output is carried. The first request for drafts then gets none."""
    engine = head_engine()
    found: list[Drafting | None] = []
    draft = HeadDrafter.draft

    def watched(self: HeadDrafter, table: Any, plan: Any) -> Drafting | None:
        found.append(draft(self, table, plan))
        return found[-1]

    monkeypatch.setattr(HeadDrafter, "draft", watched)
    engine.add_request("a", engine.prepare(byte_ids("what follows"), params(temperature=0, max_tokens=40)))
    speculation, engine.scheduler.speculation = engine.scheduler.speculation, None
    for _ in range(10):
        engine.step()
    drafter = drafter_of(engine)
    assert found == [None] * 10 and not drafter._carried
    engine.scheduler.speculation = speculation
    for _ in range(2):
        engine.step()
    assert not found[10].token_ids["a#0"] and len(found[11].token_ids["a#0"]) == 3
    drain(engine)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_store_has_the_head_s_kv(kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts after a load equal the drafts after a prefill."""
    prompts = [[(7 * i + j) % 250 + 1 for j in range(60)] for i in range(3)]
    sizes: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "num_blocks": 60}

    def run() -> tuple[list[list[int]], dict[tuple[int, ...], list[int]], int]:
        model = tiny_model(head_dim=64)
        engine = kv_engine(tiny_tokenizer(), tmp_path, model=model, make_head=random_head, **sizes)
        with monkeypatch.context() as patch:
            found = watch_drafts(patch)
            outputs = engine.run(prompts, 20)
        drafts = {tuple(known): drafts for known, drafts in found}
        return outputs, drafts, engine.stats.as_dict()["blocks_loaded"]

    (outputs, computed, none), (others, loaded, num_blocks) = run(), run()
    assert outputs == others and none == 0 and num_blocks >= 3 * 6
    # The number of drafts may differ, because acceptance was recorded in another order.
    pairs = [zip(computed[known], loaded[known], strict=False) for known in computed.keys() & loaded.keys()]
    assert len(pairs) >= len(prompts) and all(a == b for pair in pairs for a, b in pair)


@pytest.mark.parametrize(
    ("where", "ahead"), diagonal(["HeadDrafter._forward", "synchronize", "HeadDrafter.follow"], [False, True])
)
def test_a_failure_costs_only_a_retry(where: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(byte_ids(f"{i} goes on"), params(seed=i, max_tokens=24)) for i in range(4)]
    expected = run_all(tiny_engine(), requests)
    engine = head_engine(ahead=ahead)
    add_all(engine, requests)
    outputs = [output for _ in range(4) for output in engine.step()]

    def fail(*args: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(f"metal_engine.runner.head_drafter.{where}", fail)
        for _ in range(3):
            outputs += engine.step()
            if engine.metrics.num_failed_steps:
                break
    assert engine.metrics.num_failed_steps == 1
    outputs += [output for rest in drain(engine).values() for output in rest]
    check_same([[output for output in outputs if output.request_id == str(i)] for i in range(4)], expected)
    assert engine.metrics.num_draft_tokens and token_ids(outputs)


@pytest.mark.parametrize(("ahead", "where"), diagonal([False, True], ["trace", "device"]))
def test_a_head_that_cannot_be_replayed_is_built(ahead: bool, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(byte_ids(f"{i} goes on"), params(seed=i, max_tokens=24)) for i in range(4)]
    expected = run_all(tiny_engine(), requests)
    engine, forward, num_runs = head_engine(replay=True, ahead=ahead), PagedDraftHead.forward_of_arrays, 0

    def failing(self: PagedDraftHead, *args: Any) -> tuple[mx.array, None]:
        nonlocal num_runs
        num_runs += 1
        output, _ = forward(self, *args)
        if where == "trace":
            raise RuntimeError("injected")
        state = self.pool.states[0]
        for name, array in state.arrays.items():  # a singular matrix, which fails when MLX evaluates it
            state.arrays[name] = array + mx.linalg.inv(mx.zeros((3, 3)), stream=mx.cpu).sum().astype(array.dtype)
        return output, None

    monkeypatch.setattr(PagedDraftHead, "forward_of_arrays", failing)
    check_same(run_all(engine, requests), expected)
    replay = drafter_of(engine).replay
    assert replay is not None and replay.refusal is not None and replay.num_traces == 0 and num_runs <= 2
    assert engine.metrics.num_failed_steps == (where == "device") and engine.metrics.num_draft_tokens
    if where == "trace":  # the other steps are still replayed
        assert engine.metrics.replay_refusal == f"for the draft head: {replay.refusal}"
        assert engine.metrics.num_decode_forwards["replayed"] > 10
