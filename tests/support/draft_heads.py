"""Draft heads with random weights, and an independent computation of a head's output."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from metal_engine.models.draft_head import DraftHead, new_head
from metal_engine.runner.head_drafter import HeadDrafter
from metal_engine.scheduling.speculation.acceptance import Acceptance
from metal_engine.step import Drafting
from tests.support.speculation import draft_for_free, head_config
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import spread_weights


def random_head(model: nn.Module) -> DraftHead:
    """Return a head for a model. The same model gets the same weights."""
    mx.random.seed(5)
    head = new_head(model)
    spread_weights(head)
    return head


class AlwaysLikely(Acceptance):
    """Acceptance that stays high, so that each request gets the maximum number of drafts."""

    def of(self, request_id: str) -> float:
        return 0.9


def head_engine(num_drafts: int = 3, **config: Any) -> SteppedEngine:
    """Return a tiny engine with a random draft head, whose drafts count as free and as likely to be accepted."""
    engine = tiny_engine(speculative=head_config(num_drafts), make_head=random_head, **config)
    draft_for_free(engine)
    draft_always(engine)
    return engine


def draft_always(engine: SteppedEngine) -> None:
    """Make an engine request as many drafts as possible from its draft head."""
    engine.scheduler.speculation._proposals.acceptance.computed = AlwaysLikely()


def watch_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Record each request's known tokens and the head's drafts after them from now on."""
    found: list[tuple[list[int], list[int]]] = []
    draft = HeadDrafter.draft

    def watched(self: HeadDrafter, table: Any, plan: Any) -> Drafting | None:
        drafting = draft(self, table, plan)
        if drafting is not None:
            found.extend((table.token_ids(table.index(r)).tolist(), d) for r, d in drafting.token_ids.items() if d)
        return drafting

    monkeypatch.setattr(HeadDrafter, "draft", watched)
    return found


class HeadReference:
    """Computation of a head's drafts, without a cache. Results are kept, because tests have the same drafts."""

    def __init__(self) -> None:
        self._gaps: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def logits(self, known: list[int], drafts: list[int]) -> np.ndarray:
        """Return the head's logits at each of some drafts that follow known tokens, [T, V]."""
        raise NotImplementedError

    def gap(self, known: list[int], drafts: list[int]) -> float:
        """Return the largest gap between the best logit and a draft's logit, relative to the largest magnitude."""
        key = tuple(known), tuple(drafts)
        if key not in self._gaps:
            rows = zip(self.logits(known, drafts), drafts, strict=True)
            self._gaps[key] = float(max((row.max() - row[i]) / np.abs(row).max() for row, i in rows))
        return self._gaps[key]


def head_outputs(
    head: DraftHead, args: Any, embeddings: np.ndarray, hidden: np.ndarray, positions: np.ndarray | None = None
) -> np.ndarray:
    """Return the output of a Qwen3.5 head for one sequence without a cache, in float64, [T, H].

    Args:
        args: arguments of the text model.
        embeddings: embeddings of the tokens after each position, [T, H].
        hidden: hidden states, [T, H].
        positions: rotary position of each pair of elements, [T, pairs]; None for the index of the position.
    """
    flat: Any = tree_flatten(head.parameters())
    weights = {name: np.array(array).astype(np.float64) for name, array in flat}
    eps, length = args.rms_norm_eps, len(hidden)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[name]

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[name].T

    embedded, normed = norm(embeddings, "pre_fc_norm_embedding.weight"), norm(hidden, "pre_fc_norm_hidden.weight")
    x = product(np.concatenate([embedded, normed], -1), "fc.weight")
    y, layer = norm(x, "layers.0.input_layernorm.weight"), "layers.0.self_attn"
    num_heads, num_kv_heads, head_dim = args.num_attention_heads, args.num_key_value_heads, args.head_dim
    queries = product(y, f"{layer}.q_proj.weight").reshape(length, num_heads, 2 * head_dim)
    gate = queries[..., head_dim:].reshape(length, -1)
    keys = product(y, f"{layer}.k_proj.weight").reshape(length, num_kv_heads, head_dim)
    values = product(y, f"{layer}.v_proj.weight").reshape(length, num_kv_heads, head_dim)
    dims = int(head_dim * args.partial_rotary_factor)
    if positions is None:
        positions = np.repeat(np.arange(length)[:, None], dims // 2, axis=1)
    queries = _rotated(norm(queries[..., :head_dim], f"{layer}.q_norm.weight"), dims, args.rope_theta, positions)
    keys = _rotated(norm(keys, f"{layer}.k_norm.weight"), dims, args.rope_theta, positions)
    keys, values = (np.repeat(array, num_heads // num_kv_heads, axis=1) for array in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) * head_dim**-0.5
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), values).reshape(length, -1)
    x = x + product(mixed / (1 + np.exp(-gate)), f"{layer}.o_proj.weight")
    y = norm(x, "layers.0.post_attention_layernorm.weight")
    gated = product(y, "layers.0.mlp.gate_proj.weight")
    inner = gated / (1 + np.exp(-gated)) * product(y, "layers.0.mlp.up_proj.weight")
    return norm(x + product(inner, "layers.0.mlp.down_proj.weight"), "norm.weight")


def _rotated(x: np.ndarray, dims: int, base: float, positions: np.ndarray) -> np.ndarray:
    """Rotate the first ``dims`` elements of the vectors of each position, [T, heads, D]."""
    half = dims // 2
    angles = positions[:, None, :] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], -1)
