"""Documents (a prompt with its answer, as token ids), their file, and their packing into rows of fixed length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Slots of a document before the first predicted token: chains of drafts reach back over them.
MIN_PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Document:
    """Token ids of a prompt and its answer.

    Attributes:
        token_ids: [T] int32. The end-of-sequence token of a completed answer is the last one.
        answer_start: index of the answer's first token.
        held_out: True if the document is only for measuring acceptance.
    """

    token_ids: np.ndarray
    answer_start: int
    held_out: bool = False


@dataclass(frozen=True)
class PackedRows:
    """Documents packed into rows of L slots. A document occupies consecutive slots of one row.

    Attributes:
        token_ids: [R, L] int32; 0 in padding.
        segments: [R, L] int32, number of the document within its row; -1 in padding.
        counted: [R, L] bool. True in slot q if token q + 2, which the head predicts in this slot, is part of an answer.
    """

    token_ids: np.ndarray
    segments: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)


def save_documents(path: Path, documents: list[Document], facts: dict[str, Any]) -> None:
    """Write documents and JSON-compatible ``facts`` about their origin to an ``.npz`` file."""
    token_ids = np.concatenate([document.token_ids for document in documents])
    is_small = token_ids.max() < 1 << 16
    np.savez_compressed(
        path,
        token_ids=token_ids.astype(np.uint16 if is_small else np.int32),
        ends=np.cumsum([len(document.token_ids) for document in documents]),
        answer_starts=np.array([document.answer_start for document in documents], np.int32),
        held_out=np.array([document.held_out for document in documents]),
        facts=np.array(json.dumps(facts)),
    )


def load_documents(path: Path) -> tuple[list[Document], dict[str, Any]]:
    """Read a file of :func:`save_documents`. Raises SystemExit if the file does not exist."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: run `python -m tools.fixtures.train_mtp answers` first")
    with np.load(path) as arrays:
        token_ids = np.split(arrays["token_ids"].astype(np.int32), arrays["ends"][:-1])
        starts, held_out = arrays["answer_starts"].tolist(), arrays["held_out"].tolist()
        facts = json.loads(str(arrays["facts"]))
    return [Document(*fields) for fields in zip(token_ids, starts, held_out, strict=True)], facts


def pack(documents: list[Document], row_tokens: int) -> PackedRows:
    """Pack documents into rows of ``row_tokens`` slots, and cut documents that are longer.

    Longer documents are placed first, each into the fullest row with enough space. Documents without a counted slot are
    left out.

    Raises:
        ValueError: a prompt has fewer than ``MIN_PROMPT_TOKENS`` tokens, or no document has a counted slot.
    """
    if any(document.answer_start < MIN_PROMPT_TOKENS for document in documents):
        raise ValueError(f"each prompt must have at least {MIN_PROMPT_TOKENS} tokens")
    usable = [d for d in documents if min(len(d.token_ids), row_tokens) > d.answer_start]
    if not usable:
        raise ValueError(f"no answer begins within the first {row_tokens} tokens of its document")
    rows: list[list[Document]] = []
    by_space: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # rows with this many free slots
    for document in sorted(usable, key=lambda d: -len(d.token_ids)):
        length = min(len(document.token_ids), row_tokens)
        space = next((s for s in range(length, row_tokens + 1) if by_space[s]), None)
        if space is None:
            rows.append([])
            row, space = len(rows) - 1, row_tokens
        else:
            row = by_space[space].pop()
        rows[row].append(document)
        by_space[space - length].append(row)
    shape = len(rows), row_tokens
    token_ids, segments, counted = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for row, packed in enumerate(rows):
        start = 0
        for segment, document in enumerate(packed):
            length = min(len(document.token_ids), row_tokens)
            end = start + length
            token_ids[row, start:end] = document.token_ids[:length]
            segments[row, start:end] = segment
            counted[row, start + document.answer_start - 2 : end - 2] = True
            start = end
    return PackedRows(token_ids, segments, counted)
