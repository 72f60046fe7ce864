"""The convolution of recurrent layers as shifted products, compared with MLX's convolution."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from metal_engine.recurrence.convolution import convolve_by_shifts, may_shift


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "length", "batch"), [(2, 1, 5), (3, 40, 1), (4, 1, 1), (4, 7, 3)])
def test_convolution_by_shifts_equals_the_convolution_of_mlx(size: int, length: int, batch: int, bias: bool) -> None:
    mx.random.seed(size * length)
    conv = nn.Conv1d(6, 6, size, groups=6, bias=bias)
    x = mx.random.normal((batch, length + size - 1, 6))
    found = convolve_by_shifts(x, conv.weight.squeeze(-1), conv.get("bias"))
    assert found.shape == (batch, length, 6)
    np.testing.assert_allclose(np.array(found), np.array(conv(x)), rtol=1e-5, atol=1e-6)


def test_shifts_replace_only_plain_depthwise_float32_convolutions_on_a_cpu() -> None:
    on_cpu = not mx.metal.is_available()
    assert may_shift(nn.Conv1d(4, 4, 3, groups=4)) == on_cpu
    for other in (
        nn.Conv1d(4, 4, 3),
        nn.Conv1d(4, 4, 3, groups=4, padding=2),
        nn.Conv1d(4, 4, 3, groups=4, stride=2),
        nn.Conv1d(4, 4, 3, groups=4, dilation=2),
    ):
        assert not may_shift(other)
    half = nn.Conv1d(4, 4, 3, groups=4)
    half.set_dtype(mx.bfloat16)
    assert not may_shift(half)
