"""Scores of documents for queries, from a reranker or as the cosine of an embedding model's vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metal_engine.pooling_params import PoolingParams
from metal_engine.server.embeddings.pooling import MAX_INPUTS, Pooled, PoolingRequest, PoolingTask, pool
from metal_engine.server.errors import APIError, invalid
from metal_engine.settings.config import RerankerConfig
from metal_engine.text.tokenizer import Tokenizer

# Maximum number of characters of all pairs together. A query is in the prompt of each of its documents.
MAX_PAIR_CHARACTERS = 1 << 24
MAX_INSTRUCTION = 1 << 14


@dataclass(frozen=True)
class Pairs:
    """Pairs of a query and a document to score, and the settings of the request.

    Attributes:
        queries: one query for each document.
        documents: documents, in the same order.
        document_field: field of the body that contains the documents.
        instruction: criterion for a reranker; None for the instruction of its model card.
        truncate_prompt_tokens: maximum number of tokens of a prompt. -1 for the context length. None to reject longer
            prompts.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    document_field: str
    instruction: str | None
    truncate_prompt_tokens: int | None


@dataclass(frozen=True)
class Scores:
    """Score of each pair, higher for a better match, and the number of prompt tokens."""

    request_id: str
    values: list[float]
    num_prompt_tokens: int


async def score(pooling: PoolingRequest, pairs: Pairs, id_prefix: str) -> Scores:
    """Score each pair. Scores are 0 to 1 from a reranker, and -1 to 1 from an embedding model.

    Args:
        id_prefix: prefix of the response's id.

    Raises:
        APIError: status 400 if the model cannot score pairs, or does not allow their number, their length or their
            instruction; 500 if a score is NaN or infinity. Also as :func:`pool`.
        EngineDeadError: the engine has stopped.
    """
    served = pooling.served
    model = served.engine.config.model
    if not 1 <= len(pairs.documents) <= MAX_INPUTS:
        raise invalid(f" must have 1 to {MAX_INPUTS} entries", where=pairs.document_field)
    if sum(map(len, pairs.queries)) + sum(map(len, pairs.documents)) > MAX_PAIR_CHARACTERS:
        problem = f" with their queries have more than {MAX_PAIR_CHARACTERS} characters together"
        raise invalid(problem, where=pairs.document_field)
    if model.reranker is not None:
        return await _by_reranker(pooling, model.reranker, pairs, id_prefix)
    if not model.pooler.is_embedder:
        raise invalid(
            f"{served.names[0]} is neither a reranker (Qwen3-Reranker) nor an embedding model (with a modules.json of "
            "sentence-transformers): its scores would mean nothing",
            param="model",
        )
    if pairs.instruction is not None:
        raise invalid(" is for rerankers, and the model gives embeddings", where="instruction")
    return await _by_cosine(pooling, pairs, id_prefix)


async def _by_reranker(pooling: PoolingRequest, reranker: RerankerConfig, pairs: Pairs, id_prefix: str) -> Scores:
    if len(pairs.instruction or "") > MAX_INSTRUCTION:
        raise invalid(f" may have {MAX_INSTRUCTION} characters", where="instruction")
    max_model_len = pooling.served.engine.config.scheduler.max_model_len

    def tokenize(tokenizer: Tokenizer) -> list[list[int]]:
        return _reranker_prompts(reranker, pairs, tokenizer, max_model_len)

    task = PoolingTask(
        tokenize=tokenize,
        params=lambda: PoolingParams(
            token_ids=(reranker.false_token_id, reranker.true_token_id),
            # `_reranker_prompts` truncates the prompts itself, because their suffix must stay. -1 only lets the
            # tokenizer accept texts longer than the context.
            truncate_prompt_tokens=None if pairs.truncate_prompt_tokens is None else -1,
        ),
        field=pairs.document_field,
        id_prefix=id_prefix,
    )
    pooled = await pool(pooling, task, len(pairs.documents))
    values = [_sigmoid(float(yes) - float(no)) for no, yes in pooled.vectors]
    return _scores(pooled, values)


def _reranker_prompts(
    reranker: RerankerConfig, pairs: Pairs, tokenizer: Tokenizer, max_model_len: int
) -> list[list[int]]:
    """Return the token ids of a prompt for each pair, in the model card's format.

    Truncation removes the end of the document. Raises APIError, a 400, if ``truncate_prompt_tokens`` leaves no room for
    a document, or exceeds the context length. Raises ValueError for a text that cannot be tokenized.
    """
    prefix = tokenizer.encode(reranker.prefix, add_special_tokens=False)
    suffix = tokenizer.encode(reranker.suffix, add_special_tokens=False)
    limit = pairs.truncate_prompt_tokens
    max_pair_tokens = None
    if limit is not None:
        longest = max_model_len if limit == -1 else limit
        max_pair_tokens = longest - len(prefix) - len(suffix)
        if not (limit == -1 or 1 <= limit <= max_model_len) or max_pair_tokens < 1:
            problem = f" must leave room for a document, and be {max_model_len} at most"
            raise invalid(problem, where="truncate_prompt_tokens")
    instruction = pairs.instruction or reranker.instruction
    prompts = []
    for query, document in zip(pairs.queries, pairs.documents, strict=True):
        pair = tokenizer.encode_filled(
            reranker.pair, {"instruction": instruction, "query": query, "document": document}
        )
        prompts.append([*prefix, *pair[:max_pair_tokens], *suffix])
    return prompts


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


async def _by_cosine(pooling: PoolingRequest, pairs: Pairs, id_prefix: str) -> Scores:
    # Each text is pooled only once, even if it is in several pairs.
    place = {text: i for i, text in enumerate(dict.fromkeys([*pairs.queries, *pairs.documents]))}
    texts = list(place)
    hidden_size = pooling.served.engine.config.model.hidden_size
    task = PoolingTask(
        tokenize=lambda tokenizer: [tokenizer.encode(text) for text in texts],
        params=lambda: PoolingParams(normalize=True, truncate_prompt_tokens=pairs.truncate_prompt_tokens),
        field=pairs.document_field,
        id_prefix=id_prefix,
        # `score` has limited the number of pairs, and the vectors are not part of the response.
        max_inputs=len(texts),
        max_values=len(texts) * hidden_size,
    )
    pooled = await pool(pooling, task, len(texts))
    couples = zip(pairs.queries, pairs.documents, strict=True)
    values = [_dot(pooled, place[query], place[document]) for query, document in couples]
    return _scores(pooled, values)


def _scores(pooled: Pooled, values: list[float]) -> Scores:
    if not all(map(math.isfinite, values)):
        raise APIError(500, "the model gives scores that are not numbers", code="generation_failed")
    return Scores(pooled.request_id, values, pooled.num_prompt_tokens)


def _dot(pooled: Pooled, a: int, b: int) -> float:
    return float(np.dot(pooled.vectors[a].astype(np.float64), pooled.vectors[b].astype(np.float64)))
