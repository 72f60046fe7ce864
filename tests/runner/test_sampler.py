"""Tests of sampling against an independent float64 reference, and of draws that must not depend on the batch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.runner import sampler
from metal_engine.runner.sampler import SamplingTable, sample
from metal_engine.sampling_params import SamplingParams

# --- the reference ------------------------------------------------------------------------------------------


def reference_probs(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return textbook probabilities [V], and the tokens so near a limit that rounding may decide."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    near = np.zeros(len(probs), bool)
    if params.min_p > 0:
        limit = params.min_p * probs.max()
        near |= np.isclose(probs, limit, rtol=1e-4) & (probs < probs.max())
        probs = np.where(probs >= limit, probs, 0.0)
    if 0 < params.top_k < len(probs):
        kth = np.sort(probs)[::-1][params.top_k - 1]
        probs = np.where(probs >= kth, probs, 0.0)  # ties with the k-th are kept
    probs /= probs.sum()
    if params.top_p < 1:
        kept = np.zeros(len(probs), bool)
        for token in range(len(probs)):
            # All likelier tokens come before a token. Equally likely tokens are kept or dropped together.
            before = probs[probs > probs[token]].sum()
            kept[token] = probs[token] > 0 and before < params.top_p
            near[token] |= before > 0 and abs(before - params.top_p) < 1e-5
        probs = np.where(kept, probs, 0.0)
    return probs / probs.sum(), near


def table_of(*params: SamplingParams) -> SamplingTable:
    table = SamplingTable(len(params))
    for index, each in enumerate(params):
        table.set(index, each, each.seed or 0)
    return table


def draw(logits: np.ndarray | mx.array, params: SamplingParams, num_draws: int, first: int = 0) -> np.ndarray:
    """Draw many tokens from one row of logits, [V], at successive positions of one request."""
    logits = mx.broadcast_to(mx.array(logits), (num_draws, logits.shape[-1]))
    positions = np.arange(first, first + num_draws, dtype=np.int32)
    tokens = sample(logits, table_of(params), np.zeros(num_draws, np.int32), positions)
    assert tokens.shape == (num_draws,) and tokens.dtype == mx.int32
    return np.array(tokens)


def assert_distributed(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square test of the fit, with a limit of five standard deviations. Rare tokens share a cell."""
    counts = np.bincount(tokens, minlength=len(probs)).astype(np.float64)
    assert counts[probs == 0].sum() == 0, f"drew excluded tokens {np.flatnonzero(counts * (probs == 0))}"
    expected = probs * len(tokens)
    common = expected >= 10
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return
    statistic = ((counts - expected) ** 2 / expected).sum()
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert z < 5, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


# --- frequencies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.5),
        SamplingParams(seed=3, temperature=3.0),
        SamplingParams(seed=4, temperature=100.0),
        SamplingParams(seed=5, top_k=1),
        SamplingParams(seed=6, top_k=2),
        SamplingParams(seed=7, top_k=17),
        SamplingParams(seed=8, top_k=50),
        SamplingParams(seed=9, top_k=51),
        SamplingParams(seed=10, top_k=10**9),
        SamplingParams(seed=11, top_k=-1),
        SamplingParams(seed=12, top_p=0.9),
        SamplingParams(seed=13, top_p=0.3),
        SamplingParams(seed=14, top_p=1e-6),
        SamplingParams(seed=15, top_p=1e-50),
        SamplingParams(seed=16, top_p=0.999),
        SamplingParams(seed=17, min_p=0.05),
        SamplingParams(seed=18, min_p=0.5),
        SamplingParams(seed=19, min_p=1.0),
        SamplingParams(seed=20, temperature=1.7, top_k=20, top_p=0.8),
        SamplingParams(seed=21, temperature=0.7, top_k=30, min_p=0.02),
        SamplingParams(seed=22, temperature=1.3, top_p=0.95, min_p=0.05),
        SamplingParams(seed=23, temperature=1.5, top_k=12, top_p=0.85, min_p=0.03),
    ],
    ids=lambda params: f"case{params.seed}",
)
def test_frequencies(params: SamplingParams) -> None:
    logits = np.random.default_rng(0).normal(0, 1.5, 50).astype(np.float32)
    probs, near = reference_probs(logits, params)
    assert not near.any(), "choose other logits"
    assert_distributed(draw(logits, params, 20_000), probs)


