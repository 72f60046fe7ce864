"""The full report: all sections with the short plan on a tiny model, and sections that fail or crash."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

from metal_engine.doctor import full
from metal_engine.doctor.figures import Figure, SectionResult, Verdict
from metal_engine.doctor.full import run_full
from metal_engine.doctor.plan import SECTIONS, Plan, Section
from metal_engine.doctor.section_process import Item, run_section
from metal_engine.doctor.sections import steps
from metal_engine.doctor.sections.generation import _chat_prompt, is_tie
from metal_engine.doctor.sections.recurrences import (
    gated_delta_layer,
    mamba2_layer,
    packed_gated_delta,
    packed_ssm_update,
)
from metal_engine.errors import ConfigError
from metal_engine.recurrence.metal import MetalRecurrence
from tests.support.checkpoint_files import CHAT_TEMPLATE, write_checkpoint
from tests.support.sweeps import sweep
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.tiny_models import tiny_model
from tools.metal_sim import metal_kernel

PLAN = Plan.short(simulator="tools.metal_sim")
# Sections with parts for Metal. A test runs these sections with those parts.
METAL_PARTS = ("generation", "steps", "memory")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint whose heads the kernel and quantized KV support."""
    return str(write_checkpoint(tmp_path_factory.mktemp("full") / "tiny", config={"head_dim": 32}))


def run(section: Section, model: str) -> tuple[dict[str, str], dict[str, Figure]]:
    items: list[Item] = []
    run_section(section.module, PLAN, model, items.append)
    facts = dict(item for item in items if isinstance(item, tuple))
    return facts, {item.name: item for item in items if isinstance(item, Figure)}


@pytest.mark.parametrize(
    "section", sweep(SECTIONS, lambda section: section.module not in METAL_PARTS), ids=lambda section: section.module
)
def test_every_section_measures_here(section: Section, model: str) -> None:
    """No result is wrong. Figures that need Metal have a reason instead of a value."""
    facts, figures = run(section, model)
    assert facts or figures
    assert [name for name, figure in figures.items() if figure.is_failure] == []
    assert all(figure.note for figure in figures.values() if figure.verdict is Verdict.NOT_MEASURED)
    assert all((figure.value is None) == (figure.promise is None) for figure in figures.values())
    expected = {
        "machine": lambda: {"system", "tiny model", "time", "load of the machine"} <= facts.keys(),
        "attention": lambda: len(figures) == len(PLAN.attention_steps),
        "recurrences": lambda: sum(figure.is_simulated for figure in figures.values()) == 3,
        "kernels": lambda: sum("int" in name and figure.is_simulated for name, figure in figures.items()) == 2,
        "generation": lambda: "3 at once: throughput relative to mlx-lm's" in figures and facts["one chat"],
        "steps": lambda: "step planned ahead: time relative to steps one by one" in figures and "replay" in facts,
        # Arrays of other tests in this process count, too, so the verdict may be anything.
        "memory": lambda: (figures["peak memory relative to the promise"].value or 0) > 0,
        "preemption": lambda: figures["outputs equal to requests alone"].verdict is Verdict.AS_PROMISED,
        "restart": lambda: (figures["share of the prompt loaded after the restart"].value or 0) > 0.6,
        "sustained": lambda: figures["failed steps"].value == 0,
    }
    assert expected[section.module]()


