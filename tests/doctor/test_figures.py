"""Verdicts about figures, with planted good and bad values, and the report that shows them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from math import inf, nan
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.bench.offline import OfflineRun
from metal_engine.doctor import sections
from metal_engine.doctor.figures import (
    Figure,
    Promise,
    SectionResult,
    Verdict,
    at_least,
    at_most,
    format_number,
    not_measured,
)
from metal_engine.doctor.gpu_busy import utilization_of
from metal_engine.doctor.plan import SECTIONS, Plan
from metal_engine.doctor.report import markdown, summary, to_json, write_report
from metal_engine.doctor.sections.generation import _first_token, _throughput
from metal_engine.doctor.sections.machine import _low_power_mode
from metal_engine.doctor.sections.memory import memory_figure, wired_step_figure
from metal_engine.doctor.sections.recurrences import kernel_error
from metal_engine.doctor.sections.steps import AHEAD, ONE_BY_ONE, QUEUED, REPLAYED, step_figures
from metal_engine.doctor.sections.sustained import Round, sustained_figures
from metal_engine.settings.args import EngineArgs

GIB = 1 << 30


@pytest.mark.parametrize(("promise", "value", "verdict"), [
    (at_most(1.0, slack=0.1), 0.5, Verdict.BETTER),
    (at_most(1.0, slack=0.1), 1.0, Verdict.AS_PROMISED),
    (at_most(1.0, slack=0.1), 1.09, Verdict.AS_PROMISED),
    (at_most(1.0, slack=0.1), 1.11, Verdict.WORSE),
    (at_most(1.0, slack=0.1), nan, Verdict.WORSE),
    (at_most(1.0), inf, Verdict.WORSE),
    (at_most(0, required=True), 0, Verdict.AS_PROMISED),
    (at_most(0, required=True), 1, Verdict.WORSE),
    (at_most(0.1, required=True), 0.001, Verdict.AS_PROMISED),  # results cannot be better than right
    (at_least(1.0, slack=0.1), 2.0, Verdict.BETTER),
    (at_least(1.0, slack=0.1), 0.91, Verdict.AS_PROMISED),
    (at_least(1.0, slack=0.1), 0.89, Verdict.WORSE),
    (at_least(4), 3, Verdict.WORSE),
])  # fmt: skip
def test_verdicts(promise: Promise, value: float, verdict: Verdict) -> None:
    assert Figure("a figure", value, promise=promise).verdict is verdict


def test_a_figure_without_a_value_is_not_judged() -> None:
    assert not_measured("a figure", "why").verdict is Verdict.NOT_MEASURED
    assert not not_measured("a figure", "why").is_failure


def test_a_section_fails_only_on_a_required_promise_or_an_error() -> None:
    slow, wrong = Figure("slow", 2.0, promise=at_most(1.0)), Figure("wrong", 2.0, promise=at_most(1.0, required=True))
    assert not SectionResult("a section", figures=[slow]).is_failure
    assert SectionResult("a section", figures=[slow, wrong]).is_failure
    assert SectionResult("a section", error="ended with signal SIGABRT").is_failure


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (nan, "nan"), (0.00012, "1.2e-04"), (1.23456, "1.23"), (12345.6, "12,346")]
)
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


# --- planted bad figures of each section ---


def planted_run(seconds: float, first_token: float = 0.1, num_tokens: int = 10) -> OfflineRun:
    return OfflineRun(seconds, [first_token], [[1] * num_tokens], [0])


def verdicts(figures: object) -> list[Verdict]:
    return [figure.verdict for figure in figures]  # type: ignore[attr-defined]


def test_a_slower_engine_than_mlx_lm_is_worse() -> None:
    assert _throughput("4 at once", planted_run(2.0), planted_run(1.0)).verdict is Verdict.WORSE
    assert _throughput("4 at once", planted_run(1.0), planted_run(2.0)).verdict is Verdict.BETTER
    assert _throughput("4 at once", planted_run(1.0), planted_run(1.0)).verdict is Verdict.AS_PROMISED
    assert _first_token("a prompt", planted_run(1.0, 0.9), planted_run(1.0, 0.3)).verdict is Verdict.WORSE


def test_a_slower_dispatch_mode_is_reported_as_worse_with_the_flag() -> None:
    items = list(step_figures({ONE_BY_ONE: 0.010, AHEAD: 0.012, QUEUED: 0.008, REPLAYED: "replay is off"}))
    assert items[0] == (f"step {ONE_BY_ONE}", "10 ms")
    named = {figure.name: figure for figure in items if isinstance(figure, Figure)}
    ahead = named[f"step {AHEAD}: time relative to steps {ONE_BY_ONE}"]
    assert ahead.verdict is Verdict.WORSE and ahead.promise is not None and "async" in ahead.promise.flag
    assert named[f"step {QUEUED}: time relative to steps {AHEAD}"].verdict is Verdict.BETTER
    assert named[f"step {REPLAYED}"].verdict is Verdict.NOT_MEASURED


def test_more_memory_than_promised_is_worse() -> None:
    assert memory_figure("peak", 5 * GIB, 4 * GIB).verdict is Verdict.WORSE
    assert memory_figure("peak", 4 * GIB, 4 * GIB).verdict is not Verdict.WORSE
    assert wired_step_figure(0.010, 0.012).verdict is Verdict.WORSE
    assert wired_step_figure(0.010, 0.010).verdict is Verdict.AS_PROMISED


def test_a_machine_that_slows_down_or_leaks_is_worse() -> None:
    def planted(rates: list[float], sizes: list[int], num_failed: int = 0) -> list[Verdict]:
        rounds = [Round(rate, size) for rate, size in zip(rates, sizes, strict=True)]
        return verdicts(sustained_figures(rounds, num_failed))

    fine = [Verdict.AS_PROMISED] * 3
    assert planted([10.0] * 8, [100] * 8) == fine
    assert planted([10.0] * 6 + [8.0] * 2, [100] * 8) == [Verdict.WORSE, *fine[1:]]
    assert planted([10.0] * 8, [100] * 7 + [110]) == [fine[0], Verdict.WORSE, fine[2]]
    assert planted([10.0] * 8, [100] * 8, num_failed=1) == [*fine[:2], Verdict.WORSE]


def test_the_utilization_in_the_registry() -> None:
    """The format is that of `ioreg -r -d 1 -w 0 -c IOAccelerator`."""
    text = '+-o AGXAcceleratorG13X\n{ "PerformanceStatistics" = {"Device Utilization %"=97,"Tiler Utilization %"=1}}'
    assert utilization_of(text) == 97
    assert utilization_of("nothing") is None


@pytest.mark.parametrize("second", [[2.0, 2.0], [nan, 1.0]])
def test_kernel_check_detects_wrong_results_in_any_output(second: list[float]) -> None:
    outputs, expected = [mx.array([1.0, 1.0]), mx.array([1.0, 1.0])], [np.ones(2), np.array(second)]
    assert kernel_error("a kernel", outputs, expected, mx.float32).is_failure
    assert not kernel_error("a kernel", outputs, [np.ones(2), np.ones(2)], mx.float32).is_failure


def test_flags_that_the_report_names_exist() -> None:
    """Every flag in the sources of the sections is a flag of the server."""
    paths = Path(sections.__path__[0]).glob("*.py")
    sources = "".join(path.read_text() for path in paths if path.stem != "machine")  # which calls other programs
    settings = {field.replace("_", "-") for field in EngineArgs.__dataclass_fields__}
    named = re.findall(r"--([a-z][a-z-]+)", sources)
    assert {"attention-backend", "no-async-scheduling", "kv-cache-dir"} <= set(named)
    assert {name.removeprefix("no-") for name in named} <= settings | {"config"}


def test_the_low_power_mode() -> None:
    assert _low_power_mode("Currently in use:\n lowpowermode         1\n sleep 1") == "1"
    assert _low_power_mode("unknown (FileNotFoundError)") == "unknown"


# --- the report ---


RESULTS = [
    SectionResult("Machine", facts=[("chip", "Apple M9 | Max"), ("KV", "int8"), ("KV", "int4")], seconds=2.0),
    SectionResult(
        "Chats",
        "demo",
        figures=[
            Figure("speed", 0.5, promise=at_least(1.0, flag="--attention-backend mlx"), note="50 tokens/s"),
            Figure("fine", 1.0, "s", at_most(1.0)),
            Figure("error", nan, promise=at_most(0.1, required=True), is_simulated=True),
            not_measured("busy", "only on Metal"),
        ],
    ),
    SectionResult("Memory", "demo", error="ended with signal SIGABRT: no luck"),
]


def test_the_report_shows_what_is_worse_first_with_the_flag_that_helps() -> None:
    text = markdown(RESULTS)
    assert text.index("worse: Chats: demo, speed") < text.index("## Machine")
    assert "--attention-backend mlx" in text and "| fine | 1 s | at most 1 | as promised |  |" in text
    assert "**Memory: demo failed**: ended with signal SIGABRT" in text and "**wrong**" in text
    assert "error, *simulated*" in text and "There is no Metal here" in text
    assert "| nan | at most 0.1 | **wrong** | no flag helps |" in text
    assert "## Send this report" in text and "mac-report.json" in text
    assert summary(RESULTS)[0] == "1 as promised, 0 better, 2 worse, 1 not measured."


def test_the_report_as_json_has_every_figure(tmp_path: Path) -> None:
    write_report(RESULTS, tmp_path)
    found = json.loads((tmp_path / "mac-report.json").read_text())
    assert found == json.loads(json.dumps(to_json(RESULTS)))
    assert found["sections"][0]["facts"] == {"chip": "Apple M9 | Max", "KV": "int8; int4"}
    figures = found["sections"][1]["figures"]
    assert [figure["verdict"] for figure in figures] == ["worse", "as promised", "worse", "not measured"]
    assert figures[2]["value"] == "nan"
    assert found["verdicts"] == {"worse": 2, "as promised": 1, "not measured": 1}


def test_plans_and_results_survive_json() -> None:
    for plan in (Plan(), Plan.short("tools.metal_sim")):
        assert Plan.of(json.loads(json.dumps(asdict(plan)))) == plan
    for result in (RESULTS[0], RESULTS[2]):
        assert SectionResult.of(json.loads(json.dumps(asdict(result)))) == result


def test_the_whole_plan_fits_its_time_limit_for_one_model() -> None:
    """Most sections end before their limits, so the sum of the limits may exceed the plan's limit."""
    assert Plan().seconds == 600
    assert sum(section.seconds for section in SECTIONS) <= 1.7 * Plan().seconds
