"""Edits of logits before temperature, top-k, top-p and min-p: biases, exclusions, penalties, structured output.

:class:`RequestEdits` runs on the host. It holds one request's parameters and the data that depends on its tokens. For a
step, :class:`StepEdits` packs the edits of all requests into padded arrays and applies them in a few operations.
Requests without edits are not included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from metal_engine.runner.grammar_masks import GrammarState, apply_masks, without
from metal_engine.sampling_params import SamplingParams
from metal_engine.token_rules import TokenRules


class NoTokenLeftError(ValueError):
    """The parameters of a request exclude every token, so the request must end."""


class _Counts:
    """Distinct tokens of a request, and how often each occurs in its output.

    Args:
        prompt_token_ids: tokens to include with an output count of 0.
    """

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        distinct = np.unique(prompt_token_ids)
        self._ids = distinct.astype(np.int32)  # ids in use, followed by spare entries
        self._counts = np.zeros(len(distinct), np.float32)
        self._places = {token_id: i for i, token_id in enumerate(distinct.tolist())}

    def add(self, token_ids: Iterable[int]) -> None:
        """Count output tokens."""
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
        """Return ``ids`` and ``counts`` as they would be after counting ``token_ids`` as output tokens."""
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
    """Logits edits of one request.

    Created when the runner adds the request, and again when the request resumes after preemption.

    Args:
        rules: ``params`` resolved for the model's vocabulary.
        token_ids: all tokens of the request so far, [T] int32. Only the prompt is read. :meth:`catch_up` processes the
            output tokens.
        num_prompt_tokens: number of prompt tokens at the start of ``token_ids``.

    Attributes:
        num_processed: number of the request's leading tokens, prompt included, that were processed.
        counts: token counts for penalties; None without penalties.
        grammar: position of the output in its grammar; None without a grammar.
    """

    def __init__(
        self, params: SamplingParams, rules: TokenRules, token_ids: np.ndarray, num_prompt_tokens: int
    ) -> None:
        self.params = params
        self.rules = rules
        self._num_prompt_tokens = num_prompt_tokens
        self.counts: _Counts | None = None
        if params.has_penalties:
            # Only the repetition penalty includes the prompt.
            seen = token_ids[: num_prompt_tokens if params.repetition_penalty != 1.0 else 0]
            self.counts = _Counts(seen)
        self.grammar: GrammarState | None = None
        if rules.grammar is not None:
            self.grammar = GrammarState(rules.grammar, rules.stop_token_ids, params.min_tokens)
        self.num_processed = num_prompt_tokens
        changes_all = params.allowed_token_ids is not None or params.min_tokens > 0 or bool(params.logit_bias)
        self._always_edits = changes_all or params.needs_token_on_host
        self._bad_word_lengths = sorted({len(before) for before in rules.bad_words})

    def catch_up(self, token_ids: np.ndarray, drafts: Sequence[int] = ()) -> None:
        """Update token counts and grammar state with the tokens generated since the last call.

        Args:
            token_ids: all tokens of the request, [T] int32.
            drafts: tokens that may follow. The step also samples a token after each draft.
        """
        new = token_ids[self.num_processed :].tolist()
        self._count(new)
        if self.grammar is not None:
            self.grammar.consume(new, drafts)

    def observe(self, new: list[int]) -> None:
        """Update token counts and grammar state with ``new``, the next tokens, without starting to compute masks."""
        self._count(new)
        if self.grammar is not None:
            self.grammar.observe(new)

    def _count(self, new: list[int]) -> None:
        self.num_processed += len(new)
        if self.counts is not None:
            self.counts.add(new)

    def has_edits_after(self, drafts: Sequence[int]) -> bool:
        """Return True if the logits of the next token, or of a token after one of ``drafts``, need edits."""
        grammar = self.grammar
        return self._always_edits or grammar is None or grammar.must_go_on or not grammar.is_free_after(drafts)

    def excluded(self, token_ids: np.ndarray, position: int) -> np.ndarray:
        """Return the ids of tokens that ``bad_words`` and ``min_tokens`` exclude as the next token, [n] int32.

        Stop tokens are also excluded while a structured output must follow the free text.

        Args:
            token_ids: the request's known tokens, followed by the drafts before the row, [T] int32.
            position: index of the next token in the output.

        Raises:
            NoTokenLeftError: all of ``allowed_token_ids`` are excluded.
        """
        num_output = len(token_ids) - self._num_prompt_tokens
        excluded: list[int] = []
        for length in self._bad_word_lengths:
            if length <= num_output:
                before = tuple(token_ids[len(token_ids) - length :].tolist())
                excluded += self.rules.bad_words.get(before, ())
        ids = np.array(excluded, np.int32)
        is_free = self.grammar is None or self.grammar.is_free
        must_go_on = self.grammar is not None and self.grammar.must_go_on
        if is_free and (must_go_on or position < self.params.min_tokens):
            ids = np.concatenate([ids, self.rules.stop_token_ids])
        allowed = self.rules.allowed
        if allowed is not None and len(ids) and not without(allowed, ids).any():
            raise NoTokenLeftError("bad_words, min_tokens and allowed_token_ids together leave no token")
        return ids


class StepEdits:
    """Edits of one step, for E rows of logits.

    Attributes:
        rows: indices of the E rows among the step's rows of logits.
        grammars: (index among the E rows, state of the grammar, number of drafts before the row) for each row that
            needs a mask.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.grammars: list[tuple[int, GrammarState, int]] = []
        self._allowed: list[tuple[int, np.ndarray]] = []
        self._penalties: list[tuple[int, np.ndarray, np.ndarray, SamplingParams]] = []  # index, ids, counts, parameters
        # Values to add to single logits, in pieces: row (of E), token id and value; -inf excludes a token.
        self._places: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, row: int, edits: RequestEdits, token_ids: np.ndarray, position: int, num_drafts: int = 0) -> None:
        """Add one row's edits. :meth:`RequestEdits.excluded` describes ``token_ids`` and ``position``.

        Args:
            num_drafts: number of drafts at the end of ``token_ids``.

        Raises:
            NoTokenLeftError: all of ``allowed_token_ids`` are excluded. The row is then not added.
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
        drafts = token_ids[len(token_ids) - num_drafts :].tolist()
        if counts is not None and (counts or num_drafts):  # without tokens there are no penalties
            ids_and_counts = counts.after(drafts) if drafts else (counts.ids, counts.counts)
            self._penalties.append((i, *ids_and_counts, edits.params))
        if edits.grammar is not None and not edits.grammar.is_free_after(drafts):
            self.grammars.append((i, edits.grammar, num_drafts))

    def apply(self, logits: mx.array, masks: np.ndarray) -> mx.array:
        """Return the edited logits: [E, V] float32 -> [E, V] float32.

        Args:
            masks: [G, W] int32, the masks of ``grammars`` (:meth:`GrammarState.fill_mask`).
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
        # Padding repeats a row's first token with its count, so the same value is written twice.
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
    """Stack rows of different lengths. Each row has at least one element, and is padded with its first element."""
    length = max(map(len, rows))
    return np.stack([np.concatenate([row, np.full(length - len(row), row[0], row.dtype)]) for row in rows])


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(np.fromiter(values, np.float32))[:, None]  # [P, 1]
