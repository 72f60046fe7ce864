"""Keys and values of one layer in 8 or 4 bits.

A row is quantized once, when it is stored. All reads return the quantized values, including reads in the same step.
Otherwise the keys and values that a token attends to would depend on which step computed them, and outputs would depend
on how prompts are chunked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from metal_engine.kv_cache.spec import QuantizedKVSpec, quantized_names
from metal_engine.kv_cache.state import KVState


class QuantizedKVState(KVState):
    """Keys and values, or latents, in the packed form of :func:`mlx.core.quantize` (:class:`QuantizedKVSpec`).

    ``keys`` and ``values`` are uint32, [num_slots, num_kv_heads, dim * bits / 32]. ``arrays`` also contains a scale and
    a bias for each group. A number is ``integer * scale + bias``, computed in float32. In half precision, the product
    would have a rounding error as large as the quantization error of 8 bits.

    Attributes:
        bits: bits per number.
        group_size: numbers that share a scale and a bias.
    """

    spec: QuantizedKVSpec

    def __init__(self, spec: QuantizedKVSpec) -> None:
        super().__init__(spec)
        self.bits, self.group_size = spec.bits, spec.group_size

    @property
    def values(self) -> mx.array:
        return self.arrays["keys" if self._is_latent else "values"]

    @property
    def key_groups(self) -> tuple[mx.array, mx.array]:
        """Scales and biases of the keys, each [num_slots, num_kv_heads, head_dim / group_size]."""
        return self.arrays["key_scales"], self.arrays["key_biases"]

    @property
    def value_groups(self) -> tuple[mx.array, mx.array]:
        """Scales and biases of the values. Latents share the scales and biases of the keys."""
        return self.key_groups if self._is_latent else (self.arrays["value_scales"], self.arrays["value_biases"])

    @property
    def _is_latent(self) -> bool:
        return self.spec.latent_dim is not None

    def encode(self, rows: Mapping[str, mx.array]) -> dict[str, mx.array]:
        kept: dict[str, mx.array] = {}
        for name, values in rows.items():
            arrays = mx.quantize(values.astype(self.spec.dtype), group_size=self.group_size, bits=self.bits)
            kept |= dict(zip(quantized_names(name), arrays, strict=True))
        return kept

    def read_heads(self, head_rows: mx.array) -> tuple[mx.array, mx.array]:
        return self._read(lambda array: array.reshape(-1, array.shape[-1])[head_rows])

    def read_tokens(self, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        return self._read(lambda array: array.reshape(array.shape[0], -1)[slots])

    def _read(self, rows_of: Callable[[mx.array], mx.array]) -> tuple[mx.array, mx.array]:
        """Return some rows of keys and of values, float32."""
        keys = self._dequantized("keys", rows_of)
        return keys, keys if self._is_latent else self._dequantized("values", rows_of)

    def _dequantized(self, name: str, rows_of: Callable[[mx.array], mx.array]) -> mx.array:
        packed, scales, biases = (rows_of(self.arrays[part]) for part in quantized_names(name))
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)


def numbers_of_groups(state: KVState) -> list[mx.array]:
    """Return key scales, key biases, value scales and value biases; an empty list if the state is not quantized.

    Each array is [num_slots, num_kv_heads, dim / group_size].
    """
    if not isinstance(state, QuantizedKVState):
        return []
    return [*state.key_groups, *state.value_groups]
