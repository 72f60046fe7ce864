"""``/tokenize`` and ``/detokenize``: vLLM's, for clients that count or cut before they ask."""

from __future__ import annotations

from fastapi import FastAPI, Request
from pydantic import BaseModel

from metal_engine.server.errors import invalid, validated
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.openai.chat import ChatEndpoint
from metal_engine.server.protocol import ChatCompletionBody, ChatMessage, LongList, RequestModel
from metal_engine.server.workers import Weight


class TokenizeBody(RequestModel):
    """``POST /tokenize``: a ``prompt``, or ``messages`` with whatever else shapes a chat's prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: LongList[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class Tokens(BaseModel):
    """``token_strs`` are the vocabulary's own spellings, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(RequestModel):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: LongList[int]


class Text(BaseModel):
    prompt: str


def add_tokenization_routes(app: FastAPI, served: ServedModel) -> None:
    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeBody, request: Request) -> Tokens:
        served.check_model(body.model)
        return await served.workers.run(Weight.of(len(await request.body())), _tokenized, served, body)

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeBody, request: Request) -> Text:
        served.check_model(body.model)
        return await served.workers.run(Weight.of(len(await request.body())), _detokenized, served, body)


def _tokenized(served: ServedModel, body: TokenizeBody) -> Tokens:
    tokenizer = served.engine.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        try:
            tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        except ValueError as error:
            raise invalid(f"prompt: {error}", param="prompt") from error
    else:
        conversation = validated(ChatCompletionBody, {"messages": body.messages, **(body.model_extra or {})})
        served.parameters.check(conversation)
        (tokens,) = ChatEndpoint(served).tokenize(conversation, tokenizer)
    return Tokens(
        count=len(tokens),
        max_model_len=served.engine.config.scheduler.max_model_len,
        tokens=tokens,
        token_strs=tokenizer.tokens(tokens) if body.return_token_strs else None,
    )


def _detokenized(served: ServedModel, body: DetokenizeBody) -> Text:
    vocab_size = served.engine.config.model.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in body.tokens):
        raise invalid(f"tokens has ids outside the vocabulary of {vocab_size}", param="tokens")
    return Text(prompt=served.engine.tokenizer.decode(body.tokens))
