"""The chain of a head's drafts equals a head that follows the target draft by draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache

from tools.fixtures.tiny_models import _spread, tiny_model
from tools.train_mtp.documents import Document, pack
from tools.train_mtp.head import MTPHead, chain, load_head, new_head, save_head
from tools.train_mtp.target import hidden_rows

SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}


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


def drafts(head: MTPHead, hidden: mx.array, embeddings: mx.array, start: int, num_drafts: int) -> list[mx.array]:
    """Return the outputs of a chain from slot ``start`` of one document, one slot at a time with mlx-lm's KV cache."""
    cache = KVCache()

    def slot(embedding: mx.array, hidden: mx.array) -> mx.array:
        parts = [head.pre_fc_norm_embedding(embedding), head.pre_fc_norm_hidden(hidden)]
        return head.norm(head.layers[0](head.fc(mx.concatenate(parts))[None, None], None, cache))[0, 0]

    for i in range(start):  # the head has followed the target up to here
        slot(embeddings[i], hidden[i])
    outputs = [slot(embeddings[start], hidden[start])]
    for i in range(start + 1, start + num_drafts):
        outputs.append(slot(embeddings[i], outputs[-1]))
    return outputs


def test_chain_over_packed_rows_equals_one_slot_at_a_time(model: Any) -> None:
    head = random_head(model)
    rows = pack(random_documents([16, 13, 11]), 30)
    assert len(rows) == 2 and rows.segments.max() == 1  # documents share a row, and there is padding
    hidden = hidden_rows(model, mx.array(rows.token_ids), mx.array(rows.segments))
    embeddings = model.model.embed_tokens(mx.array(np.roll(rows.token_ids, -1, axis=1)))
    outputs = np.stack([np.array(output) for output in chain(head, hidden, embeddings, mx.array(rows.segments), 3)])
    num_compared = 0
    for row in range(len(rows)):
        for segment in range(rows.segments[row].max() + 1):
            (slots,) = np.nonzero(rows.segments[row] == segment)
            alone = model.model(mx.array(rows.token_ids[row, slots])[None])[0]
            for start in range(len(slots) - 3):
                expected = drafts(head, alone, embeddings[row][mx.array(slots)], start, 3)
                for k, output in enumerate(map(np.array, expected)):
                    found = outputs[k, row, slots[start] + k]
                    np.testing.assert_allclose(found, output, rtol=0, atol=2e-4 * np.abs(output).max())
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
