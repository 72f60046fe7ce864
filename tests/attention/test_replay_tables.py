"""Attention with tables shared by steps of equal sizes gives the same result as with a step's own plan."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.backend import ReplayableBackend, size_class
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable.groups import CPU_LIMITS
from metal_engine.attention.portable_fallback import FallbackBackend
from tests.support.simulated import backend, relative_error
from tools.fixtures.packed_step import PackedStep, make_step

# Decodes, some of them split, and verifications of drafts, some of them with several tiles.
DECODES = [(1, 7), (1, 900), (1, 60), (1, 3), (1, 1301), (1, 0), (1, 16)]
OTHER_DECODES = [(1, 5), (1, 1305), (1, 0), (1, 908), (1, 80), (1, 15), (1, 1)]
VERIFICATIONS = [(4, 60), (1, 900), (3, 7), (2, 15)]
OTHER_VERIFICATIONS = [(3, 8), (1, 905), (2, 31), (4, 55)]
SHAPES = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"num_heads": 16, "num_kv_heads": 1}, {"window": 40}, id="many heads, window"),
    pytest.param({"head_dim": 32, "quantized": (8, 32)}, {"softcap": 20.0}, id="int8, softcap"),
    pytest.param({}, {"chunk": 8}, id="chunks"),
    pytest.param({"head_dim": 32, "v_head_dim": 24, "is_latent": True, "num_kv_heads": 1}, {}, id="latent"),
]


def attend(attention: Any, step: PackedStep, options: dict[str, Any]) -> np.ndarray:
    out = attention.attend(step.q, step.state, scale=0.3, **options)
    return np.array(out.astype(mx.float32))[..., : step.v_cache.shape[-1]]


def make_tables(chosen: ReplayableBackend, step: PackedStep, options: dict[str, Any]) -> Any:
    built = chosen.for_step(step.rows)
    attend(built, step, options)
    return chosen.tables(step.rows, built.work_keys)


@pytest.mark.parametrize("is_simulated", [True, False], ids=["kernel", "portable"])
@pytest.mark.parametrize("segments", [(DECODES, OTHER_DECODES), (VERIFICATIONS, OTHER_VERIFICATIONS)])
@pytest.mark.parametrize("shape, options", SHAPES)
def test_a_step_can_use_the_launches_of_another_step_of_equal_sizes(
    shape: dict[str, Any], options: dict[str, Any], segments: Any, is_simulated: bool
) -> None:
    chosen: Any = backend() if is_simulated else PortableBackend()
    steps = [make_step(s, seed=i, window=options.get("window"), **shape) for i, s in enumerate(segments)]
    tables = [make_tables(chosen, step, options) for step in steps]
    assert tables[0].key == tables[1].key
    assert [a.shape for a in tables[0].arrays] == [a.shape for a in tables[1].arrays]
    for step, own, other in zip(steps, tables, reversed(tables), strict=True):
        expected = step.reference(scale=0.3, **options)
        built = attend(chosen.for_step(step.rows), step, options)
        for launches in (own, other):
            out = attend(launches.attention(own.arrays), step, options)
            assert relative_error(out, expected) < 1e-4
            if is_simulated:
                np.testing.assert_array_equal(out, built)


def test_empty_items_fill_the_kernel_s_tables() -> None:
    """This shows that the test above covers empty items."""
    step = make_step(DECODES)
    items = np.array(make_tables(backend(), step, {}).arrays[1])
    assert (items[:, 1] == 0).any() and (items[:, 6] > 0).any()


def test_table_attention_raises_for_a_layer_kind_without_a_plan() -> None:
    """A value that a trace does not receive as an array would be constant in every replay."""
    step = make_step(DECODES)
    for chosen in (backend(), PortableBackend()):
        tables = make_tables(chosen, step, {})
        with pytest.raises(RuntimeError, match="which no layer has requested before"):
            attend(tables.attention(tables.arrays), step, {"window": 5})


def test_portable_backend_has_no_tables_for_steps_over_the_score_limit() -> None:
    step = make_step([(1, 4000)] * 4, num_heads=32)
    assert CPU_LIMITS.scores < 4 * 32 * 4000
    assert make_tables(PortableBackend(CPU_LIMITS), step, {}) is None


def test_backends_that_cannot() -> None:
    assert not isinstance(FallbackBackend(backend(), PortableBackend(), frozenset()), ReplayableBackend)


def test_size_classes() -> None:
    classes = [size_class(n) for n in range(1, 5000)]
    assert classes[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10]
    assert all(n <= c <= 1.25 * n for n, c in enumerate(classes, 1))
    assert len(set(classes)) < 50 and all(size_class(c) == c for c in classes)
