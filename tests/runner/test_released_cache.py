"""A KV cache that is freed while the engine is idle: later outputs are the same, and prefixes are computed again."""

from __future__ import annotations

import pytest

from metal_engine.runner.model_runner import ModelRunner
from metal_engine.sampling_params import SamplingParams
from tests.support.mixed_requests import LONG, MODELS, MODES
from tests.support.sweeps import diagonal
from tests.support.tiny_engine import run_all, tiny_engine
from tools.fixtures.stepped_engine import SteppedEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def answer(engine: SteppedEngine) -> tuple[list[int], int]:
    """Return the tokens of a prompt's output, and the number of cached tokens."""
    (outputs,) = run_all(engine, [(LONG, GREEDY)])
    return [token for output in outputs for token in output.token_ids], outputs[-1].num_cached_tokens


@pytest.mark.parametrize(("mode", "model"), diagonal(MODES, MODELS))
def test_outputs_are_unchanged_after_the_kv_cache_is_released(model: str, mode: str) -> None:
    engine = tiny_engine(**{**MODELS[model], **MODES[mode]})
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    expected, num_cached = answer(engine)
    assert num_cached == 0
    again, num_cached = answer(engine)
    assert again == expected and (num_cached > 0 or model == "recurrent")  # this recurrent model has saved no state
    engine.core.release_memory()
    assert not runner.pool.is_allocated
    engine.core.release_memory()  # nothing is left to free
    assert answer(engine) == (expected, 0)
    assert runner.pool.is_allocated
    assert answer(engine) == (expected, num_cached)


def test_a_cache_in_use_is_kept() -> None:
    engine = tiny_engine()
    engine.add_request("a", engine.prepare(LONG, GREEDY))
    engine.step()
    engine.core.release_memory()
    assert isinstance(engine.runner, ModelRunner) and engine.runner.pool.is_allocated
