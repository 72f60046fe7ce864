"""``metal-engine doctor --full``: measures this machine within ten minutes and writes a report to send.

Does not load MLX. Each section runs in its own process (``section_process.py``).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from metal_engine.checkpoints.model_names import DEMO_MODEL, is_local
from metal_engine.doctor.figures import SectionResult
from metal_engine.doctor.plan import SECTIONS, Plan, Section
from metal_engine.doctor.report import summary, write_report
from metal_engine.errors import ConfigError
from metal_engine.python_process import PYTHON, python_environment

# Shortest remaining time in seconds in which a section is started.
_LEAST_SECONDS = 10.0
_MAX_ERROR = 800  # characters


def choose_plan(simulator: str = "") -> Plan:
    """Return the plan for this machine.

    Args:
        simulator: module that runs the kernels on machines without Metal; empty to leave them out.
    """
    if sys.platform != "darwin":
        return Plan.short(simulator)
    done = subprocess.run(("/usr/sbin/sysctl", "-n", "kern.hv_vmm_present"), capture_output=True, text=True)
    return Plan.virtual() if done.stdout.strip() == "1" else Plan()


def fetch_models(models: Sequence[str]) -> None:
    """Download missing models and show the progress. The time does not count toward the report's time limit.

    Raises no error for a model that cannot be downloaded: its sections of the report fail later.
    """
    for model in models:
        if model == DEMO_MODEL or not is_local(model):
            subprocess.run([*PYTHON, "-m", "metal_engine", "pull", model], env=python_environment())


def run_full(
    models: Sequence[str], plan: Plan, folder: Path, say: Callable[[str], None], sections: Sequence[Section] = SECTIONS
) -> bool:
    """Run all sections and write ``mac-report.md`` and ``mac-report.json`` to ``folder``.

    The report is written after each section, so that an interrupted run leaves a report.

    Args:
        models: models to measure, at least one. Each model may take ``plan.seconds``, plus the time that earlier models
            did not use.
        plan: sizes of the measurements.
        folder: folder of the report, which must exist.
        say: callback that receives lines about the progress.

    Returns:
        True if no section failed and no result was wrong. Slow results do not count.

    Raises:
        ConfigError: the report cannot be written to the folder.
    """
    try:
        write_report([], folder)
    except OSError as error:
        raise ConfigError(None, f"the report cannot be written to {folder.resolve()}: {error}") from error
    began = time.monotonic()
    runs = [(section, "", 1) for section in sections if not section.has_model]
    runs += [(section, model, n) for n, model in enumerate(models, 1) for section in sections if section.has_model]
    results: list[SectionResult] = []
    for section, model, num_models in runs:
        title = f"{section.name} ({_label(model)})" if model else section.name
        say(f"{title} …")
        left = began + num_models * plan.seconds - time.monotonic()
        results.append(_run(section, model, plan, min(section.seconds, left)))
        if results[-1].error:
            say(f"  failed: {results[-1].error}")
        paths = write_report(results, folder)
    for line in summary(results):
        say(line)
    say(f"\nThe report is in {paths[0]} and {paths[1]}. Please send both: {paths[0].name} says how.")
    return not any(result.is_failure for result in results)


def _label(model: str) -> str:
    """Return a model's name without the folders of a local path, which can contain the user's name."""
    return Path(model).name if model != DEMO_MODEL and is_local(model) else model


def _run(section: Section, model: str, plan: Plan, seconds: float) -> SectionResult:
    """Run a section in a new process for at most ``seconds``.

    If the process fails or takes longer, the result has an error, and the facts and figures up to then.
    """
    result = SectionResult(section.name, _label(model))
    if seconds < _LEAST_SECONDS:
        return replace(result, error="no time was left")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "items.jsonl")
        path.touch()
        given = {"module": section.module, "plan": asdict(plan), "model": model, "path": str(path)}
        command = [*PYTHON, "-m", "metal_engine.doctor.section_process"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(given),
                env=python_environment(),
                capture_output=True,
                text=True,
                timeout=seconds,
            )
            error = "" if done.returncode == 0 else _describe_end(done.returncode, done.stderr)
        except subprocess.TimeoutExpired:
            error = f"not finished after {seconds:.0f} s"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    items = [json.loads(line) for line in lines if line.endswith("\n")]  # the end of the process may cut the last line
    figures = [item for item in items if isinstance(item, dict)]
    facts = [item for item in items if isinstance(item, list)]
    return SectionResult.of(
        {**asdict(result), "seconds": time.monotonic() - began, "facts": facts, "figures": figures, "error": error}
    )


def _describe_end(status: int, stderr: str) -> str:
    """Describe the end of a process that failed: ``ended with signal SIGABRT: ``, and the end of its standard error.

    A negative ``status`` is the number of the signal that ended the process.
    """
    how = f"status {status}"
    if status < 0:
        try:
            how = f"signal {signal.Signals(-status).name}"
        except ValueError:
            how = f"signal {-status}"
    lines = stderr.replace(str(Path.home()), "~").splitlines()
    last = " / ".join(line.strip() for line in lines if line.strip())[-_MAX_ERROR:]
    return f"ended with {how}: {last}"
