"""Token counts of a request: OpenAI's ``usage``."""

from __future__ import annotations

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    """Cached prompt tokens, and tokens of images.

    ``kv_store_tokens`` counts the cached tokens from a KV store. The other cached tokens were in the KV cache. Without
    images, ``image_tokens`` is absent.
    """

    cached_tokens: int = 0
    kv_store_tokens: int = 0
    image_tokens: int | None = Field(default=None, exclude_if=lambda value: value is None)


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class PredictedTokensDetails(CompletionTokensDetails):
    """Token counts of a request with a prediction: accepted and rejected tokens of the prediction.

    Only the accepted tokens are part of ``completion_tokens``.
    """

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | PredictedTokensDetails
