"""Policy about request parameters that the server does not implement.

A parameter that would change the output must not be ignored: it is rejected unless its value is neutral. Parameters
that cannot change the output are accepted. Unknown parameters are accepted, counted, and logged once each. With
``--strict-params``, they are rejected.
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

# Maps a parameter to its neutral values. None is always neutral. Some parameters are implemented only for chats or only
# for completions. Parameters of messages may come from earlier responses that clients send back.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_embeds"), ()),
    **dict.fromkeys(("audio", "web_search_options", "reasoning_effort", "thinking_token_budget", "chat_template"), ()),
    **dict.fromkeys(("add_special_tokens", "adapters", "messages.function_call", "messages.audio"), ()),
    **dict.fromkeys(("conversation", "prompt", "moderation", "container", "thread", "compaction"), ()),
    **dict.fromkeys(("grammar", "json_schema", "regex", "ebnf"), ()),
    **dict.fromkeys(("top_logprobs", "xtc_probability", "mirostat", "dry_multiplier", "top_a", "dynatemp_range"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "typical_p", "tfs_z", "repeat_penalty"), (1,)),
    **dict.fromkeys(("echo", "use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("messages.prefix", "messages.partial"), (False,)),
    **dict.fromkeys(("spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("tools", "functions", "documents", "logits_processors", "plugins"), ([],)),
    **dict.fromkeys(("mcp_servers", "context_management"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("suffix", "messages.refusal"), ("",)),
    "modalities": (["text"],),
    "top_n_sigma": (0, -1),
    "verbosity": ("medium",),
    "chat_template_kwargs": ({},),
    "enable_thinking": (False,),
    "thinking": ({"type": "disabled"},),
    "thinking_budget": (0,),
}

# Parameters that never affect the output. ``max_tool_calls`` limits the calls of tools that the server runs, and there
# are no such tools.
_NO_EFFECT = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "client_metadata", "prediction", "parallel_tool_calls", "request_id",
        "stream_options.include_obfuscation", "messages.annotations", "max_tool_calls", "background_options",
        "prompt_cache_options", "cache_control", "diagnostics", "inference_geo", "speed",
    }
)  # fmt: skip

# Maximum number of unknown names to count separately, because a client can invent any number of names.
_MAX_NAMES = 100
_OTHERS = "(others)"


class ParameterPolicy:
    """Checks parameters that are not implemented, and counts unknown parameters. Thread-safe.

    Args:
        strict: True to reject unknown parameters.

    Attributes:
        num_unknown: number of requests with each unknown parameter, by the first 100 characters of its name. After
            ``_MAX_NAMES`` names, new names are counted together under ``(others)``.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.num_unknown: dict[str, int] = {}
        self._lock = threading.Lock()

    def check(self, body: RequestModel) -> None:
        """Check every parameter that is not implemented, and count the unknown parameters. Log each new name once.

        Raises:
            APIError: status 400, for the reasons in :func:`unknown_parameters`, and in strict mode for an unknown
                parameter.
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
    """Return the names of unknown parameters.

    Raises:
        APIError: status 400. A known parameter is not supported and its value would change the output, or a request
            without ``stream`` has ``stream_options``.
    """
    unknown: dict[str, None] = {}
    given = dict(body.model_extra or {})
    options = body.stream_options if isinstance(body, GenerationBody) else None
    if options is not None:
        for name, value in (options.model_extra or {}).items():
            given[f"stream_options.{name}"] = value
    # Check every message, because the same field can have different values in different messages.
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
    """Yield the name and the value of each undeclared field of messages and of their text parts.

    The names have the forms ``messages.NAME`` and ``messages.content.NAME``.
    """
    for message in body.messages if isinstance(body, ChatCompletionBody) else ():
        for name, value in (message.model_extra or {}).items():
            yield f"messages.{name}", value
        for part in message.content if isinstance(message.content, list) else ():
            if part.type == "text":  # other types are rejected elsewhere
                for name, value in (part.model_extra or {}).items():
                    yield f"messages.content.{name}", value


def _same(value: Any, neutral: Any) -> bool:
    # In Python, False == 0, but `"logprobs": 0` requests log probabilities and `"logprobs": false` does not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
