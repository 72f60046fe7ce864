"""Fields of rotary embeddings in configurations that transformers 5 has saved."""

from __future__ import annotations

from typing import Any


def fill_rope_fields(config: dict[str, Any]) -> None:
    """Fill in missing RoPE fields of a configuration from its ``rope_parameters``, in place.

    The fields are ``rope_theta``, ``rope_scaling``, ``partial_rotary_factor`` and ``rope_local_base_freq`` (of layers
    with a window). transformers 5 saves their values only in ``rope_parameters``. Most of mlx-lm's models read only the
    fields, and use a default for a missing field. Without scaling, ``rope_scaling`` becomes None, because some models
    require the field.

    Args:
        config: a configuration, or its section with the text model.
    """
    parameters = _dict(config.get("rope_parameters"))
    if not parameters:
        return
    config.setdefault("rope_scaling", None)
    # Parameters for all layers, or for each kind of layer.
    all_layers = _dict(parameters.get("full_attention")) or parameters
    window_layers = _dict(parameters.get("sliding_attention"))
    kind = all_layers.get("rope_type", "default")
    fields = {
        "rope_theta": all_layers.get("rope_theta"),
        "partial_rotary_factor": all_layers.get("partial_rotary_factor"),
        "rope_scaling": None if kind == "default" else {**all_layers, "type": kind},  # some models require the old name
        "rope_local_base_freq": window_layers.get("rope_theta"),
    }
    config.update({name: value for name, value in fields.items() if value is not None and config.get(name) is None})


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
