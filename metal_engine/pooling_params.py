"""Parameters for pooling a prompt's hidden states into one vector. Names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metal_engine.errors import ParameterError, short

POOLING_TYPES = ("LAST", "MEAN", "CLS")
# Upper limit of `dimensions`; no model has hidden states of this size.
MAX_DIMENSIONS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Pooling parameters. For ``pooling_type`` and ``normalize``, ``None`` means the checkpoint's setting.

    The hidden states are the model's output after the final norm.

    Attributes:
        pooling_type: ``LAST`` or ``CLS``: hidden state of the last or the first token. ``MEAN``: mean of all hidden
            states.
        normalize: True to scale the vector to length 1.
        dimensions: number of leading elements of the vector to keep, before scaling; None keeps all.
        truncate_prompt_tokens: number of tokens to keep at the end of the prompt. -1: as many as fit. None: all tokens.
        token_ids: tokens whose logits after the last token are returned instead of a pooled vector.

    Raises:
        ParameterError: a value has the wrong type or is out of range.
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.pooling_type is not None and self.pooling_type not in POOLING_TYPES:
            message = f"must be one of {', '.join(POOLING_TYPES)}, got {short(self.pooling_type)}"
            raise ParameterError("pooling_type", message)
        if not isinstance(self.normalize, bool | None):
            raise ParameterError("normalize", f"must be true or false, got {short(self.normalize)}")
        object.__setattr__(self, "dimensions", _count("dimensions", self.dimensions))
        truncate = self.truncate_prompt_tokens
        truncate = -1 if truncate == -1 else _count("truncate_prompt_tokens", truncate)
        object.__setattr__(self, "truncate_prompt_tokens", truncate)

    @property
    def needs_every_token(self) -> bool:
        """True if the result needs hidden states of tokens before the last, so that no cached prefix can be used."""
        return self.pooling_type != "LAST" and not self.token_ids


def _count(name: str, value: object) -> int | None:
    """Return an integer of Python or NumPy as an int, or None. Raises ParameterError for other values."""
    if value is None:
        return None
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ParameterError(name, f"must be an integer, got {short(value)}")
    if not 1 <= value <= MAX_DIMENSIONS:
        raise ParameterError(name, f"must be from 1 to {MAX_DIMENSIONS}, got {short(value)}")
    return int(value)
