"""Pooled vectors of prompts, in batches with generation, compared with mlx-lm's hidden states pooled in float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from metal_engine.errors import ContextLengthError, ParameterError, PromptError
from metal_engine.pooling_params import PoolingParams
from metal_engine.sampling_params import SamplingParams
from tests.support.tiny_engine import run_pooling, tiny_engine, tiny_reference
from tools.fixtures.stepped_engine import SteppedEngine

TYPES = ("LAST", "MEAN", "CLS")
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return tiny_reference()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(0, 256, length).tolist()


def expected(model: nn.Module, tokens: list[int], pooling_type: str, dimensions: int | None = None) -> np.ndarray:
    """Return the vector computed from mlx-lm's hidden states of the whole prompt."""
    hidden = np.array(model.model(mx.array(tokens)[None])[0].astype(mx.float32)).astype(np.float64)
    vector = {"LAST": hidden[-1], "CLS": hidden[0], "MEAN": hidden.mean(axis=0)}[pooling_type][:dimensions]
    return vector / np.linalg.norm(vector)


def assert_close(vector: np.ndarray, wanted: np.ndarray) -> None:
    assert vector.dtype == np.float32 and vector.shape == wanted.shape
    assert abs(np.linalg.norm(vector) - 1) < 1e-5
    assert float(vector @ wanted) >= 0.9999
    # The cosine tolerates large errors if all vectors are similar. This bound allows for rounding only.
    np.testing.assert_allclose(vector, wanted, atol=2e-4)


def check_all(engine: SteppedEngine, model: nn.Module, lengths: list[int]) -> None:
    asked: list[Any] = [(prompt(n, i), PoolingParams(pooling_type=t)) for i, n in enumerate(lengths) for t in TYPES]
    for (tokens, params), vector in zip(asked, run_pooling(engine, asked), strict=True):
        assert_close(vector, expected(model, tokens, params.pooling_type))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [7, 64])
