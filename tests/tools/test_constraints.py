"""constraints.txt: the listed versions, and that an installer can follow the file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tools.constraints import FILE, ROOT, constraints, disagreements, needed, needed_here, project_requirements

TEXT = FILE.read_text(encoding="utf-8")
PINS = dict(line.split("==") for line in TEXT.splitlines() if not line.startswith("#"))


def test_constraints_list_only_exact_versions_in_order() -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.!+]+", line) for line in lines)
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert len(PINS) == len(lines) > 50


def test_constraints_satisfy_every_project_requirement() -> None:
    for requirement in project_requirements(("dev", "gateway", "plots", "valkey", "vision")):
        assert requirement.specifier.contains(PINS[requirement.name.lower().replace("_", "-")]), requirement


def test_mlx_metal_and_mlx_cpu_have_the_version_of_mlx() -> None:
    """mlx requires `mlx-metal` of its own version on a Mac, and `mlx-cpu` of its own version on Linux."""
    assert PINS["mlx-metal"] == PINS["mlx-cpu"] == PINS["mlx"]


def test_requirements_are_followed_through_extras_and_markers() -> None:
    versions, missing = needed([Requirement("mlx-lm"), Requirement("nothing-of-that-name")])
    assert missing == ["nothing-of-that-name"]
    assert versions["transformers"] == metadata.version("transformers")
    assert "pytest" not in versions
    assert needed([Requirement("pytest; sys_platform == 'win32'")]) == ({}, [])
    assert needed([Requirement("uvicorn[standard]")])[0].keys() > needed([Requirement("uvicorn")])[0].keys()


def test_disagreements_name_each_differing_package() -> None:
    versions, _ = needed_here()  # installed versions
    text = constraints(versions)
    assert list(disagreements(text)) == []
    wrong = re.sub(r"^numpy==.*$", "numpy==1.0", text, flags=re.MULTILINE)
    wrong = wrong.replace(f"rich=={versions['rich']}\n", f"pip=={metadata.version('pip')}\nnot-here==1.0\n")
    assert list(disagreements(wrong)) == [
        f"numpy is {versions['numpy']} here and 1.0 in the file",
        f"rich {versions['rich']} is needed and not listed",
        "pip is listed and not needed",
    ]
    elsewhere = wrong.replace(" on ", " on another ", 1)
    assert list(disagreements(elsewhere)) == [f"numpy is {versions['numpy']} here and 1.0 in the file"]


def resolve(*options: str, **env: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "-c", str(FILE), *options]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pip_resolves_the_project_with_the_constraints() -> None:
    """No index is used if the listed versions are installed, because `make` has resolved them before."""
    installed = not any(disagreements(TEXT))
    resolve("--no-build-isolation", ".[dev]", **({"PIP_NO_INDEX": "1"} if installed else {}))


@pytest.mark.full
def test_the_package_index_has_every_constrained_version() -> None:
    resolve("--ignore-installed", *map(str, project_requirements(("dev",))))
