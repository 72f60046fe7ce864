"""Prompts, answers, their file and the rows that they are packed into, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.train_mtp.answers import AnswerSettings, make_documents
from tools.train_mtp.documents import Document, load_documents, pack, save_documents
from tools.train_mtp.prompts import HELD_OUT, training_prompts

EOS = 0


class Bytes:
    """Tokenizer whose tokens are bytes plus 1."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(turns) + "assistant: "

    def encode(self, text: str, **_: Any) -> list[int]:
        return [byte + 1 for byte in text.encode()]


def generate(prompts: list[list[int]], *, temperature: float, max_tokens: int, seed: int) -> list[list[int]]:
    """Answer with random tokens, of which every second output is complete."""
    numbers = np.random.default_rng(seed)
    outputs = [numbers.integers(1, 200, max_tokens).tolist() for _ in prompts]
    return [[*output[:-1], EOS] if i % 2 else output for i, output in enumerate(outputs)]


def test_training_prompts_never_contain_a_held_out_prompt() -> None:
    assert len(set(HELD_OUT)) == 48
    texts = {message["content"] for prompt in training_prompts(0) for message in prompt}
    assert len(texts) > 1000
    assert not texts & set(HELD_OUT)
    assert training_prompts(0) == training_prompts(0) != training_prompts(1)


def test_documents_come_from_templates_and_from_sampled_turns(tmp_path: Path) -> None:
    settings = AnswerSettings(minutes=5, num_documents=40, batch=8, max_tokens=12)
    lines: list[str] = []
    documents = make_documents(generate, Bytes(), frozenset({EOS}), settings, lines.append)
    held_out = [d for d in documents if d.held_out]
    assert len(held_out) == 48
    assert len(documents) - len(held_out) >= 40
    assert any("templates" in line for line in lines) and any("sampled prompts" in line for line in lines)
    assert all(len(d.token_ids) - d.answer_start == 12 for d in documents if not d.held_out)
    for document in documents:  # a prompt ends where the assistant's turn begins
        assert bytes(document.token_ids[: document.answer_start].astype(np.uint8) - 1).endswith(b"\nassistant: ")
    save_documents(tmp_path / "answers.npz", documents, {"seed": 0})
    loaded, facts = load_documents(tmp_path / "answers.npz")
    assert facts == {"seed": 0}
    assert [(*d.token_ids.tolist(), d.answer_start, d.held_out) for d in loaded] == [
        (*d.token_ids.tolist(), d.answer_start, d.held_out) for d in documents
    ]


def test_packed_rows_contain_every_document_once() -> None:
    numbers = np.random.default_rng(0)
    documents = [Document(numbers.integers(1, 1000, int(n)).astype(np.int32), 8) for n in numbers.integers(12, 50, 60)]
    rows = pack(documents, 40)
    found = []
    for row in range(len(rows)):
        for segment in range(rows.segments[row].max() + 1):
            (slots,) = np.nonzero(rows.segments[row] == segment)
            assert (np.diff(slots) == 1).all()
            found.append(tuple(rows.token_ids[row, slots]))
            counted = slots[rows.counted[row, slots]]
            # The prediction of a slot is the token two slots later, which is in the answer.
            assert counted.tolist() == list(range(slots[0] + 6, slots[-1] - 1))
    assert sorted(found) == sorted(tuple(d.token_ids[:40]) for d in documents)
    assert (rows.segments < 0).mean() < 0.1


def test_unusable_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        pack([Document(np.arange(20, dtype=np.int32), 3)], 32)
    with pytest.raises(ValueError, match="no answer"):
        pack([Document(np.arange(20, dtype=np.int32), 10)], 10)
