"""The chain of a head's drafts equals a float64 reference that follows the target draft by draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from tools.fixtures.tiny_models import _spread, tiny_model
from tools.train_mtp.documents import Document, pack
from tools.train_mtp.head import MTPHead, chain, load_head, new_head, save_head
from tools.train_mtp.target import hidden_rows

SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(0, **SIZES)


def random_head(model: Any) -> MTPHead:
    head = MTPHead(model.args)
    mx.random.seed(1)
    head.update(tree_map(lambda array: _spread(array, mx.float32), head.parameters()))
    return head


def random_documents(lengths: list[int]) -> list[Document]:
    numbers = np.random.default_rng(0)
    return [Document(numbers.integers(0, SIZES["vocab_size"], n).astype(np.int32), 8) for n in lengths]


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, position: int, base: float) -> np.ndarray:
    """Rotate [heads, D]: number i with number i + D / 2."""
    half = x.shape[-1] // 2
    angle = position * base ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


class Reference:
    """Head in float64 that computes one slot at a time, with its own KV."""

    def __init__(self, head: MTPHead, args: Any) -> None:
        self.w: Weights = {name: np.array(array).astype(np.float64) for name, array in tree_flatten(head.parameters())}
        self.args = args

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"layers.0.{name}.weight"].T

    def slot(self, embedding: np.ndarray, hidden: np.ndarray, position: int, kv: list[Any]) -> np.ndarray:
        """Append the slot's K and V to ``kv`` and return the head's output, [H]."""
        args, w, eps = self.args, self.w, self.args.rms_norm_eps
        parts = (
            norm(embedding, w["pre_fc_norm_embedding.weight"], eps),
            norm(hidden, w["pre_fc_norm_hidden.weight"], eps),
        )
        x = np.concatenate(parts) @ w["fc.weight"].T
        y = norm(x, w["layers.0.input_layernorm.weight"], eps)
        heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
        q, k, v = (self.project(f"self_attn.{name}_proj", y).reshape(n, -1) for name, n in sizes.items())
        kv.append((rotate(k, position, args.rope_theta), v))
        q = rotate(q, position, args.rope_theta)
        group = heads // kv_heads
        out = []
        for head in range(heads):
            scores = np.array([q[head] @ keys[head // group] for keys, _ in kv]) * q.shape[-1] ** -0.5
            weights = np.exp(scores - scores.max())
            values = np.stack([values[head // group] for _, values in kv])
            out.append(weights / weights.sum() @ values)
        x = x + self.project("self_attn.o_proj", np.concatenate(out))
        y = norm(x, w["layers.0.post_attention_layernorm.weight"], eps)
        gate = self.project("mlp.gate_proj", y)
        x = x + self.project("mlp.down_proj", gate / (1 + np.exp(-gate)) * self.project("mlp.up_proj", y))
        return norm(x, w["norm.weight"], eps)

    def drafts(self, hidden: np.ndarray, embeddings: np.ndarray, start: int, num_drafts: int) -> list[np.ndarray]:
        """Return the outputs of a chain from slot ``start`` of one document: [T, H] and [T, H] -> K times [H]."""
        kv: list[Any] = []
        for slot in range(start):  # the head has followed the target up to here
            self.slot(embeddings[slot], hidden[slot], slot, kv)
        outputs = [self.slot(embeddings[start], hidden[start], start, kv)]
        for slot in range(start + 1, start + num_drafts):
            outputs.append(self.slot(embeddings[slot], outputs[-1], slot, kv))
        return outputs


def test_chain_over_packed_rows_equals_the_float64_reference(model: Any) -> None:
    head = random_head(model)
    reference = Reference(head, model.args)
    documents = random_documents([16, 13, 11])
    rows = pack(documents, 30)
    assert len(rows) == 2 and rows.segments.max() == 1  # documents share a row, and there is padding
    hidden = hidden_rows(model, mx.array(rows.token_ids), mx.array(rows.segments))
    embeddings = model.model.embed_tokens(mx.array(np.roll(rows.token_ids, -1, axis=1)))
    outputs = np.stack([np.array(output) for output in chain(head, hidden, embeddings, mx.array(rows.segments), 3)])
    num_compared = 0
    for row in range(len(rows)):
        for segment in range(rows.segments[row].max() + 1):
            (slots,) = np.nonzero(rows.segments[row] == segment)
            alone = mx.array(rows.token_ids[row, slots])[None]
            own_hidden = np.array(model.model(alone)[0]).astype(np.float64)
            own_embeddings = np.array(embeddings[row])[slots].astype(np.float64)
            for start in range(len(slots) - 3):
                expected = reference.drafts(own_hidden, own_embeddings, start, 3)
                for k in range(3):
                    found = outputs[k, row, slots[start] + k]
                    np.testing.assert_allclose(found, expected[k], rtol=0, atol=2e-4 * np.abs(expected[k]).max())
                    num_compared += 1
    assert num_compared == 3 * (13 + 10 + 8)


def test_saved_head_is_loaded_again(model: Any, tmp_path: Path) -> None:
    head = new_head(model)
    save_head(tmp_path, head, {"target": "tiny"})
    loaded = dict(tree_flatten(load_head(tmp_path, model.args).parameters()))
    for name, array in tree_flatten(head.parameters()):
        assert mx.allclose(loaded[name], array, rtol=1e-3, atol=1e-4).item(), name
    assert all(name.startswith("mtp.") for name in mx.load(str(tmp_path / "mtp.safetensors")))


def test_missing_or_unsuitable_head_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not exist"):
        load_head(tmp_path, model.args)
    save_head(tmp_path, new_head(model), {})
    with pytest.raises(SystemExit, match="does not fit"):
        load_head(tmp_path, tiny_model(0, **{**SIZES, "hidden_size": 64}).args)
