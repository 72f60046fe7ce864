"""The runner drops finished requests even if the plan that lists the drops fails."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from metal_engine.runner.batch import RequestTable
from metal_engine.sampling_params import SamplingParams
from tests.support.running import run
from tests.support.tiny_engine import tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_finished_requests_are_dropped_even_if_the_next_plan_fails(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(ahead=ahead, max_num_seqs=2)
    prompts = [[5, 7, 9], [3, 1, 4, 1, 5]]
    expected = run(engine, prompts, GREEDY)  # the next plan drops these two requests
    update = RequestTable.update
    num_dropped: list[int] = []

    def fail(table: RequestTable, plan: Any) -> None:
        monkeypatch.setattr(RequestTable, "update", update)
        num_dropped.append(len(plan.dropped_req_ids))
        raise RuntimeError("refused before anything is taken in")

    monkeypatch.setattr(RequestTable, "update", fail)
    engine.add_request("late", engine.prepare([1, 2], GREEDY))
    assert engine.step() == [] and engine.metrics.num_failed_steps == 1 and num_dropped == [2]
    engine.abort_request("late")
    assert run(engine, prompts, GREEDY) == expected
    engine.scheduler.check_integrity()


def test_drops_stay_when_the_connector_cannot_be_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(max_num_seqs=1)
    expected = run(engine, [[5, 7, 9]], GREEDY)

    class Failing:
        failed_loads: ClassVar[dict[str, str]] = {}

        def build_connector_meta(self, saves: Any) -> None:
            raise RuntimeError("no metadata")

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "connector", Failing())
        engine.add_request("lost", engine.prepare([1, 2], GREEDY))
        assert [output.finish_reason for output in engine.step()] == ["error"]
    assert run(engine, [[5, 7, 9]], GREEDY) == expected
