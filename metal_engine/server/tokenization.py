"""vLLM's routes ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, for clients that count or truncate tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import to_json
from starlette.responses import Response

from metal_engine.media.sources import ImageSource
from metal_engine.server.errors import invalid, invalid_prompt, model_not_loaded, validated
from metal_engine.server.generation.image_loading import with_image_tokens
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.json_parts import JSONParts, Placeholder
from metal_engine.server.openai.chat import ChatEndpoint
from metal_engine.server.protocol import ChatCompletionBody, ChatMessage, LongList, RequestModel
from metal_engine.server.workers import Weight

# Maximum number of tokens whose texts a client may request. Each is a separate string and can have a hundred
# characters.
MAX_TEXTS = 1 << 18


class TokenizeBody(RequestModel):
    """Body of ``POST /tokenize``.

    It has a ``prompt``, or ``messages`` with the other fields that affect the prompt of a chat.
    """

    model: str | None = None
    prompt: str | None = None
    messages: LongList[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class Tokens(BaseModel):
    """Response of ``/tokenize``.

    ``token_strs`` contains the vocabulary's own spellings, if the client requested them.
    """

    count: int
    max_model_len: int
    tokens: list[int] | SkipJsonSchema[Placeholder]
    token_strs: list[str] | SkipJsonSchema[Placeholder] | None = None


class DetokenizeBody(RequestModel):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: LongList[int]


class Text(BaseModel):
    prompt: str


class AddedToken(BaseModel):
    content: str
    special: bool


class TokenizerInfo(BaseModel):
    """Response of ``/tokenizer_info``: fields of ``tokenizer_config.json``, including additional special tokens.

    The keys of ``added_tokens_decoder`` are token ids.
    """

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    added_tokens_decoder: dict[str, AddedToken]


def add_tokenization_routes(app: FastAPI, models: ModelProvider) -> None:
    @app.post("/tokenize", tags=["tokens"], response_model=Tokens)
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        served = await models.use(request, body.model)
        weight = Weight.of(len(await request.body()))
        tokens, images = await served.workers.run(weight, _tokens, served, body)
        tokens = await with_image_tokens(served, images, weight, tokens)
        data = await served.workers.run(weight, _answer, served, body, tokens)
        return Response(data, media_type="application/json")

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeBody, request: Request) -> Text:
        served = await models.use(request, body.model)
        return await served.workers.run(Weight.of(len(await request.body())), _detokenized, served, body)

    @app.get("/tokenizer_info", tags=["tokens"], response_model=TokenizerInfo)
    async def tokenizer_info(request: Request) -> Response:
        served = models.find_loaded(request.query_params.get("model"))
        if served is None:  # a GET must not load a model, because any web page can make a browser send one
            raise model_not_loaded()
        return Response(await served.workers.run(Weight.LIGHT, _info, served), media_type="application/json")


def _info(served: ServedModel) -> bytes:
    info = {"model_max_length": served.engine.config.scheduler.max_model_len, **served.engine.tokenizer.info}
    return to_json(info)


def _tokens(served: ServedModel, body: TokenizeBody) -> tuple[list[int], list[ImageSource]]:
    """Return the token ids of a text or a conversation, and the sources of its images.

    The token ids have a placeholder in place of each image.

    Raises:
        APIError: status 400, for a request that cannot be tokenized.
    """
    tokenizer = served.tokenizer_beyond_context
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        served.parameters.check(body)
        try:
            return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens), []
        except ValueError as error:
            raise invalid_prompt(error, "prompt") from error
    conversation = validated(ChatCompletionBody, {"messages": body.messages, **(body.model_extra or {})})
    served.parameters.check(conversation)
    endpoint = ChatEndpoint(served)
    (tokens,) = endpoint.tokenize(conversation, tokenizer)
    return tokens, endpoint.image_sources(conversation)


def _answer(served: ServedModel, body: TokenizeBody, tokens: list[int]) -> bytes:
    tokenizer = served.tokenizer_beyond_context
    strs: list[str] | None = None
    if body.return_token_strs:
        if len(tokens) > MAX_TEXTS:
            problem = f" of {len(tokens)} tokens: {MAX_TEXTS} at most"
            raise invalid(problem, where="return_token_strs")
        strs = tokenizer.tokens(tokens)
    parts = JSONParts()
    answer = Tokens(
        count=len(tokens),
        max_model_len=served.engine.config.scheduler.max_model_len,
        tokens=parts.add(to_json(tokens)),
        token_strs=None if strs is None else parts.add(to_json(strs)),
    )
    return parts.encode(answer)


def _detokenized(served: ServedModel, body: DetokenizeBody) -> Text:
    served.parameters.check(body)
    if len(body.tokens) > MAX_TEXTS:
        raise invalid(f" may have {MAX_TEXTS} entries", where="tokens")
    vocab_size = served.engine.config.model.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in body.tokens):
        raise invalid(f"tokens has ids outside the vocabulary of {vocab_size}", param="tokens")
    return Text(prompt=served.engine.tokenizer.decode(body.tokens))
