"""What ``--speculative-config`` may say, checked before anything is loaded."""

from __future__ import annotations

import json
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import SpeculativeConfig
from metal_engine.settings.fields import Setting, read_object

FLAG = "--speculative-config"
# As vLLM's: what is compared where the request for speculation does not say.
_PROMPT_LOOKUP = 5
_MAX_DRAFTS = 64
_MAX_NGRAM = 64
_SETTINGS = [
    Setting("method", "str"),
    Setting("num_speculative_tokens", "int", bounds={"ge": 1, "le": _MAX_DRAFTS}),
    Setting("prompt_lookup_max", "int", bounds={"ge": 1, "le": _MAX_NGRAM}),
    Setting("prompt_lookup_min", "int", bounds={"ge": 1, "le": _MAX_NGRAM}),
]


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
    _check_method(given)
    values = read_object(FLAG, FLAG, given, _SETTINGS, required=("method", "num_speculative_tokens"))
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
    )


def _check_method(given: Any) -> None:
    """Refuse a method that is not built before its own keys are."""
    method = given.get("method") if isinstance(given, dict) else None
    if method is not None and method != "ngram":
        raise ConfigError(FLAG, f"has the method {method!r}, but the only one is ngram")