def test_frequencies_over_a_real_vocabulary() -> None:
    vocab_size = 49_152
    logits = np.random.default_rng(1).normal(0, 2, vocab_size).astype(np.float32)
    logits[np.random.default_rng(2).choice(vocab_size, 30, replace=False)] += 11
    params = SamplingParams(seed=3)
    # In pieces, because a draw of this size takes its 49,152 random numbers at once.
    tokens = np.concatenate([draw(logits, params, 250, first) for first in range(0, 1000, 250)])
    assert_distributed(tokens, reference_probs(logits, params)[0])


def test_top_k_over_a_real_vocabulary() -> None:
    logits = np.random.default_rng(1).normal(0, 2, 49_152).astype(np.float32)
    params = SamplingParams(seed=3, top_k=40)
    assert_distributed(draw(logits, params, 200), reference_probs(logits, params)[0])


def test_successive_draws_are_independent() -> None:
    """Pairs of neighbouring positions, and pairs of neighbouring seeds, have a product distribution."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    pairs = np.outer(probs, probs).ravel()
    tokens = draw(logits, SamplingParams(seed=0), 40_001)
    assert_distributed(4 * tokens[:-1:2] + tokens[1::2], pairs)
    num_seeds = 20_000
    table = table_of(*(SamplingParams(seed=seed) for seed in range(num_seeds)))
    indices = np.arange(num_seeds, dtype=np.int32)
    first = mx.broadcast_to(mx.array(logits), (num_seeds, 4))
    tokens = np.array(sample(first, table, indices, np.zeros(num_seeds, np.int32)))
    assert_distributed(4 * tokens[::2] + tokens[1::2], pairs)


# --- supports -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(1, 64),
    spread=st.sampled_from([0.0, 0.3, 2.0, 10.0]),
    num_ties=st.integers(0, 3),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 5.0]),
    top_k=st.integers(-1, 70),
    top_p=st.floats(0.01, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
def test_support(
    seed: int, vocab_size: int, spread: float, num_ties: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """The kept tokens are the reference's tokens, except for tokens within rounding of a limit."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, vocab_size).astype(np.float32)
    for _ in range(num_ties):
        logits[rng.integers(vocab_size)] = logits[rng.integers(vocab_size)]
    params = SamplingParams(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs, near = reference_probs(logits, params)
    scaled = mx.array(logits)[None] / temperature
    table = table_of(params)
    left = np.array(sampler._restrict(scaled, table.top_k, table.top_p, table.min_p))[0] > -np.inf
    if not near.any():
        assert left.tolist() == (probs > 0).tolist()
    assert ((probs > 0) | near)[draw(logits, params, 64)].all()


def test_rounding_does_not_depend_on_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens before a limit have exactly the wanted probability, so that rounding decides.

    Sums have an order that depends on the length of a row, as on a GPU.
    """
    own_sum = mx.array.sum

    def sum_in_halves(array: mx.array, **options: Any) -> mx.array:
        while array.dtype == mx.float32 and (size := array.shape[-1]) > 1:
            padded = mx.pad(array, [(0, 0), (0, size % 2)])
            array = padded[:, : padded.shape[-1] // 2] + padded[:, padded.shape[-1] // 2 :]
        return own_sum(array, **options)

    monkeypatch.setattr(mx.array, "sum", sum_in_halves)
    logits = np.random.default_rng(0).normal(0, 2, (200, 64)).astype(np.float32)
    below = np.sort(logits.max(axis=-1, keepdims=True) - logits, axis=-1)
    weights = np.exp(-below[:, :20])
    top_p = weights.cumsum(axis=-1)[np.arange(200), np.arange(200) % 19] / weights.sum(axis=-1)
    kept = []
    for other in (1, 60):  # top_k of a second request
        k, p = np.array([20] * 200 + [other]), np.append(top_p, 0.5).astype(np.float32)
        rows = mx.array(np.vstack([logits, logits[:1]]))
        kept.append(np.array(sampler._restrict(rows, k, p, np.zeros(201, np.float32)))[:200] > -np.inf)
    assert np.array_equal(*kept)


def test_ties_with_the_last_token_kept_are_kept() -> None:
    logits = np.array([1.0, 3.0, 1.0, 3.0, 0.0, 1.0], np.float32)
    for params, kept in (
        (SamplingParams(seed=0, top_k=1), {1, 3}),
        (SamplingParams(seed=0, top_k=3), {0, 1, 2, 3, 5}),
        (SamplingParams(seed=0, top_p=0.01), {1, 3}),
        (SamplingParams(seed=0, min_p=1.0), {1, 3}),
    ):
        tokens = draw(logits, params, 4000)
        assert set(tokens.tolist()) == kept, params
        assert_distributed(tokens, reference_probs(logits, params)[0])


def test_equal_logits_are_all_kept() -> None:
    for params in (SamplingParams(seed=0, top_k=3), SamplingParams(seed=0, top_p=0.5, min_p=0.5)):
        assert_distributed(draw(np.zeros(8, np.float32), params, 8000), np.full(8, 1 / 8))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(seed=0), SamplingParams(seed=0, top_k=6), SamplingParams(seed=0, top_p=0.99, min_p=0.01)],
    ids=lambda params: f"top_k={params.top_k}-min_p={params.min_p}",
)
def test_minus_infinity_is_never_drawn(params: SamplingParams) -> None:
    logits = np.full(12, -np.inf, np.float32)
    logits[[2, 7, 9]] = [0.0, 1.0, 0.5]
    probs, _ = reference_probs(logits, params)
    assert_distributed(draw(logits, params, 5000), probs)
    logits[[2, 9]] = -np.inf
    assert set(draw(logits, params, 500).tolist()) == {7}


def test_the_only_candidate_token_is_sampled_even_with_infinite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform number of exactly 0 gives Gumbel noise of -inf, which must not exclude the token."""
    monkeypatch.setattr(mx.random, "gumbel", lambda shape, key: mx.full(shape, -np.inf) + 0 * key[0])
    logits = np.array([0.0, 1.0, 9.0, 2.0], np.float32)
    assert set(draw(logits, SamplingParams(seed=0, top_k=1), 4).tolist()) == {2}


# --- extremes -----------------------------------------------------------------------------------------------


def test_sampling_at_a_very_low_temperature_resolves_tiny_logit_differences() -> None:
    logits = np.array([0.0, -1e-5, -2e-5, -1.0], np.float32)
    params = SamplingParams(seed=0, temperature=1e-5)
    assert_distributed(draw(logits, params, 20_000), reference_probs(logits, params)[0])


def test_a_temperature_beyond_float32_makes_all_tokens_alike() -> None:
    params = SamplingParams(seed=0, temperature=1e300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = draw(np.array([0.0, 9.0, -9.0, 1.0], np.float32), params, 20_000)
    assert_distributed(tokens, np.full(4, 0.25))


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-30, 1e-44, 1e-300])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = np.array([1e30, -3e30, 3e30, 2e30, -np.inf], np.float32)
    for top_p in (1.0, 0.5):
        params = SamplingParams(seed=0, temperature=temperature, top_p=top_p)
        assert set(draw(logits, params, 50).tolist()) == {2}
    params = SamplingParams(seed=0, temperature=temperature)
    assert set(draw(np.array([20.0, 21.0, 22.0], np.float32), params, 50).tolist()) == {2}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_are_sampled_in_float32(dtype: mx.Dtype) -> None:
    half = mx.array(np.random.default_rng(0).normal(0, 2, (200, 300)).astype(np.float32)).astype(dtype)
    params = [SamplingParams(seed=i, temperature=(0, 0.7, 1)[i % 3], top_p=(1, 0.9)[i % 2]) for i in range(200)]
    table, indices = table_of(*params), np.arange(200, dtype=np.int32)
    tokens = sample(half, table, indices, indices)
    assert tokens.dtype == mx.int32
    assert tokens.tolist() == sample(half.astype(mx.float32), table, indices, indices).tolist()


