"""Routes that respond with vectors or scores."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from starlette.responses import Response

from metal_engine.server.embeddings.embeddings import create_embeddings
from metal_engine.server.embeddings.pooling import PoolingRequest, pooling_request
from metal_engine.server.embeddings.protocol import (
    EmbeddingBody,
    EmbeddingList,
    PoolingUsage,
    RerankBody,
    RerankDocument,
    Reranking,
    RerankResult,
    Score,
    ScoreBody,
    ScoreList,
)
from metal_engine.server.embeddings.scoring import Pairs, Scores, score
from metal_engine.server.errors import invalid
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.json_parts import JSONParts


def add_pooling_routes(app: FastAPI, models: ModelProvider) -> None:
    @app.post("/v1/embeddings", tags=["pooling"], response_model=EmbeddingList)
    async def create_embedding(body: EmbeddingBody, request: Request) -> Response:
        served = await models.use(request, body.model)
        data = await create_embeddings(await pooling_request(served, request, body), body)
        return Response(data, media_type="application/json")

    @app.post("/v1/rerank", tags=["pooling"], response_model=Reranking)
    @app.post("/rerank", tags=["pooling"], response_model=Reranking)
    async def rerank(body: RerankBody, request: Request) -> Response:
        served = await models.use(request, body.model)
        data = await _rerank(await pooling_request(served, request, body), body)
        return Response(data, media_type="application/json")

    @app.post("/score", tags=["pooling"])
    @app.post("/v1/score", tags=["pooling"])
    async def create_score(body: ScoreBody, request: Request) -> ScoreList:
        served = await models.use(request, body.model)
        return await _score(await pooling_request(served, request, body), body)


async def _rerank(pooling: PoolingRequest, body: RerankBody) -> bytes:
    if body.top_n is not None and body.top_n < 1:
        raise invalid(f" must be at least 1, got {body.top_n}", where="top_n")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    pairs = Pairs(
        queries=[body.query] * len(documents),
        documents=documents,
        document_field="documents",
        instruction=body.instruction,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    scores = await score(pooling, pairs, "rerank")
    shown = documents if body.return_documents is not False else None
    served = pooling.served
    return await served.workers.run_if_large(pooling.num_bytes, _ranked, served.names[0], scores, shown, body.top_n)


def _ranked(model: str, scores: Scores, documents: list[str] | None, top_n: int | None) -> bytes:
    """Encode the response as JSON, best score first, one document at a time because documents may be long."""
    order = sorted(range(len(scores.values)), key=lambda i: -scores.values[i])[:top_n]
    results = []
    for i in order:
        document = None if documents is None else RerankDocument(text=documents[i])
        result = RerankResult(index=i, document=document, relevance_score=scores.values[i])
        results.append(result.model_dump_json().encode())
    parts = JSONParts()
    placeholder = parts.add(b"[" + b",".join(results) + b"]")
    return parts.encode(Reranking(id=scores.request_id, model=model, usage=_usage(scores), results=placeholder))


async def _score(pooling: PoolingRequest, body: ScoreBody) -> ScoreList:
    queries = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    documents = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        problem = f" has {len(queries)} entries and text_2 {len(documents)}: one text, or as many as text_2"
        raise invalid(problem, where="text_1")
    pairs = Pairs(
        queries=queries,
        documents=documents,
        document_field="text_2",
        instruction=body.instruction,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    scores = await score(pooling, pairs, "score")
    return ScoreList(
        id=scores.request_id,
        created=int(time.time()),
        model=pooling.served.names[0],
        data=[Score(index=i, score=value) for i, value in enumerate(scores.values)],
        usage=_usage(scores),
    )


def _usage(scores: Scores) -> PoolingUsage:
    return PoolingUsage(prompt_tokens=scores.num_prompt_tokens, total_tokens=scores.num_prompt_tokens)
