"""Edits logits as requests ask, before temperature and cuts: biases, exclusions, penalties, structured output.

On the host, :class:`RequestEdits` knows what one request asks for and keeps what depends on its tokens. For a step,
:class:`StepEdits` packs the edits of all requests into padded arrays and applies them in a few operations. Requests
without edits take no part in any of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from metal_engine.runner.grammar_masks import GrammarState, apply_masks, without
from metal_engine.sampling_params import SamplingParams, TokenRules


class CannotGoOnError(ValueError):
    """A request must end: its own parameters exclude every token."""


class _Counts:
    """How often each token is in a request: its distinct tokens, and their counts in the output alone.

    Args:
        prompt_token_ids: counted as present, without being output.
    """

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        distinct = np.unique(prompt_token_ids)
        self._ids = distinct.astype(np.int32)  # those in use, then places for more
        self._counts = np.zeros(len(distinct), np.float32)
        self._places = {token_id: i for i, token_id in enumerate(distinct.tolist())}

    def add(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the output."""
        for token_id in token_ids:
            place = self._places.get(token_id)
            if place is None:
                place = self._places[token_id] = len(self._places)
                if place == len(self._ids):
                    extra = max(64, place)
                    self._ids = np.pad(self._ids, (0, extra))
                    self._counts = np.pad(self._counts, (0, extra))
                self._ids[place] = token_id
            self._counts[place] += 1

    def __len__(self) -> int:
        return len(self._places)

    def after(self, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``ids`` and ``counts`` as they are when so many more tokens of the output have been counted."""
        counts = self.counts.copy()
        new: dict[int, int] = {}
        for token_id in token_ids:
            place = self._places.get(token_id)
            if place is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                counts[place] += 1
        ids = np.concatenate([self.ids, np.fromiter(new, np.int32, len(new))])
        return ids, np.concatenate([counts, np.fromiter(new.values(), np.float32, len(new))])

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self)]  # [U] int32

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self)]  # [U] float32


class RequestEdits:
    """One request's edits of its logits.

    Made when the runner is given the request, and again when it resumes after preemption.

    Args:
        rules: what ``params`` mean in the model's tokens.
        token_ids: all of its tokens so far, [T] int32. :meth:`catch_up` takes in those of them that are output.
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
        self.grammar: GrammarState | None = None
        if rules.grammar is not None:
            self.grammar = GrammarState(rules.grammar, rules.stop_token_ids, params.min_tokens)
        self._num_taken_in = num_prompt_tokens
        self._bad_word_lengths = sorted({len(before) for before in rules.bad_words})

    def catch_up(self, token_ids: np.ndarray, drafts: Sequence[int] = ()) -> None:
        """Take in the tokens generated since the last call.

        Args:
            token_ids: all of the request's tokens, [T] int32.
            drafts: tokens that may follow, after each of which one is to be sampled in this step.
        """
        new = token_ids[self._num_taken_in :].tolist()
        self._num_taken_in = len(token_ids)
        if self.counts is not None:
            self.counts.add(new)
        if self.grammar is not None:
            self.grammar.consume(new, drafts)

    def excluded(self, token_ids: np.ndarray, position: int) -> np.ndarray:
        """Returns the token ids, int32, that may not come next.

        Args:
            token_ids: the request's tokens as far as they are known here, with the drafts before the row, [T] int32.
            position: index of the next token in the output.

        Raises:
            CannotGoOnError: no other token is allowed.
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
            raise CannotGoOnError("bad_words, min_tokens and allowed_token_ids together leave no token")
        return ids


class StepEdits:
    """The edits of one step, for E rows of logits.

    Attributes:
        rows: which of the step's rows of logits they are, E of them.
        grammars: those of the E rows that have a grammar, where each one's output stands in it, and after how many
            drafts the row comes.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.grammars: list[tuple[int, GrammarState, int]] = []
        self._allowed: list[tuple[int, np.ndarray]] = []
        self._penalties: list[tuple[int, np.ndarray, np.ndarray, SamplingParams]] = []  # row, ids, counts
        # What to add to single logits, in parts: rows (of E), token ids and values; -inf excludes a token.
        self._places: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, row: int, edits: RequestEdits, token_ids: np.ndarray, position: int, num_drafts: int = 0) -> None:
        """Take in one row's edits; ``token_ids`` and ``position`` are those of :meth:`RequestEdits.excluded`.

        Args:
            num_drafts: how many of ``token_ids`` are drafts, the last ones.

        Raises:
            CannotGoOnError: no token is left; the row then takes no part.
        """
        excluded = edits.excluded(token_ids, position)
        i = len(self.rows)
        self.rows.append(row)
        rules = edits.rules
        if rules.allowed is not None:
            self._allowed.append((i, rules.allowed))
        self._places.append(np.full(len(excluded) + len(rules.bias_ids), i, np.int32))
        self._ids += [excluded, rules.bias_ids]
        self._values += [np.full(len(excluded), -np.inf, np.float32), rules.biases]
        counts = edits.counts
        if counts is not None and (counts or num_drafts):  # without tokens there is nothing to penalize
            drafts = token_ids[len(token_ids) - num_drafts :].tolist()
            ids_and_counts = counts.after(drafts) if drafts else (counts.ids, counts.counts)
            self._penalties.append((i, *ids_and_counts, edits.params))
        if edits.grammar is not None:
            self.grammars.append((i, edits.grammar, num_drafts))

    def apply(self, logits: mx.array, masks: np.ndarray) -> mx.array:
        """The edited logits: [E, V] float32 -> the same.

        Args:
            masks: [G, W] int32, what each of ``grammars`` allows (:meth:`GrammarState.fill_mask`).
        """
        if self.grammars:
            at = mx.array(np.array([i for i, _, _ in self.grammars], np.int32))
            logits[at] = apply_masks(logits[at], masks)
        if self._allowed:
            at = mx.array(np.array([i for i, _ in self._allowed], np.int32))
            logits[at] = apply_masks(logits[at], np.stack([mask for _, mask in self._allowed]))
        ids = np.concatenate(self._ids)
        if len(ids):
            places = mx.array(np.concatenate(self._places)), mx.array(ids)
            logits = logits.at[places].add(mx.array(np.concatenate(self._values)))
        if self._penalties:
            logits = self._penalized(logits)
        return logits

    def _penalized(self, logits: mx.array) -> mx.array:
        at = mx.array(np.array([i for i, _, _, _ in self._penalties], np.int32))
        # Padding repeats a row's first token, with its own count: it is given the same value twice.
        ids = mx.array(_padded([ids for _, ids, _, _ in self._penalties]))  # [P, U]
        counts = mx.array(_padded([counts for _, _, counts, _ in self._penalties]))  # [P, U]
        params = [params for _, _, _, params in self._penalties]
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
