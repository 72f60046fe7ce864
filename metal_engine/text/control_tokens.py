"""Keeps control tokens that are spelled in a request's texts from becoming control tokens in the prompt.

*Marks* are the added tokens that have a meaning in a chat: special tokens, tokens that the chat template writes, and
other tokens spelled ``<so>`` or ``[SO]``, except HTML tags. *Signs* are the characters that make up marks, such as
``<``, ``|`` and ``[``. *Stand-ins* are characters that occur neither in the request nor in the template.

Signs in the request's texts are replaced by stand-ins, one for one. Then the template is rendered. A special tokenizer
finds the added tokens in the result, and replaces the stand-ins by signs only after that. Every mark in the prompt is
therefore written by the template, even if the template trims, joins or changes texts.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as BackendTokenizer

from metal_engine.cancellation import check_cancelled
from metal_engine.json_values import parts
from metal_engine.text.chat_template import Message, RenderedTooLongError, texts_of_template
from metal_engine.text.long_text import limit_word_cache, panics_refused
from metal_engine.text.template_sandbox import STAND_INS

# Characters searched in one call, because a search holds the GIL.
_WINDOW = 1 << 17
# Number of characters after which small pieces are joined, because each piece takes 60 bytes more than its text.
_JOINED_AT_ONCE = 1 << 16
# Minimum length of a text that is replaced only once if several names refer to it, as for a message's reasoning.
_LONG = 1 << 10
# Spelling of control tokens, and the HTML tags of the same form, which some tokenizers add for speed.
_LIKE_MARK = re.compile(r"[<\[].+[>\]]", re.DOTALL)
_HTML = re.compile(
    "</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|table|tbody|td|tfoot|th"
    "|thead|tr|u|ul)>"
)


class ControlTokens:
    """Encoder of conversations in which only the chat template can write control tokens.

    Args:
        backend: tokenizer of the ``tokenizers`` library.
        templates: sources of the chat templates.
    """

    def __init__(self, backend: BackendTokenizer, templates: Iterable[str]) -> None:
        self._backend = backend
        texts, sought = [], []
        for source in templates:
            of_template = texts_of_template(source)
            texts += of_template[0]
            sought += of_template[1]
        added = sorted(backend.get_added_tokens_decoder().items())
        written = "\0".join(texts)
        marks = [
            token
            for _, token in added
            if token.content.strip()
            and (
                token.special
                or token.content in written
                or (_LIKE_MARK.fullmatch(token.content) and not _HTML.fullmatch(token.content))
            )
        ]
        self._contents = frozenset(token.content for token in marks)
        self._taken = written  # its characters cannot be stand-ins
        self._signs = "".join(sorted({sign for content in self._contents for sign in _signs_of(content)}))
        self._mark = _any_of(self._contents)
        # Texts that the template searches for stay unchanged. In assistant messages, the model's own marks do, too.
        plain = {one for one in sought if not any(one in mark or mark in one for mark in self._contents)}
        self._seen = _any_of(one for one in plain if any(sign in one for sign in self._signs))
        models_own = {token.content for token in marks if not token.special}
        models_own |= {one for one in sought if any(mark in one for mark in self._contents)}
        self._seen_in_answers = _any_of(models_own | plain)
        self._longest = max(map(len, self._contents | models_own | plain), default=1)
        self._model, made = _model_without_marks(backend, self._contents)
        # Marks that the tokenizer or its model finds only after it has normalized the text.
        normalizer = backend.normalizer
        normalized = made | {token.content for token in marks if token.normalized} if normalizer else set()
        self._normalized = _any_of(normalizer.normalize_str(content) for content in normalized) if normalized else None
        self._literal_backend = lru_cache(maxsize=4)(self._make_literal_backend)

    def encode(
        self,
        messages: list[Message],
        variables: dict[str, Any],
        render: Callable[[list[Message], dict[str, Any]], str],
        encode: Callable[[BackendTokenizer, str], list[int]],
    ) -> list[int]:
        """Encode a conversation so that only the template's marks become control tokens.

        Args:
            messages: messages as plain data.
            variables: template variables as plain data.
            render: converts messages and variables to text with the chat template. May be called twice.
            encode: encodes a text with the given tokenizer.

        Returns:
            Token ids of the prompt.

        Raises:
            ValueError: the request contains all characters that could be stand-ins, or ``render`` or ``encode`` failed.
            Cancelled: the request was cancelled.
        """
        given = [part for part in parts([messages, variables]) if isinstance(part, str)]
        is_normalized_mark = self._normalized is not None and any(map(self._has_normalized, given))
        if not is_normalized_mark and not any(self._has_signs(text) for text in given):
            return encode(self._backend, render(messages, variables))
        hidden = _Hidden(self._signs, self._stand_ins(given))
        has_marks = any(self._found(self._mark, text) for text in given)
        text = self._rendered(messages, variables, render, self._marks_hidden if has_marks else None, hidden)
        # In this rendering, the signs of the request's texts are hidden, so the marks are the template's own.
        certain = self._rendered(messages, variables, render, self._signs_hidden, hidden)
        if list(self._marks_in(text)) != list(self._marks_in(certain)):
            text, has_marks = certain, True
        del certain
        if not has_marks and not is_normalized_mark:
            return encode(self._backend, text)
        literal = self._literal_backend(hidden.stand_ins)
        moved = self._moved_ids(literal)
        return [moved.get(token_id, token_id) for token_id in encode(literal, text)]

    def _moved_ids(self, literal: BackendTokenizer) -> dict[int, int]:
        """Map the ids of added tokens that differ: id in ``literal`` -> id in the original tokenizer."""
        added = self._backend.get_added_tokens_decoder()
        found: dict[Any, int] = {literal.token_to_id(token.content): token_id for token_id, token in added.items()}
        return {here: there for here, there in found.items() if here != there}

    def _rendered(
        self,
        messages: list[Message],
        variables: dict[str, Any],
        render: Callable[[list[Message], dict[str, Any]], str],
        hide: Callable[[str, bool, _Hidden], str] | None,
        hidden: _Hidden,
    ) -> str:
        if hide is None:
            return render(messages, variables)
        known: dict[tuple[int, bool], str] = {}

        def change(text: str, is_answer: bool) -> str:
            if len(text) < _LONG:
                return hide(text, is_answer, hidden)
            key = id(text), is_answer
            if key not in known:
                known[key] = hide(text, is_answer, hidden)
            return known[key]

        changed = []
        for message in messages:
            is_answer = message.get("role") == "assistant"
            changed.append(
                {
                    _changed(key, change, False): _changed(value, change, is_answer and key == "content")
                    for key, value in message.items()
                }
            )
        try:
            return render(changed, _changed(variables, change, False))
        except RenderedTooLongError:
            raise
        except ValueError as error:
            raise ValueError(hidden.shown(str(error))) from error

    def _marks_hidden(self, text: str, is_answer: bool, hidden: _Hidden) -> str:
        """Return the text with stand-ins for the signs of its marks.

        In answers, marks that the model itself writes stay unchanged.
        """
        if not self._has_signs(text) or not self._found(self._mark, text):
            return text
        return _joined(self._with_marks_hidden(text, is_answer, hidden))

    def _with_marks_hidden(self, text: str, is_answer: bool, hidden: _Hidden) -> Iterator[str]:
        for is_seen, part in self._cut(self._seen_in_answers if is_answer else None, text):
            if is_seen:
                yield part
            else:
                for is_mark, piece in self._cut(self._mark, part):
                    yield hidden.hide(piece) if is_mark else piece

    def _signs_hidden(self, text: str, is_answer: bool, hidden: _Hidden) -> str:
        """Return the text with stand-ins for all signs.

        Texts that the template searches for stay unchanged. In answers, marks that the model itself writes stay
        unchanged, too.
        """
        if not self._has_signs(text):
            return text
        seen = self._seen_in_answers if is_answer else self._seen
        return _joined(part if is_seen else hidden.hide(part) for is_seen, part in self._cut(seen, text))

    def _cut(self, pattern: re.Pattern[str] | None, text: str) -> Iterator[tuple[bool, str]]:
        """Yield the pieces of a text in order, split at the matches of ``pattern``. The flag is True for a match."""
        if pattern is None:
            yield False, text
            return
        done = 0
        for match in self._matches(pattern, text):
            if match.start() > done:
                yield False, text[done : match.start()]
            yield True, match[0]
            done = match.end()
        yield False, text[done:]

    def _matches(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """Yield all matches from left to right. Check for cancellation between windows of ``_WINDOW`` characters."""
        start = 0
        while start < len(text):
            check_cancelled()
            end = start + _WINDOW
            done = end
            for match in pattern.finditer(text, start, end + self._longest):
                if match.start() >= end:
                    break
                yield match
                done = max(end, match.end())
            start = done

    def _found(self, pattern: re.Pattern[str], text: str) -> bool:
        return next(self._matches(pattern, text), None) is not None

    def _marks_in(self, text: str) -> Iterator[str]:
        return (match[0] for match in self._matches(self._mark, text))

    def _has_signs(self, text: str) -> bool:
        return any(sign in text for sign in self._signs)

    def _has_normalized(self, text: str) -> bool:
        """Return True if normalizing a text produces marks, for example from full-width characters."""
        assert self._normalized is not None
        step = _WINDOW // 8
        for start in range(0, len(text), step):
            piece = text[start : start + step + self._longest * 4]
            try:
                with panics_refused():
                    normalized = self._backend.normalizer.normalize_str(piece)
            except TypeError:  # a lone surrogate, which fails later in encoding
                return False
            if self._normalized.search(normalized):
                return True
        return False

    def _stand_ins(self, texts: list[str]) -> str:
        """Return one stand-in for each sign. The stand-ins occur neither in the texts nor in the template.

        Raises:
            ValueError: there are no such characters.
        """
        wide = [text for text in (*texts, self._taken) if not text.isascii()]
        count = len(self._signs)
        for start in range(0, len(STAND_INS) - count, count):
            chosen = STAND_INS[start : start + count]
            if not any(stand_in in text for text in wide for stand_in in chosen):
                return chosen
        raise ValueError("the messages use too many rare Unicode symbols (such as all of Braille) at once")

    def _make_literal_backend(self, stand_ins: str) -> BackendTokenizer:
        """Return a copy of the tokenizer that replaces stand-ins by signs after it has found the added tokens."""
        backend = self._backend
        literal = BackendTokenizer(self._model)
        steps = [normalizers.Replace(one, sign) for one, sign in zip(stand_ins, self._signs, strict=True)]
        literal.normalizer = normalizers.Sequence(steps + ([backend.normalizer] if backend.normalizer else []))
        if backend.pre_tokenizer is not None:
            literal.pre_tokenizer = backend.pre_tokenizer
        # Fillers for ids of the model beyond the vocabulary size. Without fillers, added tokens would get these ids.
        fillers = 0
        while literal.model.id_to_token(literal.get_vocab_size()) is not None:
            literal.add_tokens([AddedToken(f"\uf8ff{fillers}", normalized=False)])
            fillers += 1
        literal.add_tokens(
            [
                _as_written(token) if token.content in self._contents else token
                for _, token in sorted(backend.get_added_tokens_decoder().items())
            ]
        )
        return literal


@dataclass(frozen=True)
class _Hidden:
    """Signs (characters of control tokens), and their stand-ins in the same order.

    ``hide`` replaces the signs in a text by stand-ins. ``shown`` replaces the stand-ins in a text by signs.
    """

    signs: str
    stand_ins: str

    def hide(self, text: str) -> str:
        pieces = []
        for start in range(0, len(text), _WINDOW):
            piece = text[start : start + _WINDOW]
            for sign, stand_in in zip(self.signs, self.stand_ins, strict=True):
                piece = piece.replace(sign, stand_in)
            pieces.append(piece)
        return "".join(pieces)

    def shown(self, text: str) -> str:
        return text.translate(str.maketrans(self.stand_ins, self.signs))


def _signs_of(mark: str) -> set[str]:
    """Return the signs of a mark: its brackets and math symbols such as ``|``; without these, its first character."""
    signs = {c for c in mark if unicodedata.category(c) in ("Sm", "Ps", "Pe")}
    return signs or {mark[0]}


def _as_written(token: AddedToken) -> AddedToken:
    """Return a copy of the added token that matches the original text, not the normalized text."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _joined(pieces: Iterable[str]) -> str:
    """Join pieces into one text. Needs little memory for many small pieces."""
    joined: list[str] = []
    last: list[str] = []
    length = 0
    for piece in pieces:
        last.append(piece)
        length += len(piece)
        if length >= _JOINED_AT_ONCE:
            joined.append("".join(last))
            last, length = [], 0
    return "".join([*joined, *last])


