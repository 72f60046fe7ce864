"""Wire format of embeddings, reranking and scores, as in the APIs of OpenAI, Jina, Cohere and vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from metal_engine.server.json_parts import Placeholder
from metal_engine.server.protocol import LongList, RequestModel

# --- requests -----------------------------------------------------------------------------------------------


class PoolingBody(RequestModel):
    """Fields that all pooling endpoints share."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    user: str | None = None


class EmbeddingBody(PoolingBody):
    """Body of ``POST /v1/embeddings``."""

    input: str | LongList[str] | LongList[int] | LongList[LongList[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None


class DocumentObject(RequestModel):
    text: str


class RerankBody(PoolingBody):
    """Body of ``POST /v1/rerank``."""

    query: str
    documents: LongList[str | DocumentObject]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class ScoreBody(PoolingBody):
    """Body of ``POST /score``."""

    text_1: str | LongList[str]
    text_2: str | LongList[str]
    instruction: str | None = None


# --- responses ----------------------------------------------------------------------------------------------

# Internal, so it stays out of the OpenAPI schema.
_Placeholder = SkipJsonSchema[Placeholder]


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """Vector of one input. ``embedding`` is a list of numbers, or the base64 text of little-endian float32 values."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding] | _Placeholder
    usage: PoolingUsage


class RerankDocument(BaseModel):
    text: str


class RerankResult(BaseModel):
    """Score of one document. ``document`` is left out if the request sets ``return_documents`` to false."""

    index: int
    document: RerankDocument | None = Field(default=None, exclude_if=lambda value: value is None)
    relevance_score: float


class Reranking(BaseModel):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult] | _Placeholder


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
