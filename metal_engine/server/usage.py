"""What a request has used, in tokens: OpenAI's ``usage``."""

from __future__ import annotations

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """``kv_store_tokens`` of the cached ones came from a KV store, the others were in the KV cache."""

    cached_tokens: int = 0
    kv_store_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class PredictedTokensDetails(CompletionTokensDetails):
    """For a request with a prediction: how many of its tokens were proposed and accepted, and proposed and rejected.

    Only the accepted ones are among ``completion_tokens``.
    """

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | PredictedTokensDetails
