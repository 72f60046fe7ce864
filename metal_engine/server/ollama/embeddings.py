"""Ollama's ``/api/embed``, and its older route ``/api/embeddings``."""

from __future__ import annotations

import time

from metal_engine.server.embeddings.embeddings import FEW, MAX_NUMBERS, vectors_json
from metal_engine.server.embeddings.pooling import Pooled, PoolingRequest, embed
from metal_engine.server.json_parts import JSONParts
from metal_engine.server.ollama.protocol import EmbedAnswer, EmbeddingsAnswer, OllamaEmbedBody, OllamaEmbeddingsBody
from metal_engine.server.workers import Weight


async def create_embed(pooling: PoolingRequest, body: OllamaEmbedBody, name: str) -> bytes:
    """Return the response of ``/api/embed`` as JSON. ``name`` is the client's name of the model.

    Raises:
        APIError: the inputs cannot be embedded.
    """
    started = time.monotonic()
    inputs = [body.input] if isinstance(body.input, str) else body.input or []
    vectors, num_tokens = await _vectors(pooling, inputs, "input", body.dimensions)
    parts = JSONParts()
    answer = EmbedAnswer(
        model=name,
        embeddings=parts.add(b"[" + b",".join(vectors) + b"]"),
        total_duration=round((time.monotonic() - started) * 1e9),
        prompt_eval_count=num_tokens,
    )
    return parts.encode(answer)


async def create_embedding(pooling: PoolingRequest, body: OllamaEmbeddingsBody) -> bytes:
    """Return the response of ``/api/embeddings`` as JSON. Raises as :func:`create_embed`."""
    inputs = [] if body.prompt is None else [body.prompt]
    vectors, _ = await _vectors(pooling, inputs, "prompt")
    parts = JSONParts()
    return parts.encode(EmbeddingsAnswer(embedding=parts.add(vectors[0] if vectors else b"[]")))


async def _vectors(
    pooling: PoolingRequest, inputs: list[str], field: str, dimensions: int | None = None
) -> tuple[list[bytes], int]:
    """Return the vectors as JSON, and the number of tokens.

    An empty list and a single empty text have no vectors. Clients send them only to load a model.
    """
    if inputs in ([], [""]):
        return [], 0
    pooled = await embed(pooling, list(inputs), dimensions=dimensions, field=field, max_values=MAX_NUMBERS)
    if sum(vector.size for vector in pooled.vectors) <= FEW:
        return _encoded(pooled), pooled.num_prompt_tokens
    return await pooling.served.workers.run(Weight.HEAVY, _encoded, pooled), pooled.num_prompt_tokens


def _encoded(pooled: Pooled) -> list[bytes]:
    return list(vectors_json(pooled))
