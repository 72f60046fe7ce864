"""The workflows of GitHub Actions: they parse, and run what exists here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_has_a_timeout_and_each_step_either_uses_or_runs(path: Path) -> None:
    for name, job in jobs(path.name).items():
        assert job.get("timeout-minutes", 0) in range(1, 121), name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= jobs(path.name).keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_name_targets_and_modules_that_exist(path: Path) -> None:
    text = path.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make (\S+)", text):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
    for module in re.findall(r"-m (tools\.[\w.]+)", text):
        file = ROOT / module.replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), module


def test_the_hosted_mac_checks_its_gpu_first_and_keeps_the_report() -> None:
    job = jobs("mac.yml")["metal"]
    assert job["runs-on"] == "macos-15" and job["timeout-minutes"] <= 30
    commands = [step.get("run", "") for step in job["steps"]]
    gpu, tests, report = (
        next(i for i, command in enumerate(commands) if words in command)
        for words in ("mx.default_device() == mx.Device(mx.gpu)", "pytest -m metal", "make mac")
    )
    assert gpu < tests < report
    # The installation and the last steps need the rest.
    assert sum(job["steps"][place]["timeout-minutes"] for place in (tests, report)) <= job["timeout-minutes"] - 5
    assert any("GITHUB_STEP_SUMMARY" in command for command in commands[report:])
    assert job["steps"][-1]["with"]["path"] == "mac-report.*"
