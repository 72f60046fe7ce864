"""What single requests ask for beyond temperature and cuts: biases, exclusions, penalties, structured output.

On the host, :class:`RowEdits` knows one request's wishes and what of them depends on its tokens; for a step,
:class:`StepEdits` packs those of all its rows into padded arrays and applies them in a few operations. Rows without
such wishes take no part in any of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_engine.runner.grammar_masks import GrammarRow, apply_masks, without
from metal_engine.sampling_params import SamplingParams, TokenRules


class NothingLeftError(ValueError):
    """The request's own parameters exclude every token."""


class _Counts:
    """How often each token is in a request: its distinct tokens, and their counts in the output alone.

    Args:
        prompt_token_ids: counted as present, without being output.
    """

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        distinct = np.unique(prompt_token_ids)
        self._size = len(distinct)
        self._ids = distinct.astype(np.int32)
        self._counts = np.zeros(self._size, np.float32)
        self._places = {token_id: i for i, token_id in enumerate(distinct.tolist())}

    def add(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the output."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, self._size)
            if place == self._size:
                if self._size == len(self._ids):
                    self._grow()
                self._ids[place] = token_id
                self._size += 1
            self._counts[place] += 1

    def _grow(self) -> None:
        extra = max(64, self._size)
        self._ids = np.concatenate([self._ids, np.zeros(extra, np.int32)])
        self._counts = np.concatenate([self._counts, np.zeros(extra, np.float32)])

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: self._size]  # [U] int32

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: self._size]  # [U] float32


class RowEdits:
    """One request's edits of its logits.

    Made when the runner is given the request, and again when it resumes: everything follows from its tokens.

    Args:
        rules: what ``params`` mean in the model's tokens.
        token_ids: all of its tokens so far, [T] int32; what is output is taken in by :meth:`catch_up`.
        num_prompt_tokens: how many of them are the prompt.
    """

    def __init__(
        self, params: SamplingParams, rules: TokenRules, token_ids: np.ndarray, num_prompt_tokens: int
    ) -> None:
        self.params = params
        self.rules = rules
        self._num_prompt_tokens = num_prompt_tokens
        self.counts: _Counts | None = None
        if params.has_penalties:
            # Only the repetition penalty looks at the prompt.
            seen = token_ids[: num_prompt_tokens if params.repetition_penalty != 1.0 else 0]
            self.counts = _Counts(seen)
        self.grammar: GrammarRow | None = None
        if rules.grammar is not None:
            self.grammar = GrammarRow(rules.grammar, rules.stop_token_ids, params.min_tokens)
        self._num_taken_in = num_prompt_tokens
        self._bad_word_lengths = sorted({len(before) for before in rules.bad_words})
        self._error: str | None = None

    def catch_up(self, token_ids: np.ndarray) -> str | None:
        """Take in the tokens generated since the last call.

        Args:
            token_ids: all of the request's tokens, [T] int32.

        Returns:
            Why the request cannot go on; None if it can.
        """
        new = token_ids[self._num_taken_in :].tolist()
        self._num_taken_in = len(token_ids)
        if self.counts is not None:
            self.counts.add(new)
        if self.grammar is not None and self._error is None:
            try:
                self.grammar.consume(new)
            except ValueError as error:
                self._error = f"structured output failed: {error}"
        return self._error

    def excluded(self, token_ids: np.ndarray, position: int) -> np.ndarray:
        """Token ids, int32, that may not be the output's token ``position``, after ``token_ids``, [T] int32.

        Raises:
            NothingLeftError: only these were allowed.
        """
        num_output = len(token_ids) - self._num_prompt_tokens
        excluded: list[int] = []
        for length in self._bad_word_lengths:
            if length <= num_output:
                before = tuple(token_ids[len(token_ids) - length :].tolist())
                excluded += self.rules.bad_words.get(before, ())
        ids = np.array(excluded, np.int32)
        if position < self.params.min_tokens and self.grammar is None:
            ids = np.concatenate([ids, self.rules.stop_token_ids])
        allowed = self.rules.allowed
        if allowed is not None and len(ids) and not without(allowed, ids).any():
            raise NothingLeftError("bad_words, min_tokens and allowed_token_ids together leave no token")
        return ids