@pytest.mark.parametrize("module", METAL_PARTS)
def test_parts_for_metal_run(module: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that needs a GPU, on a CPU: both attention backends are MLX's, and no driver reports a utilization."""
    monkeypatch.setattr(f"metal_engine.doctor.sections.{module}.has_metal", lambda: True)
    monkeypatch.setattr(steps, "_BUSY_SECONDS", 0.1)
    _, figures = run(next(section for section in SECTIONS if section.module == module), model)
    match module:
        case "generation":
            (parity,) = (figure for name, figure in figures.items() if "attention-backend" in name)
            assert parity.value == 0 and "outputs" in parity.note
        case "steps":
            assert "no utilization" in figures["GPU busy during decode steps"].note
        case "memory":
            assert figures["decode step with wired memory: time relative to without"].value


@pytest.mark.parametrize(("packed", "theirs", "arguments"), [
    (packed_gated_delta, gated_delta_update, partial(gated_delta_layer, (2, 3), 2, 4, 64, each_key=False)),
    (packed_ssm_update, ssm_update, partial(mamba2_layer, (2, 2))),
], ids=["gated delta", "Mamba2"])  # fmt: skip
def test_the_kernel_is_timed_on_the_same_work_as_mlx_lm(packed: Any, theirs: Any, arguments: Any) -> None:
    given = arguments()
    num_requests, num_tokens = given[0].shape[:2]
    own = packed(MetalRecurrence(metal_kernel), (num_requests, num_tokens), given)()
    for got, expected in zip(own, theirs(*given), strict=True):
        assert mx.allclose(got.reshape(expected.shape), expected, rtol=1e-3, atol=1e-4)


def test_the_chat_has_the_template_of_the_model() -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    assert tokenizer.decode(_chat_prompt(tokenizer)) == "<|user|>What is the capital of France?<|assistant|>"
    assert tiny_tokenizer(None).decode(_chat_prompt(tiny_tokenizer(None))) == "What is the capital of France?"


def test_a_kernel_with_wrong_results_fails_the_report(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the kernel's output is off by 10%."""
    from metal_engine.doctor.sections import kernels

    attend = kernels.attend_random
    monkeypatch.setattr(kernels, "attend_random", lambda *arguments: 1.1 * attend(*arguments))
    _, figures = run(next(section for section in SECTIONS if section.module == "kernels"), model)
    wrong = [figure for name, figure in figures.items() if name.startswith("attention")]
    assert wrong and all(figure.is_failure and figure.value == pytest.approx(0.1, rel=0.01) for figure in wrong)


def test_a_kernel_that_does_not_run_is_reported_and_the_rest_is_measured(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: the device refuses the kernel over quantized K and V."""
    from metal_engine.doctor.sections import kernels

    attend = kernels.attend_random

    def refuses(backend: Any, kind: Any, *arguments: Any) -> Any:
        if "int8" in str(kind):
            raise RuntimeError("no such instruction")
        return attend(backend, kind, *arguments)

    monkeypatch.setattr(kernels, "attend_random", refuses)
    _, figures = run(next(section for section in SECTIONS if section.module == "kernels"), model)
    (failed,) = (figure for figure in figures.values() if figure.is_failure)
    assert "int8" in failed.name and "no such instruction" in failed.note
    assert any(name.startswith("check at load") for name in figures)


def test_a_model_that_the_kernel_does_not_support_is_checked_with_mlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metal_engine.doctor.sections.kernels.has_metal", lambda: True)
    model = write_checkpoint(tmp_path / "model", config={"hidden_size": 72})
    _, figures = run(next(section for section in SECTIONS if section.module == "kernels"), str(model))
    (kernel,) = (figure for name, figure in figures.items() if name.startswith("attention"))
    (check,) = (figure for name, figure in figures.items() if name.startswith("check at load"))
    assert "does not support" in kernel.note and check.verdict is Verdict.AS_PROMISED


@pytest.mark.parametrize("gap", [0.0, 0.5])
def test_outputs_that_differ_beyond_a_tie_are_seen(gap: float) -> None:
    """The second output has the token with the second largest logit, which is equal or much smaller."""
    model = tiny_model()
    prompt, first = [3, 1, 4] * 5, [7, 7]
    order = mx.argsort(model(mx.array([[*prompt, *first]]))[0, -1])
    best, second = int(order[-1]), int(order[-2])

    class Planted:
        """The model, with a gap between the two logits. All its other logits stay below."""

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            logits = model(tokens, cache=cache)
            top = logits.max(axis=-1, keepdims=True)
            logits[..., best : best + 1] = top
            logits[..., second : second + 1] = top * (1 - gap)
            return logits

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    assert is_tie(Planted(), prompt, [*first, best], [*first, second]) == (gap == 0.0)


# --- processes ---


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a file in which a test puts the body of a section's ``measure``. Child processes import it."""
    package = tmp_path / "path"
    package.mkdir()
    code = "import metal_engine.doctor.sections as s\ns.__path__.append(" + repr(str(package)) + ")\n"
    (package / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(package)
    yield package / "planted.py"


MEASURE = """
import os, signal, time
from metal_engine.doctor.figures import Figure, at_most

def measure(plan, model):
    yield "fact", "of " + (model or "no model")
    yield Figure("figure", 1.0, promise=at_most(1.0))
    {end}
"""


@pytest.mark.parametrize(("end", "error"), [
    ("", ""),
    ("raise ValueError('a reason')", "ValueError: a reason"),
    ("os.kill(os.getpid(), signal.SIGABRT)", "signal SIGABRT"),
    ("time.sleep(600)", "not finished after"),
])  # fmt: skip
def test_a_failed_section_keeps_the_figures_measured_before_the_failure(
    end: str, error: str, planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.write_text(MEASURE.format(end=end))
    said: list[str] = []
    monkeypatch.setattr(full, "_LEAST_SECONDS", 1.0)
    for seconds in (6.0, 60.0) if "sleep" in end else (300.0,):
        is_fine = run_full(["demo"], PLAN, tmp_path, said.append, [Section("Planted", "planted", seconds)])
        assert is_fine == (not error)
        (section,) = json.loads((tmp_path / "mac-report.json").read_text())["sections"]
        if section["figures"]:
            break  # otherwise, a busy machine has not started the process in time
    assert error in section["error"] and bool(section["error"]) == bool(error)
    assert section["facts"] == {"fact": "of demo"} and section["figures"][0]["verdict"] == "as promised"
    assert "mac-report.md" in said[-1]


def test_a_line_that_is_cut_off_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_partly(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        Path(json.loads(options["input"])["path"]).write_text('["a fact", "text"]\n["a second fa')
        raise subprocess.TimeoutExpired(command, 300.0)

    monkeypatch.setattr(full.subprocess, "run", run_partly)
    result = full._run(Section("Planted", "planted", 300.0), "", PLAN, 300.0)
    assert [list(fact) for fact in result.facts] == [["a fact", "text"]] and result.error


def test_sections_without_time_are_reported(tmp_path: Path) -> None:
    assert not run_full(["demo"], Plan(seconds=5.0), tmp_path, lambda line: None, SECTIONS[:1])
    assert "no time was left" in (tmp_path / "mac-report.md").read_text()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "_run", None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the report cannot be written to .*file: "):
        run_full(["demo"], PLAN, tmp_path / "file", lambda line: None)


def test_every_model_has_the_time_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def nothing(section: Section, model: str, plan: Plan, seconds: float) -> SectionResult:
        given.append(seconds)
        return SectionResult(section.name, model)

    monkeypatch.setattr(full, "_run", nothing)
    sections = [Section("Without", "none", 500.0, has_model=False), Section("With", "none", 1000.0)]
    assert run_full(["one", "two"], Plan(seconds=600.0), tmp_path, lambda line: None, sections)
    assert given == pytest.approx([500.0, 600.0, 1000.0], abs=5.0)


@pytest.mark.parametrize(
    ("platform", "is_virtual", "plan"),
    [("linux", "", Plan.short("tools.metal_sim")), ("darwin", "1\n", Plan.virtual()), ("darwin", "0\n", Plan())],
)
def test_virtual_macs_and_linux_have_shorter_plans(
    platform: str, is_virtual: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=is_virtual)
    monkeypatch.setattr(full.sys, "platform", platform)
    monkeypatch.setattr(full.subprocess, "run", lambda *command, **options: done)
    assert full.choose_plan("tools.metal_sim") == plan


def test_models_on_the_hub_are_downloaded_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(full.subprocess, "run", lambda command, env: pulled.append(command[-1]))
    full.fetch_models(["demo", "owner/name", str(tmp_path), "./model.gguf"])
    assert pulled == ["demo", "owner/name"]


def test_a_local_model_s_folders_are_not_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert full._label(str(tmp_path / "secret" / "model")) == "model"
    assert full._label("demo") == "demo" and full._label("owner/name") == "owner/name"
    home = str(Path.home())
    more = "x" * (full._MAX_ERROR - len(f"{home[1:]}/models"))  # a cut would leave the home folder without its slash
    for text in (f"ValueError: {home}/models", f"{home}/models{more}"):
        assert home[1:] not in full._describe_end(1, text)
    assert "SIGSEGV" in full._describe_end(-signal.SIGSEGV, "")
