"""Acceptance of a head's drafts on the target's greedy answers to held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tools.train_mtp.documents import Document, PackedRows, pack
from tools.train_mtp.head import MTPHead, chain
from tools.train_mtp.objective import greedy_tokens
from tools.train_mtp.target import head_weight, hidden_of_all

NUM_DRAFTS = 3


@dataclass(frozen=True)
class Acceptance:
    """Shares of right drafts in held-out answers. Each list has a value for k = 1, 2, 3 drafts.

    Attributes:
        num_positions: number of positions in the answers at which a chain of three drafts can begin without passing
            the end of the answer.
        all_right: share of positions whose drafts 1 to k are all right.
        each_right: share of right drafts k among the positions whose earlier drafts are all right.
        tokens_per_step: mean tokens of a step with k drafts, if steps began at every position equally often.
    """

    num_positions: int
    all_right: list[float]
    each_right: list[float]
    tokens_per_step: list[float]


class HeldOut:
    """Held-out documents with the target's hidden states, each document in a row of its own.

    Args:
        rows_per_batch: rows that are computed at a time.
    """

    def __init__(self, target: nn.Module, documents: list[Document], rows_per_batch: int = 8) -> None:
        self.rows = one_per_row(documents)
        self._target, self._rows_per_batch = target, rows_per_batch
        self._hidden = hidden_of_all(target, self.rows, rows_per_batch, mx.float32)

    def measure(self, head: MTPHead) -> Acceptance:
        """Return the acceptance of all documents. Raises ValueError if no answer is long enough."""
        return acceptance(self.right_drafts(head), self.rows.counted)

    def measure_each(self, head: MTPHead) -> list[Acceptance | None]:
        """Return the acceptance of each document; None if its answer is too short for a chain."""
        right, counted = self.right_drafts(head), self.rows.counted
        return [
            acceptance(right[:, i : i + 1], counted[i : i + 1])
            if _starts(counted[i : i + 1], len(right)).any()
            else None
            for i in range(len(counted))
        ]

    def right_drafts(self, head: MTPHead, num_drafts: int = NUM_DRAFTS) -> np.ndarray:
        """Return which drafts are right, [K, R, L] bool. True for pass k in slot q if its draft equals token q + 2.

        The head follows the target: its keys come from the true tokens. The chain's own keys come from its earlier
        drafts, which are assumed right.
        """
        lm_head = head_weight(self._target)
        token_ids = self.rows.token_ids
        right = np.zeros((num_drafts, *token_ids.shape), bool)
        for start in range(0, len(token_ids), self._rows_per_batch):
            batch = slice(start, start + self._rows_per_batch)
            embeddings = self._target.model.embed_tokens(mx.array(np.roll(token_ids[batch], -1, axis=1)))
            expected = np.roll(token_ids[batch], -2, axis=1)
            outputs = chain(head, self._hidden[batch], embeddings, mx.array(self.rows.segments[batch]), num_drafts)
            for k, output in enumerate(outputs):
                for row in range(len(expected)):  # logits of one row at a time
                    right[k, start + row] = np.array(greedy_tokens(output[row], lm_head)) == expected[row]
        return right


def acceptance(right: np.ndarray, counted: np.ndarray) -> Acceptance:
    """Return the shares of right drafts, from the chains that lie in an answer as a whole.

    Args:
        right: result of :meth:`HeldOut.right_drafts`.
        counted: [R, L] bool, slots whose prediction is a token of an answer.

    Raises:
        ValueError: no answer is long enough for a chain.
    """
    num_drafts = len(right)
    starts = _starts(counted, num_drafts)
    num_positions = int(starts.sum())
    if num_positions == 0:
        raise ValueError("no answer is long enough for a chain of drafts")
    # A chain from slot p has its drafts in the slots p, p + 1, ...
    by_start = [right[k][:, k : k + starts.shape[1]] for k in range(num_drafts)]
    counts = [int((chains & starts).sum()) for chains in np.logical_and.accumulate(by_start)]
    all_right = [count / num_positions for count in counts]
    each_right = [count / max(n, 1) for count, n in zip(counts, [num_positions, *counts[:-1]], strict=True)]
    tokens = [1 + sum(all_right[: k + 1]) for k in range(num_drafts)]
    return Acceptance(num_positions, *([round(x, 4) for x in values] for values in (all_right, each_right, tokens)))


def _starts(counted: np.ndarray, num_drafts: int) -> np.ndarray:
    """Return the slots at which a chain begins whose K drafts all predict tokens of an answer, [R, L - K + 1] bool."""
    length = counted.shape[1] - num_drafts + 1
    return np.logical_and.reduce([counted[:, k : k + length] for k in range(num_drafts)])


def one_per_row(documents: list[Document]) -> PackedRows:
    """Return rows with one document each, as long as the longest document."""
    length = max(len(document.token_ids) for document in documents)
    each = [pack([document], length) for document in documents]
    fields = ("token_ids", "segments", "counted")
    return PackedRows(*(np.concatenate([getattr(rows, name) for rows in each]) for name in fields))
