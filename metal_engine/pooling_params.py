"""How to pool a prompt's hidden states into one vector: :class:`PoolingParams`. Names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.errors import ParameterError, short

POOLING_TYPES = ("LAST", "MEAN", "CLS")
# What a vector is cut to; no model has hidden states as long.
MAX_DIMENSIONS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How to pool. ``None`` means what the checkpoint says.

    The hidden states are the model's after its final norm.

    Attributes:
        pooling_type: ``LAST`` or ``CLS``, the hidden state of the last or the first token; ``MEAN``, the mean of all.
        normalize: scale the vector to length 1.
        dimensions: keep so many of the vector's first elements, before it is scaled.
        truncate_prompt_tokens: keep so many of the prompt's last tokens; -1 keeps as many as fit.
        token_ids: pool no hidden state: give the logits of these tokens after the last one.

    Raises:
        ParameterError: a value is of the wrong type or out of range.
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
        _check_count("dimensions", self.dimensions, 1)
        if self.truncate_prompt_tokens != -1:
            _check_count("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens before the last one count, so that cached prefixes are of no use."""
        return self.pooling_type != "LAST" and not self.token_ids


def _check_count(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ParameterError(name, f"must be an integer, got {short(value)}")
    if not least <= value <= MAX_DIMENSIONS:
        raise ParameterError(name, f"must be from {least} to {MAX_DIMENSIONS}, got {value}")
