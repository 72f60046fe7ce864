"""Converts requests of Ollama's API to chats and completions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from metal_engine.errors import short
from metal_engine.media.limits import MAX_IMAGES
from metal_engine.server.errors import invalid, validated
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.large_bodies import TooComplexError, dumps
from metal_engine.server.ollama.protocol import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaMessage
from metal_engine.server.protocol import ChatCompletionBody, CompletionBody, ImageURL

logger = logging.getLogger(__name__)

# Maps an option to the field with the same meaning.
_OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
# Integer options that clients in some languages send as 40.0.
_INTEGERS = ("num_predict", "top_k", "seed")
# Neutral values of options, in addition to null.
_NOTHING: dict[str, tuple[int, ...]] = {"num_predict": (0, -1, -2), "seed": (-1,)}
# Options that would change the output, and their neutral values.
_UNSUPPORTED = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}
# Options that are ignored: the server's settings decide about loading and running models, and parameters of unsupported
# options have no effect.
_SETTLED = frozenset(
    {
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
        "use_mlock", "embedding_only", "num_thread", "numa", "num_keep", "repeat_last_n", "penalize_newline",
        "mirostat_tau", "mirostat_eta", "draft_num_predict",
    }
)  # fmt: skip
# Starts of images that are not base64 data. Ollama itself takes only base64.
_URLS = ("data:", "http://", "https://")
_LEVELS = ("low", "medium", "high")

# Maps a field of the converted request to the field of Ollama's request that it is made from.
RENAMED = {
    **{field: f"options.{option}" for option, field in _OPTIONS.items()},
    "response_format": "format",
    "response_format.json_schema.schema": "format",
    "reasoning_effort": "think",
    "chat_template_kwargs": "think",
}


class RawBody(CompletionBody):
    """Completion without a default limit on its length, as in Ollama's API."""

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class RequestReader:
    """Converts bodies to chats and completions, and logs each ignored option once. Thread-safe."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def chat(self, served: ServedModel, body: OllamaChatBody) -> ChatCompletionBody:
        """Convert a body with at least one message to a chat. Empties the body's list of messages to save memory.

        Raises APIError, a 400, naming the field at fault.
        """
        messages = [_message(i, message) for i, message in enumerate(_taken(body.messages or []))]
        fields = {"messages": messages, **self._common(body), **_thinking(served, body)}
        last = messages[-1]
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            fields["continue_final_message"] = True
        if body.tools:
            fields["tools"] = [{"type": "function", **tool} for tool in body.tools]
        return validated(ChatCompletionBody, {**(body.model_extra or {}), **fields})

    def generate(self, served: ServedModel, body: OllamaGenerateBody) -> ChatCompletionBody | RawBody:
        """Convert a body to a completion if it has ``raw`` or a suffix, otherwise to a chat with its prompt.

        Raises as :meth:`chat`.
        """
        if body.template:
            raise invalid(" is not supported: the model's own is used; or send the whole prompt, raw", where="template")
        fields = self._common(body)
        if not (body.raw or body.suffix):
            system = [{"role": "system", "content": body.system}] if body.system else []
            fields["messages"] = [
                *system,
                {"role": "user", "content": _content(body.prompt or "", body.images, "images")},
            ]
            return validated(ChatCompletionBody, {**(body.model_extra or {}), **fields, **_thinking(served, body)})
        for name in ("system", "think", "images"):
            if getattr(body, name):
                raise invalid(" needs the chat template, which raw and suffix leave out", where=name)
        fields |= {"prompt": body.prompt or "", "suffix": body.suffix}
        return validated(RawBody, {**(body.model_extra or {}), **fields})

    def _common(self, body: OllamaBody) -> dict[str, Any]:
        if body.logprobs or body.top_logprobs:
            raise invalid(" are not supported here; /v1/chat/completions has them", where="logprobs")
        fields = {"model": body.model, "stream": body.streams, **dict(self._options(body.options or {}))}
        if isinstance(body.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
        elif body.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif body.format:
            raise invalid(f' must be "json" or a JSON schema, got {short(body.format)}', where="format")
        return fields

    def _options(self, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in options.items():
            if value is None:
                continue
            if name in _SETTLED:
                self._note(name)
            elif name in _UNSUPPORTED:
                if isinstance(value, bool) or value != _UNSUPPORTED[name]:
                    raise invalid(f" is not supported (got {short(value)})", where=f"options.{name}")
            elif name not in _OPTIONS:
                yield f"options.{name}", value  # handled like any unknown parameter
            else:
                if name in _INTEGERS and isinstance(value, float) and value.is_integer():
                    value = int(value)
                if isinstance(value, bool) or value not in _NOTHING.get(name, ()):
                    yield _OPTIONS[name], value

    def _note(self, name: str) -> None:
        if name not in self._noted:
            self._noted.add(name)
            logger.warning("ignoring the option %r of Ollama's API: the server's own settings hold", name)


def _thinking(served: ServedModel, body: OllamaBody) -> dict[str, Any]:
    think = body.think
    if think is None or think == "":
        return {}
    if isinstance(think, str) and think not in _LEVELS:
        raise invalid(f" must be true, false, {', '.join(_LEVELS)}, got {short(think)}", where="think")
    if think and not can_think(served):
        raise invalid(" is not supported by the model: it does not reason", where="think")
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {"chat_template_kwargs": {"enable_thinking": think}}


def can_think(served: ServedModel) -> bool:
    """Return True if the format of the model's reasoning is known, or its chat template has a setting for reasoning."""
    known = served.answer_format.reasoning is not None or served.answer_format.harmony
    mentions = served.engine.tokenizer.template_mentions
    return known or mentions("enable_thinking") or mentions("reasoning_effort")


def _taken(messages: list[OllamaMessage]) -> Iterator[OllamaMessage]:
    """Yield the messages in order, and remove each from the list to save memory."""
    messages.reverse()
    while messages:
        yield messages.pop()


def _content(text: str, images: list[str] | None, place: str) -> Any:
    """Return the content of a chat message: ``text``, or a list of parts with the images before the text.

    Args:
        images: URLs or base64 data. Images after the first ``MAX_IMAGES`` + 1 are ignored: the request is refused
            later because of their number.
        place: path of ``images`` in Ollama's request, for error messages.
    """
    if not images:
        return text
    placed = [
        ImageURL.placed(data, f"{place}[{i}]", is_base64=not data.startswith(_URLS))
        for i, data in enumerate(images[: MAX_IMAGES + 1])
    ]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": image} for image in placed]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _message(i: int, message: OllamaMessage) -> dict[str, Any]:
    made: dict[str, Any] = {
        **(message.model_extra or {}),
        "role": message.role,
        "content": _content(message.content or "", message.images, f"messages[{i}].images"),
        "reasoning": message.thinking,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
    if message.tool_calls:
        try:
            made["tool_calls"] = [
                {
                    "id": call.id or f"call_{i}_{j}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": dumps(call.function.arguments)},
                }
                for j, call in enumerate(message.tool_calls)
            ]
        except (TooComplexError, RecursionError) as error:
            raise invalid(f": arguments are too large or nested too deeply: {error}", where=f"messages[{i}]") from error
    return {name: value for name, value in made.items() if value is not None}
