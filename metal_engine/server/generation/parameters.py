"""What the server makes of parameters it does not implement.

A parameter that would change the output must not be ignored: it is refused unless its value asks for nothing.
Parameters that cannot change the output are accepted. Unknown ones are accepted too, logged once each and counted;
or refused, if the server is strict.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from metal_engine.errors import short
from metal_engine.server.errors import invalid
from metal_engine.server.protocol import ChatCompletionBody, GenerationBody, RequestModel

logger = logging.getLogger(__name__)

# Parameter -> the values that ask for nothing; None always does. Some are declared for chats or for completions, and
# have no meaning for the other; those of messages are what an earlier answer may have brought.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_embeds"), ()),
    **dict.fromkeys(("audio", "web_search_options", "reasoning_effort", "thinking_token_budget", "chat_template"), ()),
    **dict.fromkeys(("add_special_tokens", "adapters", "messages.function_call", "messages.audio"), ()),
    **dict.fromkeys(("top_logprobs", "xtc_probability", "mirostat", "dry_multiplier"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "typical_p", "repeat_penalty"), (1,)),
    **dict.fromkeys(("echo", "use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("tools", "functions", "documents", "logits_processors"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("suffix", "messages.refusal"), ("",)),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "chat_template_kwargs": ({},),
}

# No effect on the output by their very meaning.
_NO_EFFECT = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "client_metadata", "prediction", "parallel_tool_calls", "request_id",
        "stream_options.include_obfuscation", "messages.annotations",
    }
)  # fmt: skip

# Bounds the memory that a client can take with made-up names.
_MAX_NAMES = 100
_OTHERS = "(others)"


class ParameterPolicy:
    """Judges parameters, and remembers the unknown ones. Thread-safe.

    Args:
        strict: whether unknown parameters are refused.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.num_unknown: dict[str, int] = {}
        self._lock = threading.Lock()

    def check(self, body: RequestModel) -> None:
        """Judge every parameter that is not implemented.

        Raises:
            APIError: 400, naming a parameter that would change the output, or that is unknown.
        """
        unknown = unknown_parameters(body)
        if unknown and self._strict:
            name = unknown[0][:100]
            raise invalid(f"unknown parameter {name!r}", param=name, code="unknown_parameter")
        with self._lock:
            for name in unknown:
                self._count(name[:100])

    def _count(self, name: str) -> None:
        if name not in self.num_unknown:
            if len(self.num_unknown) >= _MAX_NAMES:
                name = _OTHERS
            else:
                logger.warning("ignoring the unknown request parameter %r", name)
        self.num_unknown[name] = self.num_unknown.get(name, 0) + 1


def unknown_parameters(body: RequestModel) -> list[str]:
    """Names of the parameters that mean nothing here.

    Raises:
        APIError: 400, naming a parameter that is known, and would change the output.
    """
    unknown: dict[str, None] = {}
    given = dict(body.model_extra or {})
    options = body.stream_options if isinstance(body, GenerationBody) else None
    if options is not None:
        for name, value in (options.model_extra or {}).items():
            given[f"stream_options.{name}"] = value
    # Each message has a say, even one whose field is neutral in another.
    for name, value in (*given.items(), *_message_fields(body)):
        if value is None or name in _NO_EFFECT:
            continue
        if name not in _UNSUPPORTED:
            unknown[name] = None
        elif not any(_same(value, neutral) for neutral in _UNSUPPORTED[name]):
            raise invalid(f" is not supported (got {short(value)})", name, "unsupported_parameter", where=name)
    if options is not None and isinstance(body, GenerationBody) and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", param="stream_options")
    return list(unknown)


def _message_fields(body: RequestModel) -> Iterator[tuple[str, Any]]:
    """Undeclared fields of messages and of their content parts, as ``messages.name`` and ``messages.content.name``."""
    for message in body.messages if isinstance(body, ChatCompletionBody) else ():
        for name, value in (message.model_extra or {}).items():
            yield f"messages.{name}", value
        for part in message.content if isinstance(message.content, list) else ():
            if part.type == "text":  # others are refused by their type
                for name, value in (part.model_extra or {}).items():
                    yield f"messages.content.{name}", value


def _same(value: Any, neutral: Any) -> bool:
    # In Python False == 0, but `"logprobs": 0` asks for log probabilities.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