@dataclass
class StepEdits:
    """The edits of one step, for E rows of logits.

    Attributes:
        rows: [E] which of the step's rows of logits they are.
        allowed: row (of E), the mask of the only tokens allowed, [W] int32.
        add_rows, add_ids, add_values: what to add to single logits; -inf excludes a token. [A] each.
        penalties: row (of E), its tokens' counts, its parameters.
        grammars: row (of E), where it stands in its grammar.
        errors: row (of E) -> why its request cannot go on.
    """

    rows: np.ndarray
    allowed: list[tuple[int, np.ndarray]]
    add_rows: np.ndarray
    add_ids: np.ndarray
    add_values: np.ndarray
    penalties: list[tuple[int, _Counts, SamplingParams]]
    grammars: list[tuple[int, GrammarRow]]
    errors: dict[int, str]

    @classmethod
    def of(cls, rows: np.ndarray, edits: list[RowEdits], tokens: list[np.ndarray], positions: list[int]) -> StepEdits:
        """Pack the edits of some rows.

        Args:
            tokens: each one's tokens, as far as they are known here, [T] int32.
            positions: index of each one's next token in its output.
        """
        allowed: list[tuple[int, np.ndarray]] = []
        penalties, grammars = [], []
        errors: dict[int, str] = {}
        places: list[np.ndarray] = []
        ids: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for i, (row, token_ids, position) in enumerate(zip(edits, tokens, positions, strict=True)):
            params = row.params
            if row.rules.allowed is not None:
                allowed.append((i, row.rules.allowed))
            try:
                excluded = row.excluded(token_ids, position)
            except NothingLeftError as error:
                errors[i] = str(error)
                excluded = np.zeros(0, np.int32)
            ids += [excluded, row.rules.bias_ids]
            values += [np.full(len(excluded), -np.inf, np.float32), row.rules.biases]
            places.append(np.full(len(ids[-2]) + len(ids[-1]), i, np.int32))
            if row.counts:  # without tokens there is nothing to penalize
                penalties.append((i, row.counts, params))
            if row.grammar is not None:
                grammars.append((i, row.grammar))
        return cls(
            rows=rows,
            allowed=allowed,
            add_rows=np.concatenate(places),
            add_ids=np.concatenate(ids),
            add_values=np.concatenate(values),
            penalties=penalties,
            grammars=grammars,
            errors=errors,
        )

    def apply(self, logits: mx.array, masks: np.ndarray) -> mx.array:
        """The edited logits: [E, V] float32 -> the same.

        Args:
            masks: [G, W] int32, what the grammars of ``grammars`` allow (:meth:`GrammarRow.fill_mask`).
        """
        if self.grammars:
            at = mx.array(np.array([i for i, _ in self.grammars], np.int32))
            logits[at] = apply_masks(logits[at], masks)
        if self.allowed:
            at = mx.array(np.array([i for i, _ in self.allowed], np.int32))
            logits[at] = apply_masks(logits[at], np.stack([mask for _, mask in self.allowed]))
        if len(self.add_ids):
            places = mx.array(self.add_rows), mx.array(self.add_ids)
            logits = logits.at[places].add(mx.array(self.add_values))
        if self.penalties:
            logits = self._penalized(logits)
        return logits

    def _penalized(self, logits: mx.array) -> mx.array:
        at = mx.array(np.array([i for i, _, _ in self.penalties], np.int32))
        # Padding repeats a row's first token, with its own count: it is given the same value twice.
        ids = mx.array(_padded([counts.ids for _, counts, _ in self.penalties]))  # [P, U]
        counts = mx.array(_padded([counts.counts for _, counts, _ in self.penalties]))  # [P, U]
        params = [params for _, _, params in self.penalties]
        repetition = _column(p.repetition_penalty for p in params)
        presence = _column(p.presence_penalty for p in params)
        frequency = _column(p.frequency_penalty for p in params)
        rows = logits[at]
        values = mx.take_along_axis(rows, ids, axis=-1)
        values = mx.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * counts - presence * (counts > 0)
        logits[at] = mx.put_along_axis(rows, ids, values, axis=-1)
        return logits


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of different lengths, at least 1, as one array, filled up with each one's first element."""
    length = max(map(len, rows))
    return np.stack([np.concatenate([row, np.full(length - len(row), row[0], row.dtype)]) for row in rows])


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(np.fromiter(values, np.float32))[:, None]  # [P, 1]
