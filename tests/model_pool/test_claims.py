"""Memory that real models claim from the registry while they are loaded, here in the process of the test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.checkpoints import loader
from metal_engine.device.blas.load import load_optimized_blas
from metal_engine.device.info import device_info
from metal_engine.engine.device_access import DeviceAccess
from metal_engine.errors import ModelTooLargeError
from metal_engine.loading.build import build_engine
from metal_engine.model_pool.model_entry import LoadedEngine, ModelSource
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.runner import step_memory
from metal_engine.settings.args import EngineArgs
from tests.support import checkpoint_files
from tests.support.memory import settled_memory
from tests.support.serving import DEADLINE
from tools.fixtures.fake_engine import in_thread

# Bytes that are negligible next to a model: arrays of a few numbers.
SMALL = 1024
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens, K and V, layers, heads, numbers, bytes
NUM_BLOCKS = 128


def source_of(args: EngineArgs) -> ModelSource:
    """Return a source that loads a model in this process."""

    def start(access: DeviceAccess) -> LoadedEngine:
        return LoadedEngine(in_thread(lambda: build_engine(args, access)), AnswerFormat())

    return ModelSource(start)


@pytest.mark.parametrize(
    "size", [{"num_gpu_blocks_override": NUM_BLOCKS}, {"kv_cache_memory_bytes": NUM_BLOCKS * BLOCK_BYTES}]
)
def test_missing_bytes_include_the_cache(tmp_path: Path, size: dict[str, Any]) -> None:
    """A model that is too large is refused before it takes memory, even if its weights alone do not fit."""
    args = EngineArgs(
        model=str(checkpoint_files.write_checkpoint(tmp_path)), max_num_seqs=8, max_num_batched_tokens=64, **size
    )
    facts = []
    loader.load(args, device_info(load_optimized_blas()), facts.append)
    weight_bytes = facts[0].weight_bytes
    for memory_bytes in (weight_bytes // 2, weight_bytes + 100 * BLOCK_BYTES):
        registry = ModelRegistry(memory_bytes)
        before = settled_memory()
        with pytest.raises(ModelTooLargeError) as refused:
            asyncio.run(registry.load(registry.add("a", source_of(args))))
        assert mx.get_peak_memory() <= before + SMALL
        assert refused.value.missing_bytes == weight_bytes + NUM_BLOCKS * BLOCK_BYTES - memory_bytes
        assert registry.shutdown(DEADLINE)


@pytest.mark.parametrize("stored", [
    {"config": {"vocab_size": 20000}},
    pytest.param(
        {"config": {"hidden_size": 256, "intermediate_size": 1024}, "dtype": mx.bfloat16}, marks=pytest.mark.full
    ),
    {"config": {"hidden_size": 256, "intermediate_size": 1024}, "bits": 4},
], ids=["vocabulary", "bfloat16", "quantized"])  # fmt: skip
def test_memory_is_claimed_before_it_is_taken(
    stored: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked after the weights are read and after the largest step, for an unknown and for a known model."""
    checkpoint_files.write_checkpoint(tmp_path, **stored)
    args = EngineArgs(model=str(tmp_path), num_gpu_blocks_override=64, max_num_seqs=64, max_num_batched_tokens=64)
    registry = ModelRegistry(1 << 30)
    entry = registry.add("a", source_of(args))
    seen: list[tuple[str, int, int]] = []

    def look_after(module: Any, name: str) -> None:
        function = getattr(module, name)

        def look(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            seen.append((name, mx.get_peak_memory() - before, entry.num_bytes))
            return result

        monkeypatch.setattr(module, name, look)

    look_after(loader, "load")
    look_after(step_memory, "measure_step_bytes")
    for _ in range(2):
        before = settled_memory()
        asyncio.run(registry.load(entry))
        asyncio.run(registry.unload(entry))
    assert [name for name, *_ in seen] == ["load", "measure_step_bytes"] * 2
    # The peaks of two equal steps differ by a few arrays, if one of them frees arrays earlier.
    for name, held, claimed in seen:
        assert 0 < held <= 1.1 * claimed + SMALL, (name, held, claimed)
    assert seen[0][2] <= 2 * entry.known_bytes, "the first claim is at most twice the total"
    assert registry.shutdown(DEADLINE)
