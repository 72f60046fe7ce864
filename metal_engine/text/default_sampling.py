"""Describes the sampling of requests that set no parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metal_engine.sampling_params import SamplingParams

_ALWAYS = ("temperature", "top_p")
_IF_CHANGED = ("top_k", "min_p", "repetition_penalty")


def default_sampling_text(recommended: Mapping[str, Any]) -> str:
    """Return the effective default sampling in words, as in ``temperature 0.2, top_p 0.5``.

    Args:
        recommended: parameters from the checkpoint or the caller. The other parameters have the defaults of
            SamplingParams.
    """
    params, neutral = SamplingParams(**recommended), SamplingParams()
    changed = [name for name in _IF_CHANGED if getattr(params, name) != getattr(neutral, name)]
    return ", ".join(f"{name} {getattr(params, name):g}" for name in (*_ALWAYS, *changed))
