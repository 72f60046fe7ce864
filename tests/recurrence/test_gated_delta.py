"""The gated delta rule in chunks, compared with float64 NumPy and with mlx-lm, which compute token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from metal_engine.recurrence import gated_delta
from metal_engine.recurrence.gated_delta import CHUNK, chunked_gated_delta, gated_delta_update
from tests.recurrence import references
from tests.recurrence.references import check_two_calls, on_device, relative_error


@dataclass(frozen=True)
class Case:
    """Numbers and sizes of key and value heads, and whether each key element has its own gate."""

    length: int
    k_heads: int = 2
    v_heads: int = 2
    k_dim: int = 16
    v_dim: int = 8
    batch: int = 1
    each_key: bool = False
    with_state: bool = True
    largest_step: float = 1.0

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray | None]:
        """Return float32 arguments of ``chunked_gated_delta``. Keys have length 1; half of a key is always the same."""
        rng = np.random.default_rng(seed)
        shape = (self.batch, self.length)
        k = rng.normal(size=(*shape, self.k_heads, self.k_dim)) + 2 * rng.normal(size=self.k_dim)
        q = rng.normal(size=k.shape)
        of_gates = (*shape, self.v_heads, *([self.k_dim] if self.each_key else []))
        state = rng.normal(size=(self.batch, self.v_heads, self.v_dim, self.k_dim)) if self.with_state else None
        arrays = {
            "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
            "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
            "v": rng.normal(size=(*shape, self.v_heads, self.v_dim)),
            "gates": np.exp(-rng.exponential(rng.choice([0.001, 0.1, 3.0], size=of_gates))),
            "beta": self.largest_step * rng.uniform(size=(*shape, self.v_heads)),
            "state": state,
        }
        return {name: None if array is None else array.astype(np.float32) for name, array in arrays.items()}


def check(arrays: dict[str, np.ndarray | None], error: float = 3e-6) -> None:
    """Compare our result with float64."""
    y, state = chunked_gated_delta(**on_device(arrays))
    expected_y, expected_state = references.gated_delta(**arrays)
    assert y.dtype == state.dtype == mx.float32
    assert relative_error(np.array(y), expected_y) < error
    assert relative_error(np.array(state), expected_state) < error


both_gates = pytest.mark.parametrize("each_key", [False, True], ids=["gate", "gate of each key"])
CASES = (
    Case(1),
    Case(CHUNK - 1),
    Case(CHUNK),
    Case(CHUNK + 1, with_state=False),
    Case(200, k_heads=2, v_heads=6),
    Case(90, k_dim=128, v_dim=128),
    Case(77, k_dim=5, v_dim=3, batch=2, largest_step=2.0),
)


@both_gates
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_recurrence(case: Case, each_key: bool) -> None:
    check(replace(case, each_key=each_key).arrays())


@settings(max_examples=25)
@given(
    case=st.builds(
        Case,
        length=st.integers(2, 200),
        k_heads=st.integers(1, 2),
        v_heads=st.sampled_from([2, 4]),
        k_dim=st.sampled_from([1, 4, 32]),
        v_dim=st.sampled_from([1, 7, 16]),
        batch=st.integers(1, 2),
        each_key=st.booleans(),
        with_state=st.booleans(),
        largest_step=st.sampled_from([1.0, 2.0]),
    ),
    seed=st.integers(0, 1000),
)
def test_against_the_recurrence_at_any_size(case: Case, seed: int) -> None:
    check(case.arrays(seed), error=1e-5)  # hypothesis searches for cancellation


@both_gates
@pytest.mark.parametrize("smallest", [0.0, 1e-45, 1e-43, 1e-30, 1e-3], ids=str)
def test_gated_delta_is_accurate_with_zero_and_tiny_gates(smallest: float, each_key: bool) -> None:
    """Gates of 0 next to gates of 1: differences of their logarithms are not defined."""
    arrays = Case(150, each_key=each_key).arrays()
    rng = np.random.default_rng(1)
    shape = arrays["gates"].shape
    arrays["gates"] = rng.choice([smallest, 0.9, 1.0], size=shape, p=[0.3, 0.2, 0.5]).astype(np.float32)
    check(arrays)
    arrays["gates"] = np.full(shape, smallest, np.float32)
    check(arrays)
    arrays["gates"] = np.ones(shape, np.float32)
    arrays["gates"][:, 70] = smallest
    check(arrays)


@both_gates
@pytest.mark.parametrize("step", [1.0, 1.9, 2.0])
def test_gated_delta_is_accurate_for_a_repeated_key(step: float, each_key: bool) -> None:
    """The hardest system: powers of its matrix reach 1e13, while its inverse has no element above 2.

    With a step size of 2, neither values nor rounding errors decay. mlx-lm's own error is 2e-6 here.
    """
    arrays = Case(200, each_key=each_key).arrays()
    arrays["k"][:] = arrays["k"][:, :1]
    arrays["beta"][:] = step
    arrays["gates"][:] = 1.0
    check(arrays, error=3e-5 if step == 2.0 else 5e-6)


@both_gates
@pytest.mark.parametrize("first", [1, 9, CHUNK, 100])
def test_two_calls_with_a_carried_state_equal_one_call(first: int, each_key: bool) -> None:
    check_two_calls(chunked_gated_delta, Case(150, v_heads=4, each_key=each_key).arrays(), first)


@both_gates
@pytest.mark.parametrize("name", ["q", "k", "v", "gates", "beta"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_is_neither_hidden_nor_raised_nor_passed_on(value: float, name: str, each_key: bool) -> None:
    arrays = Case(50, batch=2, each_key=each_key).arrays()
    expected, _ = (np.array(x) for x in chunked_gated_delta(**on_device(arrays)))
    arrays[name][1, 40] = value
    y, state = (np.array(x) for x in chunked_gated_delta(**on_device(arrays)))
    assert not np.isfinite(y[1, 40]).any()
    assert name == "q" or not np.isfinite(state[1]).any()
    np.testing.assert_array_equal(y[0], expected[0])
    np.testing.assert_array_equal(y[1, :CHUNK], expected[1, :CHUNK])


def layer_arguments(case: Case, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    """Return the arguments that a layer passes."""
    arrays = on_device(case.arrays())
    del arrays["gates"], arrays["beta"]
    rng = np.random.default_rng(2)
    own = (case.v_heads, case.k_dim) if case.each_key else (case.v_heads,)
    made = {
        "a": rng.normal(0, 2, (case.batch, case.length, *own)),
        "b": rng.normal(0, 2, (case.batch, case.length, case.v_heads)),
        "A_log": np.log(rng.uniform(0.01, 16, (case.v_heads, 1) if case.each_key else case.v_heads)),
        "dt_bias": rng.normal(-2, 2, own),
    }
    arrays |= {name: mx.array(array.astype(np.float32)) for name, array in made.items()}
    return {
        name: array if array is None or name in ("state", "A_log") else array.astype(dtype)
        for name, array in arrays.items()
    }


OPTIONS = ({}, {"allow_neg_eigval": True}, {"lower_bound": -5.0}, {"use_kernel": False})


@both_gates
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gated_delta_update_equals_mlx_lm(options: dict[str, object], each_key: bool) -> None:
    arguments = layer_arguments(Case(100, v_heads=4, each_key=each_key))
    ours = gated_delta_update(**arguments, **options)
    theirs = mlx_lm_gated_delta.gated_delta_update(**arguments, **options)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        assert relative_error(np.array(our), np.array(their)) < 5e-6


@both_gates
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype: mx.Dtype, each_key: bool) -> None:
    """y differs from mlx-lm's only by its last rounding, the state by float32 rounding."""
    arguments = layer_arguments(Case(100, each_key=each_key, with_state=False), dtype)
    y, state = gated_delta_update(**arguments)
    their_y, their_state = mlx_lm_gated_delta.gated_delta_update(**arguments)
    assert y.dtype == their_y.dtype == dtype and state.dtype == their_state.dtype == mx.float32
    assert relative_error(np.array(state), np.array(their_state)) < 5e-6
    y, their_y = (np.array(x.astype(mx.float32)) for x in (y, their_y))
    assert relative_error(y, their_y) < (1e-3 if dtype == mx.float16 else 8e-3)
    assert (y != their_y).mean() < 0.02


