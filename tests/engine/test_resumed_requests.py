"""Requests continue in another engine, with the same outputs as in a single engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import pytest

from metal_engine.engine.core import EngineCore
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput, merge_outputs
from tests.support.mixed_requests import MODELS, MODES, add_mixed, check_equal, undisturbed
from tests.support.sweeps import sweep
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.stepped_engine import SteppedCore, SteppedEngine


@dataclass
class RecordingCore(SteppedCore):
    """Interface of a core that can submit its unfinished requests to another core.

    Attributes:
        submitted: arguments of each submission, by request.
        outputs: outputs of each request.
        num_steps: number of steps of all cores.
    """

    submitted: dict[str, tuple[PreparedRequest, int, RequestOptions | None]] = field(default_factory=dict)
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    num_steps: int = 0

    def submit(
        self, request_id: str, prepared: PreparedRequest, seed: int, options: RequestOptions | None = None
    ) -> None:
        self.submitted[request_id] = prepared, seed, options
        super().submit(request_id, prepared, seed, options)

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        outputs = self.core.step()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def move_to(self, core: EngineCore) -> None:
        """Submit all unfinished requests to another core."""
        for request_id in self.core.request_ids:
            received = self.outputs.get(request_id)
            so_far = None if received is None else merge_outputs(received)
            core.add_request(request_id, *self.submitted[request_id], so_far=so_far)
        self.core = core


AT_STEPS = [(1, 3), (2, 7), (5, 8), (11, 16)]
KEPT_MODES = ["one by one", "behind, replayed", "drafts ahead"]


@pytest.mark.parametrize(
    ("model", "mode", "at_steps"),
    sweep(
        product(MODELS, KEPT_MODES, AT_STEPS),
        [
            *zip(["attention"] * 3, KEPT_MODES, AT_STEPS[1:], strict=True),
            *zip(["recurrent"] * 3, KEPT_MODES, AT_STEPS[:3], strict=True),
        ],
    ),
)
def test_requests_resume_in_another_engine_with_the_same_outputs(
    model: str, at_steps: tuple[int, int], mode: str
) -> None:
    """Two engines end before their requests. The client gets the outputs of a single engine."""

    def make() -> SteppedEngine:
        return tiny_engine(**MODELS[model], **MODES[mode])

    engine = make()
    recorder = RecordingCore(engine.core)
    client = engine.client
    client._engine = recorder
    add_mixed(engine)
    found: dict[str, list[RequestOutput]] = {}
    num_generated = 0
    for at_step in (*at_steps, 1000):
        while recorder.num_steps < at_step and engine.has_requests:
            for output in client.receive(recorder.step()):
                found.setdefault(output.request_id, []).append(output)
            engine.scheduler.check_integrity()
        num_generated += engine.metrics.num_generation_tokens - engine.metrics._num_beyond_stop
        if engine.has_requests:
            engine = make()
            recorder.move_to(engine.core)
    assert not client._open and engine.stats.num_used_blocks == 0
    check_equal(found, model)
    assert num_generated == sum(output.num_output_tokens for output in undisturbed(model).values())
