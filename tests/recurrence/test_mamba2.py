"""Mamba2's recurrence in chunks, compared with float64 NumPy and with mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import ssm as mlx_lm_ssm

from metal_engine.recurrence import mamba2
from metal_engine.recurrence.mamba2 import CHUNK, MIN_TOKENS, chunked_ssm, ssm_update
from tests.recurrence import references
from tests.recurrence.references import check_two_calls, on_device, relative_error


def make(
    length: int, heads: int = 4, groups: int = 1, dim: int = 8, n: int = 16, batch: int = 1, with_state: bool = True
) -> dict[str, np.ndarray | None]:
    """Return arguments of ``chunked_ssm``, float32."""
    rng = np.random.default_rng(0)
    state = rng.normal(size=(batch, heads, dim, n)) if with_state else None
    arrays = {
        "x": rng.normal(size=(batch, length, heads, dim)),
        "gates": np.exp(-rng.exponential(rng.choice([0.001, 0.1, 3.0], size=(batch, length, heads)))),
        "B": rng.normal(size=(batch, length, groups, n)),
        "C": rng.normal(size=(batch, length, groups, n)),
        "state": state,
    }
    return {name: None if array is None else array.astype(np.float32) for name, array in arrays.items()}


def check(arrays: dict[str, np.ndarray | None]) -> None:
    y, state = chunked_ssm(**on_device(arrays))
    expected_y, expected_state = references.ssm(**arrays)
    assert y.dtype == state.dtype == mx.float32
    assert relative_error(np.array(y), expected_y) < 3e-6
    assert relative_error(np.array(state), expected_state) < 3e-6


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 200])
@pytest.mark.parametrize(
    ("heads", "groups", "batch", "with_state"), [(4, 1, 1, True), (6, 2, 2, False), (3, 3, 2, True)]
)
def test_against_the_recurrence(length: int, heads: int, groups: int, batch: int, with_state: bool) -> None:
    check(make(length, heads, groups, batch=batch, with_state=with_state))


@pytest.mark.parametrize("smallest", [0.0, 1e-45, 1e-30, 1e-3], ids=str)
def test_ssm_is_accurate_with_zero_and_tiny_gates(smallest: float) -> None:
    arrays = make(150)
    rng = np.random.default_rng(1)
    shape = arrays["gates"].shape
    arrays["gates"] = rng.choice([smallest, 0.9, 1.0], size=shape, p=[0.3, 0.2, 0.5]).astype(np.float32)
    check(arrays)
    arrays["gates"] = np.full(shape, smallest, np.float32)
    check(arrays)


@pytest.mark.parametrize("first", [1, 9, CHUNK, 100])
def test_two_calls_with_a_carried_state_equal_one_call(first: int) -> None:
    check_two_calls(chunked_ssm, make(150, groups=2), first)


def layer_arguments(length: int, batch: int = 1, with_state: bool = True, dtype: mx.Dtype = mx.float32) -> tuple:
    """Return the arguments that a layer passes, up to the state."""
    arrays = on_device(make(length, batch=batch, with_state=with_state))
    rng = np.random.default_rng(2)
    heads = arrays["x"].shape[2]
    A_log, D, dt_bias = (mx.array(rng.normal(size=heads).astype(np.float32)) for _ in range(3))
    dt = mx.array(rng.normal(-1, 2, (batch, length, heads)).astype(np.float32))
    x, B, C, D, dt, dt_bias = (array.astype(dtype) for array in (arrays["x"], arrays["B"], arrays["C"], D, dt, dt_bias))
    return x, A_log, B, C, D, dt, dt_bias, arrays["state"]


@pytest.mark.parametrize("limit", [(0.001, 100.0), (0.0, float("inf")), (0.01, 0.2)], ids=str)
@pytest.mark.parametrize("with_state", [False, True])
def test_ssm_update_equals_mlx_lm(limit: tuple[float, float], with_state: bool) -> None:
    arguments = layer_arguments(300, with_state=with_state)
    ours, theirs = ssm_update(*arguments, limit), mlx_lm_ssm.ssm_update(*arguments, limit)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        assert relative_error(np.array(our), np.array(their)) < 1e-5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision(dtype: mx.Dtype) -> None:
    """Compare with mlx-lm in float32 for the same rounded arguments: y differs only by its own rounding."""
    arguments = layer_arguments(100, dtype=dtype)
    y, state = ssm_update(*arguments)
    their_y, their_state = mlx_lm_ssm.ssm_update(*arguments)
    assert y.dtype == their_y.dtype == dtype and state.dtype == their_state.dtype == mx.float32
    expected_y, expected_state = mlx_lm_ssm.ssm_update(*(array.astype(mx.float32) for array in arguments))
    assert relative_error(np.array(state), np.array(expected_state)) < 1e-5
    error, their_error = (relative_error(np.array(x.astype(mx.float32)), np.array(expected_y)) for x in (y, their_y))
    assert error < (1e-3 if dtype == mx.float16 else 8e-3) and error <= 1.05 * their_error


def test_short_masked_and_gpu_inputs_use_the_mlx_lm_ssm_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("in chunks")

    monkeypatch.setattr(mamba2, "chunked_ssm", never)
    one, few, many = (layer_arguments(length, batch=2) for length in (1, MIN_TOKENS - 1, 20))
    lengths = mx.array([20, 15])
    masked = {"mask": mx.arange(20) < lengths[:, None], "lengths": lengths}
    for arguments, options in ((one, {}), (few, {}), (many, masked), (many, {"lengths": lengths})):
        ours, theirs = ssm_update(*arguments, **options), mlx_lm_ssm.ssm_update(*arguments, **options)
        assert all(mx.array_equal(our, their) for our, their in zip(ours, theirs, strict=True))
    with pytest.raises(AssertionError, match="in chunks"):
        ssm_update(*many)
    monkeypatch.setattr(mamba2, "computes_on_cpu", lambda: False)
    ours, theirs = ssm_update(*many), mlx_lm_ssm.ssm_update(*many)
    assert all(mx.array_equal(our, their) for our, their in zip(ours, theirs, strict=True))
