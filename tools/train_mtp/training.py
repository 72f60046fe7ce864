"""Trains a head on packed documents, with the target frozen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from tools.train_mtp.documents import PackedRows
from tools.train_mtp.head import MTPHead, chain
from tools.train_mtp.objective import draft_losses
from tools.train_mtp.target import head_weight, hidden_of_all

# Weight of the loss of each draft of a chain. A later draft matters only if all earlier ones are right.
PASS_WEIGHTS = (1.0, 0.6, 0.4)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of a training run. Training ends at ``steps`` or ``minutes``, whichever comes first.

    Attributes:
        rows_per_step: packed rows of a batch.
        rows_per_chunk: slots whose logits are in memory at a time. With 49,152 words, an array of 4,096 slots takes
            0.4 GB in float16. About six such arrays exist at a time.
        learning_rate: peak of the schedule: linear warm-up, then a cosine down to a hundredth.
        report_every: steps between two reports.
    """

    steps: int
    minutes: float
    rows_per_step: int
    rows_per_chunk: int
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    report_every: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """Progress of a training run.

    Attributes:
        step: number of completed steps.
        seconds: time since the start of training.
        losses: KL divergence of each draft of a chain in nats per token, averaged over the steps since the last report.
    """

    step: int
    seconds: float
    losses: list[float]


def product_dtype() -> mx.Dtype:
    """Return the type of products with the LM head: float16 on a GPU, float32 on a CPU, where float16 is slow."""
    return mx.float16 if mx.default_device().type == mx.DeviceType.gpu else mx.float32


def train(
    target: nn.Module, head: MTPHead, rows: PackedRows, settings: TrainingSettings, report: Callable[[Progress], None]
) -> dict[str, float]:
    """Train ``head`` in place. Its weights are float32.

    The target's hidden states of all rows are computed once and kept, in 2 bytes per number: 1.2 kB per slot of the
    demo model.

    Args:
        report: called every ``report_every`` steps and after the last step.

    Returns:
        Facts about the run: the settings, number of steps, seconds, and mean number of counted slots per step.
    """
    dtype = product_dtype()
    lm_head = head_weight(target).astype(dtype)
    embedding = target.model.embed_tokens.weight.astype(dtype)
    hidden = hidden_of_all(target, rows, settings.rows_per_step, mx.float16)
    token_ids, segments = mx.array(rows.token_ids), mx.array(rows.segments)
    optimizer = optim.AdamW(settings.learning_rate, betas=[0.9, 0.95], weight_decay=settings.weight_decay)
    loss_and_gradients = nn.value_and_grad(head, partial(_surrogate, head, lm_head, settings.rows_per_chunk))
    order = _batches(len(rows), settings.rows_per_step, np.random.default_rng(settings.seed))
    began = time.monotonic()
    recent: list[mx.array] = []
    step, num_counted = 0, 0
    while step < settings.steps and time.monotonic() - began < 60 * settings.minutes:
        batch = next(order)
        counted, weights = _counted_slots(rows.counted[batch], settings.rows_per_chunk)
        num_counted += int(weights.sum())
        index = mx.array(batch)
        states, tokens = hidden[index].astype(mx.float32), token_ids[index]
        embeddings = embedding[_next_slots(tokens)].astype(mx.float32)
        optimizer.learning_rate = _learning_rate(step, time.monotonic() - began, settings)
        (_, losses), gradients = loss_and_gradients(
            states, embeddings, segments[index], mx.array(counted), mx.array(weights)
        )
        gradients, _ = optim.clip_grad_norm(gradients, settings.max_gradient_norm)
        optimizer.update(head, gradients)
        mx.async_eval(head.parameters(), optimizer.state, losses)
        if recent:  # at most two steps are in flight
            mx.eval(recent[-1])
        recent.append(losses)
        step += 1
        if step % settings.report_every == 0:
            report(Progress(step, time.monotonic() - began, mx.stack(recent).mean(axis=0).tolist()))
            recent.clear()
    mx.eval(head.parameters())
    seconds = time.monotonic() - began
    if recent:
        report(Progress(step, seconds, mx.stack(recent).mean(axis=0).tolist()))
    mean_counted = num_counted / max(step, 1)
    measured = {"num_steps": step, "seconds": round(seconds, 1), "mean_slots_per_step": round(mean_counted)}
    return asdict(settings) | measured


def _surrogate(
    head: MTPHead,
    lm_head: mx.array,
    rows_per_chunk: int,
    hidden: mx.array,
    embeddings: mx.array,
    segments: mx.array,
    counted: mx.array,
    weights: mx.array,
) -> tuple[mx.array, mx.array]:
    """Return a number for differentiation, and the mean loss of each pass, [K].

    The number is not the loss, but its gradient by the head's weights equals the gradient of the loss. The loss is the
    sum of the passes' losses with ``PASS_WEIGHTS``.

    Args:
        hidden: [B, L, H] float32, the target's hidden states.
        embeddings: [B, L, H] float32, embedding of the token after each slot.
        segments: [B, L].
        counted: [N] indices of slots that count, among the B * L slots of the batch.
        weights: [N] float32; 0 for padding.
    """
    size = hidden.shape[-1]
    outputs = chain(head, hidden, embeddings, segments, len(PASS_WEIGHTS))
    chosen = [output.reshape(-1, size)[counted] for output in outputs]
    targets = _next_slots(hidden).reshape(-1, size)[counted]
    fixed = [mx.stop_gradient(output) for output in chosen]
    sums, by_output = draft_losses(fixed, targets, weights, lm_head, rows_per_chunk)
    total = weights.sum()
    of_passes = [
        factor * (output * gradient).sum()
        for factor, output, gradient in zip(PASS_WEIGHTS, chosen, by_output, strict=True)
    ]
    return sum(of_passes) / total, sums / total


def _next_slots(array: mx.array) -> mx.array:
    """Return [B, L, ...] shifted so that each slot has the values of the next slot. The last slot is arbitrary."""
    return mx.roll(array, -1, axis=1)


def _batches(num_rows: int, rows_per_step: int, numbers: np.random.Generator):  # type: ignore[no-untyped-def]
    """Yield batches without end, each as ``rows_per_step`` row indices. Each epoch has all rows in a new order."""
    order = np.zeros(0, np.int64)
    while True:
        while len(order) < rows_per_step:
            order = np.concatenate([order, numbers.permutation(num_rows)])
        yield order[:rows_per_step]
        order = order[rows_per_step:]


def _counted_slots(counted: np.ndarray, rows_per_chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat indices of the True slots of [B, L], and a weight of 1 for each.

    Both are padded to a multiple of ``rows_per_chunk``, with index 0 and weight 0.
    """
    (indices,) = np.nonzero(counted.reshape(-1))
    padding = -len(indices) % rows_per_chunk
    weights = np.ones(len(indices) + padding, np.float32)
    weights[len(indices) :] = 0
    return np.pad(indices, (0, padding)).astype(np.int32), weights


def _learning_rate(step: int, seconds: float, settings: TrainingSettings) -> float:
    progress = max(step / settings.steps, seconds / (60 * settings.minutes))
    cosine = 0.505 + 0.495 * math.cos(math.pi * min(progress, 1.0))
    return settings.learning_rate * min(1.0, (step + 1) / settings.warmup_steps) * cosine
