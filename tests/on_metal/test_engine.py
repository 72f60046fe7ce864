"""Memory beside the start-up block's promise, and errors of the device, on a Mac's GPU and here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.doctor.figures import Figure, Verdict
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import run_section
from metal_engine.models.paged_model import PagedModel
from metal_engine.sampling_params import SamplingParams
from tests.support.checkpoint_files import write_checkpoint
from tests.support.demo import engine_for
from tests.support.running import run
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.tiny_models import tiny_model
from tools.metal_sim import metal_kernel

SHAPE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.metal
def test_memory_stays_within_the_promise(tmp_path: Path) -> None:
    """Wired and not wired. tests/doctor/test_full.py runs the same section here."""
    model = write_checkpoint(tmp_path / "model", config={"head_dim": 32})
    figures: list[Any] = []
    run_section("memory", Plan.short(), str(model), figures.append)
    peaks = [figure for figure in figures if isinstance(figure, Figure) and "relative to the promise" in figure.name]
    assert len(peaks) == 2
    assert all(figure.verdict is not Verdict.WORSE for figure in peaks), peaks


class FailsOnce:
    """Kernel factory whose kernels fail at one launch: they launch a kernel that the compiler refuses."""

    def __init__(self, factory: Callable[..., Any], launch: int) -> None:
        self._factory, self._launch, self.num_launches = factory, launch, 0

    def __call__(self, **arguments: Any) -> Callable[..., Any]:
        kernel = self._factory(**arguments)
        broken = self._factory(**{**arguments, "name": "broken", "source": "this is not Metal;"})

        def call(**launch: Any) -> Any:
            self.num_launches += 1
            return (broken if self.num_launches == self._launch else kernel)(**launch)

        return call


@pytest.mark.parametrize("factory", [metal_kernel, pytest.param(mx.fast.metal_kernel, marks=pytest.mark.metal)])
def test_a_step_that_fails_on_the_device_is_computed_again(factory: Callable[..., Any]) -> None:
    """An error of Metal's compiler arrives when the step is evaluated. The request's tokens are the same as without."""
    prompts = [[5, 7, 9] * 4, [11] * 20]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = []
    for launch in (0, 5):  # 0: never
        attention = MetalBackend(FailsOnce(factory, launch))
        engine = engine_for(
            PagedModel(tiny_model(**SHAPE)), tiny_tokenizer(), vocab_size=256, budget=64, block_size=8, num_blocks=64,
            max_num_seqs=4, attention=attention,
        )  # fmt: skip
        outputs.append(run(engine, prompts, params))
        assert engine.metrics.num_failed_steps == int(launch > 0)
    assert outputs[0] == outputs[1]
