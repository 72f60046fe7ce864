"""Log probabilities in the formats of OpenAI's two endpoints, and in vLLM's format for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from metal_engine.request import TokenLogprobs
from metal_engine.server.json_parts import array
from metal_engine.server.response_bodies import (
    ChatLogprob,
    ChatLogprobs,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from metal_engine.text.tokenizer import Tokenizer

# JSON has no infinity. This value stands for the log probability of a token that the model itself excludes.
_LOWEST = -9999.0


# Number of log probabilities encoded in one call, which takes 5 ms and creates 5 MiB of objects.
_ENTRIES_AT_ONCE = 1 << 12
_PROMPT_LOGPROBS = TypeAdapter(PromptLogprobs)
_JSON: TypeAdapter[Any] = TypeAdapter(Any)


def num_entries(num_tokens: int, num_top: int | None) -> int:
    """Return the number of log probabilities of ``num_tokens`` tokens, each with ``num_top`` alternatives.

    Each token's own log probability counts, too. The result is 0 if ``num_top`` is None.
    """
    return 0 if num_top is None else num_tokens * (num_top + 1)


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
    """Return the start of each prompt token's text, in characters.

    Args:
        skip_special_tokens: True if special tokens have no text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offset = 0
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        if not (skip_special_tokens and token_id in tokenizer.special_token_ids):
            offset += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return offsets


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    first_token_id: int | None = None,
    *,
    spells_ids: bool = False,
) -> CompletionLogprobs:
    """Return log probabilities for ``/v1/completions``. The sampled token is always among the alternatives.

    Args:
        offsets: start of each token's text, in characters.
        first_token_id: token id for an entry of ``tokens`` that is None. The entry of a prompt's first token is None,
            because this token has no log probability.
        spells_ids: True to write each token as its id, e.g. ``token_id:42``, instead of its text.
    """
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets))
    for token in tokens:
        token_id = first_token_id if token is None else token.token_id
        assert token_id is not None
        result.tokens.append(_id_name(token_id) if spells_ids else _completion_text(tokenizer, token_id))
        result.token_logprobs.append(None if token is None else _finite(token.logprob))
        alternatives: dict[str, float] = {}
        for other, logprob in [] if token is None else [*token.top, (token_id, token.logprob)]:
            name = _id_name(other) if spells_ids else _completion_text(tokenizer, other)
            alternatives.setdefault(name, _finite(logprob))
        result.top_logprobs.append(alternatives if token is not None else None)
    return result


def completion_logprobs_json(
    tokenizer: Tokenizer,
    tokens: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    first_token_id: int | None = None,
    *,
    spells_ids: bool = False,
) -> bytes:
    """Encode the result of :func:`completion_logprobs` as JSON, a slice of the tokens at a time to limit memory."""
    names = list(CompletionLogprobs.model_fields)
    parts: dict[str, list[bytes]] = {name: [] for name in names}
    for part in _slices(tokens):
        made = completion_logprobs(tokenizer, tokens[part], offsets[part], first_token_id, spells_ids=spells_ids)
        for name in names:
            parts[name].append(_JSON.dump_json(getattr(made, name)))
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), array(parts[name])) for name in names) + b"}"


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], *, spells_ids: bool = False) -> ChatLogprobs:
    """Return log probabilities for ``/v1/chat/completions``. ``spells_ids`` as in :func:`completion_logprobs`."""

    def fields(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {
            "token": _id_name(token_id) if spells_ids else _text(data),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }

    content = []
    for token in tokens:
        top = [ChatTopLogprob(**fields(token_id, logprob)) for token_id, logprob in token.top]
        content.append(ChatLogprob(**fields(token.token_id, token.logprob), top_logprobs=top))
    return ChatLogprobs(content=content)


def chat_logprobs_json(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], *, spells_ids: bool = False) -> bytes:
    """Encode the result of :func:`chat_logprobs` as JSON, a slice of the tokens at a time to limit memory."""
    made = (chat_logprobs(tokenizer, tokens[part], spells_ids=spells_ids) for part in _slices(tokens))
    content = array(_JSON.dump_json(part.content) for part in made)
    return b'{"content":%b,"refusal":null}' % content


def prompt_logprobs_json(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs | None]) -> bytes:
    """Encode vLLM's ``prompt_logprobs`` as JSON: a list with an object for each token, or null for the first token.

    The keys of an object are token ids: the token itself, and the alternatives.
    """
    return array(
        _PROMPT_LOGPROBS.dump_json([None if token is None else _by_id(tokenizer, token) for token in tokens[part]])
        for part in _slices(tokens)
    )


def _slices(tokens: Sequence[TokenLogprobs | None]) -> Iterator[slice]:
    """Return slices that cover ``tokens``. Each has at most ``_ENTRIES_AT_ONCE`` log probabilities."""
    num_top = max((len(token.top) for token in tokens[:2] if token is not None), default=0)
    step = max(_ENTRIES_AT_ONCE // (num_top + 1), 1)
    return (slice(start, start + step) for start in range(0, len(tokens), step))


def _by_id(tokenizer: Tokenizer, token: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranked = [(token.token_id, token.logprob, token.rank)]
    ranked += [(i, logprob, rank) for rank, (i, logprob) in enumerate(token.top, 1) if i != token.token_id]
    return {
        str(token_id): PromptLogprob(
            logprob=_finite(logprob),
            rank=rank,
            decoded_token=tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        )
        for token_id, logprob, rank in ranked
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _id_name(token_id: int) -> str:
    """Return a token as vLLM writes it with ``return_tokens_as_token_ids``, e.g. ``token_id:42``."""
    return f"token_id:{token_id}"


def _completion_text(tokenizer: Tokenizer, token_id: int) -> str:
    return _text(tokenizer.token_bytes(token_id), prefix="bytes:")


def _text(data: bytes, prefix: str = "") -> str:
    """Decode the bytes. If they are not valid UTF-8, return ``prefix`` and the escaped bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
