"""Parses and checks ``--speculative-config`` before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import ModelInfo, SpeculativeConfig
from metal_engine.settings.fields import Setting, read_object

FLAG = "--speculative-config"
# Default of prompt_lookup_max and prompt_lookup_min, the same as vLLM's.
_PROMPT_LOOKUP = 5
_MAX_DRAFTS = 64
# Default of num_speculative_tokens for a draft head. Fewer are drafted if that pays more.
_HEAD_DRAFTS = 3
_MAX_NGRAM = 64
_METHOD = Setting("method", "str")
_NUM_TOKENS = Setting("num_speculative_tokens", "int", bounds={"ge": 1, "le": _MAX_DRAFTS})
_LOOKUP = [
    Setting("prompt_lookup_max", "int", bounds={"ge": 1, "le": _MAX_NGRAM}),
    Setting("prompt_lookup_min", "int", bounds={"ge": 1, "le": _MAX_NGRAM}),
]
_HEAD = [_METHOD, _NUM_TOKENS, *_LOOKUP, Setting("model", "str"), Setting("revision", "str")]
_SETTINGS = {
    "ngram": [_METHOD, _NUM_TOKENS, *_LOOKUP],
    "draft_model": [_METHOD, _NUM_TOKENS, Setting("model", "str"), Setting("revision", "str")],
    "mtp": _HEAD,
    "auto": _HEAD,
}
_REQUIRED = {
    "ngram": ("method", "num_speculative_tokens"),
    "draft_model": ("method", "model", "num_speculative_tokens"),
    "mtp": ("method",),
    "auto": ("method",),
}


def speculative_config(args: EngineArgs) -> SpeculativeConfig | None:
    """Return the user's ``--speculative-config``, with defaults for missing keys; None without speculation.

    The method may still be ``auto``.

    Raises:
        ConfigError: the JSON is not valid, or conflicts with other settings. The message names the flag to change.
    """
    if args.speculative_config is None:
        return None
    try:
        given = json.loads(args.speculative_config)
    except (ValueError, RecursionError) as error:
        raise ConfigError(FLAG, f"is not JSON: {error}") from error
    method = _method(given)
    values = read_object(FLAG, FLAG, given, _SETTINGS[method], required=_REQUIRED[method])
    if "revision" in values and "model" not in values:
        raise ConfigError(FLAG, "has a revision, which needs 'model'")
    # A single given value sets both.
    longest = values.get("prompt_lookup_max", values.get("prompt_lookup_min", _PROMPT_LOOKUP))
    shortest = values.get("prompt_lookup_min", longest)
    if shortest > longest:
        raise ConfigError(FLAG, f"prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")
    return SpeculativeConfig(
        method=values["method"],
        num_speculative_tokens=values.get("num_speculative_tokens", _HEAD_DRAFTS),
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
        model=values.get("model"),
        revision=values.get("revision"),
    )


def _method(given: Any) -> str:
    """Return the method; ``ngram`` if none is given. Raises ConfigError for an unknown method."""
    method = given.get("method") if isinstance(given, dict) else None
    if not method:
        return "ngram"  # the check of the keys reports the missing method
    if not isinstance(method, str) or method not in _SETTINGS:
        raise ConfigError(FLAG, f"has the unknown method {method!r}; the methods are {', '.join(_SETTINGS)}")
    return method


def check_draft_model(draft: ModelInfo) -> None:
    """Raise ConfigError if the draft model's state cannot be reset to a position before rejected drafts."""
    if draft.state_bytes_per_request:
        raise ConfigError(
            FLAG,
            f"has the model {draft.name}, whose recurrent states cannot be reset after rejected drafts: choose another "
            "model",
        )


def check_draft_vocabulary(draft_name: str, draft: Mapping[str, int], name: str, vocabulary: Mapping[str, int]) -> None:
    """Raise ConfigError if some token ids have another meaning in the draft model.

    Ids that only one of the two models has are ignored.

    Args:
        draft: map from each token of the draft model to its id.
        vocabulary: map from each token of the model to its id.
    """
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    differing = {i: token for token, i in draft.items() if tokens.get(i, token) != token}
    if not differing:
        return
    first = min(differing)
    raise ConfigError(
        FLAG,
        f"has the model {draft_name}, whose vocabulary differs from that of {name}: token {first} is "
        f"{differing[first]!r}, not {tokens[first]!r}. Differing tokens: {len(differing)}. "
        "Choose a draft model with the same vocabulary",
    )
