"""Paths of recurrent layers in a packed step: by function, by module, and with kernels (in the simulator)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.recurrent import RecurrentState
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT, Segments
from metal_engine.kv_cache.spec import ArraySpec, RecurrentSpec
from metal_engine.models.check import check_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.models.recurrent.state_cache import StateCache
from metal_engine.recurrence.metal import MetalRecurrence
from tests.models.test_architectures import TOLERANCE, largest_error
from tools.fixtures.architectures import VOCAB_SIZE, configuration
from tools.fixtures.recurrent_architectures import RECURRENT
from tools.fixtures.tiny_models import random_model
from tools.metal_sim.kernel import metal_kernel

# Modules whose functions are not known, because each has its own recurrence.
BY_MODULE = {"jamba", "mamba", "recurrent_gemma", "rwkv7"}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_module_by_module(model_type: str) -> None:
    """The slowest path, which works for any module. It serves as the reference of the other paths."""
    model = random_model(configuration(model_type))
    assert largest_error(model, PagedModel(model, whole_modules=True)) < TOLERANCE


@pytest.mark.parametrize("model_type", RECURRENT)
def test_convolutions_run_by_function_except_in_models_run_by_module(model_type: str) -> None:
    paged = PagedModel(random_model(configuration(model_type)))
    caches = [cache for cache in paged.layer_caches if isinstance(cache, StateCache)]
    if model_type in BY_MODULE:
        assert not any(cache.convolved for cache in caches)
    elif not model_type.startswith(("bailing_hybrid", "bailing_moe_linear", "longcat")):  # these have no convolution
        assert all(cache.convolved for cache in caches)


# Sizes that the kernels support.
KERNEL_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_key_head_dim": 32},
    "kimi_linear": {"linear_attn_config": {**RECURRENT["kimi_linear"]["linear_attn_config"], "head_dim": 32}},
    "granitemoehybrid": {"mamba_d_state": 32},
    "lfm2": {},
}


@pytest.mark.parametrize("model_type", KERNEL_SIZES)
def test_kernels_are_used_and_right(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        launch = getattr(MetalRecurrence, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            launched[name] += 1
            return launch(*args, **kwargs)

        return call

    for name in ("gated_delta", "ssm_update", "convolve"):
        monkeypatch.setattr(MetalRecurrence, name, counting(name))
    config = configuration(model_type)
    sizes = KERNEL_SIZES[model_type]
    config = (
        {**config, "text_config": {**config["text_config"], **sizes}} if "text_config" in config else config | sizes
    )
    model = random_model(config)
    paged = PagedModel(model, MetalRecurrence(metal_kernel))
    assert largest_error(model, paged) < TOLERANCE
    recurrence = {"granitemoehybrid": {"ssm_update"}, "lfm2": set()}.get(model_type, {"gated_delta"})
    assert launched.keys() == {"convolve", *recurrence}
    check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


@pytest.mark.parametrize("model_type", ["qwen3_5", "lfm2", "nemotron_h", "mamba"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_passes_the_check_at_load(model_type: str, dtype: mx.Dtype) -> None:
    check_paged_model(PagedModel(random_model(configuration(model_type), 1, dtype)), PortableBackend(), VOCAB_SIZE)


def test_the_load_check_detects_states_swapped_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedModel(random_model(configuration("qwen3_5")))
    take = RecurrentState.take

    def swapped(self: RecurrentState, name: str, reads: list[Any], writes: list[Any]) -> list[mx.array | None]:
        return take(self, name, [r if r is None else tuple(reversed(r)) for r in reads], writes)

    monkeypatch.setattr(RecurrentState, "take", swapped)
    with pytest.raises(UnsupportedModelError, match="off from mlx-lm's own"):
        check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


def test_groups_are_batches_without_padding() -> None:
    """Rows of a decode, a fresh prompt of one token, a chunk and another decode."""
    segments = Segments(np.array([0, 1, 2, 5, 6]), np.array([4, ZERO_STATE_SLOT, 2, 3]), np.array([4, 1, 2, 3]))
    shapes = [(group.length, group.reads, group.writes) for group in segments.groups]
    assert shapes == [(1, (4, 3), (4, 3)), (1, (ZERO_STATE_SLOT,), (1,)), (3, (2,), (2,))]
    x = mx.arange(6).reshape(6, 1)
    parts = [group.take(x) for group in segments.groups]
    assert [part.tolist() for part in parts] == [[[0], [5]], [[1]], [[2, 3, 4]]]
    assert segments.join(parts).tolist() == x.tolist()
    assert not segments.is_decode and segments.tables[1].tolist() == [0, -1, 2, 3]


def pool(num_slots: int = 5) -> RecurrentState:
    state = RecurrentState(RecurrentSpec((ArraySpec((2,), mx.float32),)))
    state.allocate(0, 1, num_slots)
    return state


def states_of(state: RecurrentState, slots: tuple[int, ...], writes: tuple[int, ...]) -> list[float]:
    (values,) = state.take("0", [slots], [writes])
    return values[:, 0].tolist()


def test_states_are_found_in_any_order_and_after_any_pause() -> None:
    state = pool()
    states_of(state, (0, 0, 0), (1, 2, 3))
    state.put("0", (1, 2, 3), mx.array([[1.0, 1], [2, 2], [3, 3]]))
    assert states_of(state, (1, 2, 3), (1, 2, 3)) == [1, 2, 3]  # the states of the previous step
    state.put("0", (1, 2, 3), mx.array([[10.0, 1], [20, 2], [30, 3]]))
    assert states_of(state, (3,), (3,)) == [30]  # requests 1 and 2 are not in this step
    state.put("0", (3,), mx.array([[33.0, 3]]))
    assert states_of(state, (2, 3, 1), (2, 3, 1)) == [20, 33, 10]


def test_a_state_checkpoint_is_not_changed_by_later_steps() -> None:
    """A state checkpoint: its request continues in another slot, and other requests start from it."""
    state = pool()
    states_of(state, (0,), (1,))
    state.put("0", (1,), mx.array([[1.0, 1]]))
    assert states_of(state, (1,), (2,)) == [1]
    state.put("0", (2,), mx.array([[2.0, 2]]))
    assert states_of(state, (1, 2, 1), (3, 2, 4)) == [1, 2, 1]
    state.put("0", (3, 2, 4), mx.array([[3.0, 3], [4, 4], [5, 5]]))
    assert states_of(state, (1, 3, 2, 4), (5, 3, 2, 4)) == [1, 3, 4, 5]


def test_a_step_thrown_away_leaves_no_trace() -> None:
    state = pool()
    states_of(state, (0, 0), (1, 2))
    state.put("0", (1, 2), mx.array([[1.0, 1], [2, 2]]))
    before = state.snapshot()
    states_of(state, (2, 0), (2, 3))
    state.put("0", (2, 3), mx.array([[8.0, 8], [9, 9]]))
    state.restore(before)
    assert states_of(state, (2, 1), (2, 1)) == [2, 1]
    assert state.arrays["0"][0].tolist() == [0, 0], "what requests begin with stays nothing"
