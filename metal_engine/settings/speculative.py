"""What ``--speculative-config`` may say, checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import ModelInfo, SpeculativeConfig
from metal_engine.settings.fields import Setting, read_object

FLAG = "--speculative-config"
# As vLLM's: what is compared where the request for speculation does not say.
_PROMPT_LOOKUP = 5
_MAX_DRAFTS = 64
_MAX_NGRAM = 64
_METHOD = Setting("method", "str")
_NUM_TOKENS = Setting("num_speculative_tokens", "int", bounds={"ge": 1, "le": _MAX_DRAFTS})
_SETTINGS = {
    "ngram": [
        _METHOD,
        _NUM_TOKENS,
        Setting("prompt_lookup_max", "int", bounds={"ge": 1, "le": _MAX_NGRAM}),
        Setting("prompt_lookup_min", "int", bounds={"ge": 1, "le": _MAX_NGRAM}),
    ],
    "draft_model": [_METHOD, _NUM_TOKENS, Setting("model", "str"), Setting("revision", "str")],
}
_REQUIRED = {
    "ngram": ("method", "num_speculative_tokens"),
    "draft_model": ("method", "model", "num_speculative_tokens"),
}


def speculative_config(args: EngineArgs) -> SpeculativeConfig | None:
    """The configuration that the settings ask for; None without speculation.

    Raises:
        ConfigError: the JSON is not right, or other settings exclude it; the message names the flag to change.
    """
    if args.speculative_config is None:
        return None
    try:
        given = json.loads(args.speculative_config)
    except (ValueError, RecursionError) as error:
        raise ConfigError(FLAG, f"is not JSON: {error}") from error
    method = _method(given)
    values = read_object(FLAG, FLAG, given, _SETTINGS[method], required=_REQUIRED[method])
    # One of them alone stands for both.
    longest = values.get("prompt_lookup_max", values.get("prompt_lookup_min", _PROMPT_LOOKUP))
    shortest = values.get("prompt_lookup_min", longest)
    if shortest > longest:
        raise ConfigError(FLAG, f"prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")
    return SpeculativeConfig(
        method=values["method"],
        num_speculative_tokens=values["num_speculative_tokens"],
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
        model=values.get("model"),
        revision=values.get("revision"),
    )


def _method(given: Any) -> str:
    """The method that was asked for; one that is not built is refused before its own keys are."""
    method = given.get("method") if isinstance(given, dict) else None
    if not method:
        return "ngram"  # what is wrong is said of its keys
    if not isinstance(method, str) or method not in _SETTINGS:
        raise ConfigError(FLAG, f"has the method {method!r}, but there are only {' and '.join(_SETTINGS)}")
    return method


def check_draft_model(draft: ModelInfo) -> None:
    """Refuse a draft model whose state cannot go back past rejected drafts."""
    if draft.state_bytes_per_request:
        raise ConfigError(
            FLAG, f"has the model {draft.name}, whose recurrent states cannot go back past drafts: choose another one"
        )


def check_draft_vocabulary(draft_name: str, draft: Mapping[str, int], name: str, vocabulary: Mapping[str, int]) -> None:
    """Refuse a draft model whose token ids stand for other tokens. Ids that only one of the two has do not matter.

    Args:
        draft, vocabulary: token ids of the draft model and of the model, by token.
    """
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    differing = {i: token for token, i in draft.items() if tokens.get(i, token) != token}
    if not differing:
        return
    first = min(differing)
    raise ConfigError(
        FLAG,
        f"has the model {draft_name}, whose vocabulary is not that of {name}: token {first} is {differing[first]!r}, "
        f"and not {tokens[first]!r}; {len(differing)} of them differ. Choose one with the same vocabulary",
    )