def test_alone_and_in_chunks(reference: nn.Module, ahead: bool, budget: int) -> None:
    for length in (1, 2, 8, 23):
        engine = tiny_engine(ahead=ahead, max_num_batched_tokens=budget, max_num_seqs=min(budget, 64))
        check_all(engine, reference, [length])
        assert engine.num_steps >= -(-length // budget)


@pytest.mark.parametrize("ahead", [False, True])
def test_pooling_and_generation_in_one_batch_do_not_change_results(reference: nn.Module, ahead: bool) -> None:
    chats = [(prompt(n, 50), GREEDY) for n in (3, 30, 17, 60)]
    alone = run_pooling(tiny_engine(ahead=ahead), chats)
    pooled = [(prompt(n, 60), PoolingParams(pooling_type=t)) for n in (5, 41, 70) for t in TYPES]
    mixed = [one for pair in zip(pooled, [*chats, *chats, chats[0]], strict=True) for one in pair]
    engine = tiny_engine(ahead=ahead, max_num_batched_tokens=37, max_num_seqs=12)
    shared_steps = 0
    execute = engine.runner.execute

    def spy(plan: Any) -> Any:
        nonlocal shared_steps
        shared_steps += bool(plan.sampled_req_ids) and bool(plan.pooled_req_ids)
        return execute(plan)

    engine.runner.execute = spy  # type: ignore[method-assign]
    found = run_pooling(engine, mixed)
    assert shared_steps, "no step had both kinds of requests"
    for (tokens, params), vector in zip(pooled, found[::2], strict=True):
        assert_close(vector, expected(reference, tokens, params.pooling_type or ""))
    assert found[1::2] == [*alone, *alone, alone[0]]


def test_every_type_is_right_when_preempted_in_the_middle(reference: nn.Module) -> None:
    for ahead in (False, True):
        engine = tiny_engine(ahead=ahead, max_num_batched_tokens=8, max_num_seqs=3)
        tokens = prompt(30)
        for t in TYPES:
            engine.add_request(t, engine.prepare_pooling([tokens], PoolingParams(pooling_type=t))[0])
        vectors = {}
        steps = 0
        while engine.has_requests:
            steps += 1
            if steps in (2, 5, 6):
                engine.scheduler.preempt_all()
            vectors |= {output.request_id: output.pooled for output in engine.step()}
        assert engine.scheduler.num_preemptions
        for t in TYPES:
            assert_close(vectors[t], expected(reference, tokens, t))


def test_only_the_last_token_uses_cached_prefixes(reference: nn.Module) -> None:
    engine = tiny_engine()
    tokens = prompt(40)
    run_pooling(engine, [(tokens, GREEDY)])
    for t, rows in (("LAST", 8), ("MEAN", 40), ("CLS", 40)):
        before = sum(engine.metrics.num_rows.values())
        (vector,) = run_pooling(engine, [(tokens, PoolingParams(pooling_type=t))])
        assert sum(engine.metrics.num_rows.values()) - before == rows
        assert_close(vector, expected(reference, tokens, t))


def test_chats_use_the_prefixes_of_pooled_prompts() -> None:
    engine = tiny_engine()
    run_pooling(engine, [(prompt(40), PoolingParams())])
    engine.add_request("a", engine.prepare(prompt(40), GREEDY))
    assert engine.step()[0].num_cached_tokens == 32


def test_dimensions_and_normalize(reference: nn.Module) -> None:
    tokens = prompt(12)
    cut, raw = run_pooling(
        tiny_engine(), [(tokens, PoolingParams(dimensions=5)), (tokens, PoolingParams(normalize=False))]
    )
    assert_close(cut, expected(reference, tokens, "LAST", 5))
    hidden = np.array(reference.model(mx.array(tokens)[None])[0, -1])
    np.testing.assert_allclose(raw, hidden, rtol=1e-3, atol=1e-4)


def test_counts_may_be_integers_of_numpy() -> None:
    params = PoolingParams(dimensions=np.int64(5), truncate_prompt_tokens=np.int32(-1))
    assert params == PoolingParams(dimensions=5, truncate_prompt_tokens=-1)
    assert type(params.dimensions) is type(params.truncate_prompt_tokens) is int
    bad: list[dict[str, Any]] = [{"dimensions": 0}, {"dimensions": -1}, {"dimensions": True}, {"dimensions": 10**5000}]
    for fields in [*bad, {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 1.0}]:
        with pytest.raises(ParameterError, match=f"^{next(iter(fields))} must be "):
            PoolingParams(**fields)


def test_logits_of_two_tokens(reference: nn.Module) -> None:
    tokens = [prompt(n) for n in (3, 50)]
    found = run_pooling(
        tiny_engine(max_num_batched_tokens=16), [(t, PoolingParams(token_ids=(7, 201))) for t in tokens]
    )
    for ids, logits in zip(tokens, found, strict=True):
        wanted = np.array(reference(mx.array(ids)[None])[0, -1])[[7, 201]]
        np.testing.assert_allclose(logits, wanted, atol=1e-3)


def test_pooled_rows_do_not_go_through_the_head(reference: nn.Module) -> None:
    engine = tiny_engine()
    trunk_and_head: list[int] = []
    embedding = type(reference.model.embed_tokens)
    as_linear = embedding.as_linear
    try:

        def spy(self: Any, x: mx.array) -> mx.array:
            trunk_and_head.append(x.shape[0])
            return as_linear(self, x)

        embedding.as_linear = spy
        run_pooling(engine, [(prompt(20), PoolingParams(pooling_type=t)) for t in TYPES])
        assert not any(trunk_and_head)
        run_pooling(engine, [(prompt(20, 1), PoolingParams()), (prompt(9), GREEDY)])
        assert sum(trunk_and_head) == GREEDY.max_tokens
    finally:
        embedding.as_linear = as_linear


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    engine = tiny_engine(max_model_len=24, num_blocks=3)
    run_pooling(engine, [(prompt(24), PoolingParams())])
    with pytest.raises(ContextLengthError) as caught:
        engine.prepare_pooling([prompt(25)], PoolingParams())
    assert caught.value.name == "prompt" and "max_tokens" not in str(caught.value)
    with pytest.raises(PromptError, match="no tokens"):
        engine.prepare_pooling([[]], PoolingParams())
    with pytest.raises(PromptError, match="blocks"):
        tiny_engine(num_blocks=3).prepare_pooling([prompt(25)], PoolingParams())
    (kept,) = engine.prepare_pooling([prompt(30)], PoolingParams(truncate_prompt_tokens=-1))
    assert kept.prompt_token_ids == prompt(30)[-24:]
    with pytest.raises(ParameterError, match="vocabulary"):
        engine.prepare_pooling([[1 << 20]], PoolingParams())


def test_metrics_count_a_prompt_and_a_request() -> None:
    engine = tiny_engine()
    run_pooling(engine, [(prompt(20), PoolingParams()), (prompt(9), PoolingParams(pooling_type="MEAN"))])
    metrics = engine.metrics
    assert metrics.num_finished == {"stop": 2, "length": 0, "abort": 0, "error": 0}
    assert metrics.num_prompt_tokens == 29 and metrics.num_generation_tokens == 0
    assert sum(metrics.end_to_end.counts) == sum(metrics.prompt_tokens.counts) == sum(metrics.inference.counts) == 2
    assert metrics.end_to_end.sum > 0 and metrics.inference.sum > 0
    for histogram in (metrics.first_token, metrics.inter_token, metrics.generation_tokens, metrics.decode):
        assert not any(histogram.counts)


@pytest.mark.parametrize(
    ("name", "value"),
    [("pooling_type", "MAX"), ("normalize", 1), ("dimensions", 0), ("dimensions", True), ("truncate_prompt_tokens", 0)],
)
def test_bad_parameters_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        PoolingParams(**{name: value})
    assert caught.value.name == name