def test_short_masked_and_gpu_inputs_use_the_mlx_lm_gated_delta_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("in chunks")

    monkeypatch.setattr(gated_delta, "chunked_gated_delta", never)
    one, many = (layer_arguments(Case(length, batch=2)) for length in (1, 20))
    fresh = layer_arguments(Case(1, with_state=False))
    for arguments in (one, fresh, {**many, "mask": mx.arange(20) < mx.array([[20], [15]])}):
        ours, theirs = gated_delta_update(**arguments), mlx_lm_gated_delta.gated_delta_update(**arguments)
        assert all(mx.array_equal(our, their) for our, their in zip(ours, theirs, strict=True))
    with pytest.raises(AssertionError, match="in chunks"):
        gated_delta_update(**many)
    monkeypatch.setattr(gated_delta, "computes_on_cpu", lambda: False)
    ours, theirs = gated_delta_update(**many), mlx_lm_gated_delta.gated_delta_update(**many)
    assert all(mx.array_equal(our, their) for our, their in zip(ours, theirs, strict=True))


def operations(arrays: tuple[mx.array, ...], path: Path) -> int:
    """Return the number of operations in the graph."""
    with path.open("w") as file:
        mx.export_to_dot(file, *arrays)
    return path.read_text().count("shape=rectangle")


@both_gates
def test_operations_grow_with_the_chunks_and_not_with_the_tokens(each_key: bool, tmp_path: Path) -> None:
    def count(length: int) -> int:
        arguments = layer_arguments(Case(length, each_key=each_key))
        return operations(gated_delta_update(**arguments), tmp_path / "graph.dot")

    more = count(4 * CHUNK) - count(CHUNK)
    assert more < 10 * 3 * CHUNK  # token by token, each token takes 24 operations
    assert count(CHUNK // 2) > more / 6  # a short prompt also has one chunk