def test_a_vocabulary_of_one() -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(seed=0), SamplingParams(top_k=5, top_p=0.5)):
        assert draw(np.zeros(1, np.float32), params, 3).tolist() == [0, 0, 0]


# --- greedy rows and mixed batches --------------------------------------------------------------------------


def test_greedy_is_the_first_of_the_largest() -> None:
    logits = np.random.default_rng(0).integers(-3, 4, (64, 40)).astype(np.float32)
    # A greedy row ignores all other parameters.
    table = table_of(*(SamplingParams(temperature=0, top_k=i, top_p=0.5, min_p=0.5) for i in range(64)))
    indices = np.arange(64, dtype=np.int32)
    tokens = np.array(sample(mx.array(logits), table, indices, indices))
    assert tokens.tolist() == logits.argmax(axis=-1).tolist()


KINDS = (
    {"temperature": 0.0},
    {},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 1.4},
)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), vocab_size=st.sampled_from([7, 129, 1000]))
def test_a_draw_does_not_depend_on_the_batch(data: st.DataObject, vocab_size: int) -> None:
    """The same (seed, position) draws the same token alone and in any batch, in any order and in any row."""
    num_rows = data.draw(st.integers(1, 12))
    params = [
        SamplingParams(seed=data.draw(st.integers(-(2**63), 2**63 - 1)), **data.draw(st.sampled_from(KINDS)))
        for _ in range(num_rows)
    ]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, 2, (num_rows, vocab_size)).astype(np.float32)
    positions = rng.integers(0, 5000, num_rows).astype(np.int32)
    alone = [draw(logits[i], params[i], 1, first=int(positions[i])).item() for i in range(num_rows)]
    company = np.array(data.draw(st.permutations(range(num_rows))))[: data.draw(st.integers(1, num_rows))]
    home = np.array(data.draw(st.permutations(range(num_rows))))  # index of each request's parameters in the table
    table = SamplingTable(num_rows)
    for i in range(num_rows):
        table.set(int(home[i]), params[i], params[i].seed or 0)
    together = sample(mx.array(logits[company]), table, home[company].astype(np.int32), positions[company])
    assert together.tolist() == [alone[i] for i in company]


def test_a_draw_does_not_depend_on_the_batch_over_a_real_vocabulary() -> None:
    vocab_size, num_rows = 49_152, 16
    logits = np.random.default_rng(0).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    params = [SamplingParams(seed=i, **KINDS[i % len(KINDS)]) for i in range(num_rows)]
    order = np.random.default_rng(1).permutation(num_rows).astype(np.int32)
    together = sample(mx.array(logits[order]), table_of(*params), order, order)
    assert together.tolist() == [draw(logits[i], params[i], 1, first=int(i)).item() for i in order]


# --- seeds --------------------------------------------------------------------------------------------------


def test_positions_and_seeds_draw_differently() -> None:
    logits = np.zeros(1 << 16, np.float32)
    streams = {seed: draw(logits, SamplingParams(seed=seed), 40).tolist() for seed in (-2, 0, 1, 2, 2**63 - 1)}
    drawn = [token for stream in streams.values() for token in stream]
    assert len(set(drawn)) > 195, "of 200 draws from 65,536 equally likely tokens hardly any is a repetition"
    # The stream of one seed is not the shifted stream of another seed.
    assert not set(streams[0][:-1]) & set(streams[1][1:])
