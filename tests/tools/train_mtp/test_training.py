"""Loss, training and acceptance of a head, on a tiny model's own greedy answers."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tools.fixtures.tiny_models import tiny_model
from tools.train_mtp.acceptance import Acceptance, HeldOut, acceptance
from tools.train_mtp.documents import Document, pack
from tools.train_mtp.head import new_head
from tools.train_mtp.objective import draft_losses
from tools.train_mtp.training import Progress, TrainingSettings, train

VOCAB = 32


def greedy_documents(model: Any, count: int) -> list[Document]:
    """Return documents of 8 random tokens and 16 greedy tokens."""
    token_ids = np.random.default_rng(0).integers(0, VOCAB, (count, 8))
    for _ in range(16):
        logits = model(mx.array(token_ids))[:, -1]
        token_ids = np.concatenate([token_ids, np.array(logits.argmax(axis=-1))[:, None]], axis=1)
    return [Document(row.astype(np.int32), 8) for row in token_ids]


def test_losses_and_gradients_equal_values_from_the_whole_logits() -> None:
    mx.random.seed(0)
    lm_head, targets, weights = mx.random.normal((50, 8)), mx.random.normal((12, 8)), mx.random.uniform(shape=(12,))
    outputs = [mx.random.normal((12, 8)) for _ in range(2)]

    def whole(output: mx.array) -> mx.array:
        expected, found = (nn.log_softmax(x @ lm_head.T, axis=-1) for x in (targets, output))
        return (weights[:, None] * mx.exp(expected) * (expected - found)).sum()

    losses, gradients = draft_losses(outputs, targets, weights, lm_head, 4)
    for k, output in enumerate(outputs):
        loss, gradient = mx.value_and_grad(whole)(output)
        assert mx.allclose(losses[k], loss, rtol=1e-4).item()
        assert mx.allclose(gradients[k], gradient, rtol=1e-3, atol=1e-4).item()


def train_a_head() -> tuple[int, list[Progress], Acceptance, Acceptance]:
    """Train a head for a tiny model. Return the number of steps, the reports, and the acceptance before and after."""
    model = tiny_model(0, hidden_size=32, intermediate_size=48, vocab_size=VOCAB)
    documents = greedy_documents(model, 24)
    held_out = HeldOut(model, documents[:8])
    mx.random.seed(0)
    head = new_head(model)
    before = held_out.measure(head)
    reports: list[Progress] = []
    settings = TrainingSettings(
        steps=40, minutes=5, rows_per_step=4, rows_per_chunk=64, learning_rate=1e-2, warmup_steps=4, report_every=10
    )
    facts = train(model, head, pack(documents, 48), settings, reports.append)
    return facts["num_steps"], reports, before, held_out.measure(head)


def test_training_raises_the_acceptance() -> None:
    # An engine that was built in this process has replaced operations of the model by others without gradients.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        num_steps, reports, before, after = process.submit(train_a_head).result()
    assert num_steps == 40
    assert [report.step for report in reports] == [10, 20, 30, 40]
    assert all(last < first for first, last in zip(reports[0].losses, reports[-1].losses, strict=True))
    assert after.all_right[0] > before.all_right[0] + 0.2
    assert after.all_right == sorted(after.all_right, reverse=True)


def test_acceptance_counts_chains() -> None:
    right = np.array([[[1, 1, 0, 1, 1, 1]], [[1, 1, 1, 1, 0, 1]], [[1, 1, 1, 1, 1, 0]]], bool)
    counted = np.array([[0, 1, 1, 1, 1, 1]], bool)
    # Chains from slot 1: right, right, right. From slot 2: wrong. From slot 3: right, wrong.
    result = acceptance(right, counted)
    assert result.num_positions == 3
    assert result.all_right == pytest.approx([2 / 3, 1 / 3, 1 / 3], abs=1e-4)
    assert result.each_right == pytest.approx([2 / 3, 1 / 2, 1.0], abs=1e-4)
    assert result.tokens_per_step == pytest.approx([5 / 3, 2, 7 / 3], abs=1e-4)
    with pytest.raises(ValueError, match="long enough"):
        acceptance(right, counted & False)