def _changed(value: Any, change: Callable[[str, bool], str], is_answer: bool) -> Any:
    """Return plain data with each text, including keys, replaced by ``change(text, is_answer)``."""
    if isinstance(value, str):
        return change(value, is_answer)
    if isinstance(value, dict):
        return {_changed(key, change, is_answer): _changed(item, change, is_answer) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change, is_answer) for item in value]
    if isinstance(value, tuple):
        return tuple(_changed(item, change, is_answer) for item in value)
    return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of ``texts`` at a position, in a time independent of their number."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_spelled(trie) if trie else "(?!)", re.DOTALL)


def _spelled(node: dict[str, Any]) -> str:
    branches = [re.escape(c) + _spelled(rest) for c, rest in node.items() if c]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return joined + ("?" if "" in node else "")


def _model_without_marks(backend: BackendTokenizer, marks: frozenset[str]) -> tuple[models.Model, set[str]]:
    """Return a tokenizer model that produces no marks from plain text, and the marks that the original model produces.

    Most models produce no marks: the original model is returned, with an empty set. A unigram or whole-word model does,
    because its vocabulary contains the marks. The returned model then has other names for them.
    """
    plain = BackendTokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    own = {mark: backend.model.token_to_id(mark) for mark in marks}
    made = {mark for mark, token_id in own.items() if token_id is not None and token_id in plain.encode(mark).ids}
    if not made:
        return backend.model, made
    state = json.loads(backend.to_str())
    model = state["model"]
    unknown = model.get("unk_token")
    names = {mark: f"\U0010fffd{i}" for i, mark in enumerate(sorted(made - {unknown}))}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
    if merges:
        model["merges"] = [pair for pair in merges if not made & {*pair, "".join(pair)}]
    bare = {**state, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    renamed = BackendTokenizer.from_str(json.dumps(bare)).model
    limit_word_cache(renamed)
    return renamed, made
