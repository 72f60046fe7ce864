"""The Homebrew formula: its syntax, its files, and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.homebrew import CONSTRAINTS, PYTHON, Wheel, dependencies, formula

PINS = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))
NAMES = ("mlx", "mlx-metal", "mlx-lm", "jinja2")
OWN = Wheel("metal-engine", "https://example.org/v0.1.0/metal_engine-0.1.0-py3-none-any.whl", "0" * 64)


def item(name: str, **changes: Any) -> dict[str, Any]:
    """Return an entry of pip's report for a package of constraints.txt."""
    url = f"https://files.pythonhosted.org/packages/a/{name.replace('-', '_')}-{PINS.get(name, '1')}-py3-none-any.whl"
    info = {"url": url, "archive_info": {"hashes": {"sha256": "ab" * 32}}}
    return {"metadata": {"name": name, "version": PINS.get(name, "1")}, "download_info": {**info, **changes}}


def made() -> str:
    own = item("metal_engine", url="file:///dist/metal_engine.whl")
    return formula(
        OWN, "0.1.0", "https://example.org/metal-engine", dependencies({"install": [own, *map(item, NAMES)]})
    )


def test_formula_lists_each_dependency_once_with_the_constrained_version() -> None:
    text = made()
    assert re.findall(r'resource "(.*)" do', text) == sorted(NAMES)
    for name in NAMES:
        assert f"/{name.replace('-', '_')}-{PINS[name]}-" in text
    assert text.count("using: :nounzip") == len(NAMES) + 1 and text.count('sha256 "') == len(NAMES) + 1
    assert f'depends_on "python@{PYTHON}"' in text and "arch: :arm64" in text


def ruby_problem(text: str) -> str | None:
    """Return the first problem of a formula's blocks and strings; None if there is none.

    Covers the constructs of the formula, for machines without Ruby.
    """
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r'"[^"]*"', "''", line).split("#", 1)[0]
        if code.count('"') % 2:
            return f"line {number}: a string does not end"
        depth += len(re.findall(r"^\s*(?:class|def)\b|\bdo\b(?=\s*(?:\||$))", code))
        depth -= len(re.findall(r"^\s*end\b", code))
        if depth < 0 or code.count("(") != code.count(")") or code.count("[") != code.count("]"):
            return f"line {number}: {line.strip()}"
    return None if depth == 0 else f"{depth} blocks do not end"


def test_the_syntax(tmp_path: Path) -> None:
    text = made()
    assert ruby_problem(text) is None
    if ruby := shutil.which("ruby"):
        path = tmp_path / "metal-engine.rb"
        path.write_text(text)
        assert subprocess.run([ruby, "-c", str(path)], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("old", "new"), [("  end\n\n  test do", "  test do"), ('homepage "', "homepage "), ("*Dir[", "*Dir"), ("end\n", "")]
)
def test_the_check_of_the_syntax_sees_faults(old: str, new: str) -> None:
    assert old in made() and ruby_problem(made().replace(old, new, 1)) is not None


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (item("mlx", url="file:///opt/mlx-1-py3-none-any.whl"), "not a wheel on the web"),
        (item("mlx", url="https://example.org/mlx-1.tar.gz"), "not a wheel on the web"),
        (item("mlx", url='https://example.org/"+x+".whl'), "not a wheel on the web"),
        (item("mlx", archive_info={}), "no SHA-256"),
    ],
)
def test_formula_refuses_dependencies_without_a_web_wheel_or_sha256(entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        dependencies({"install": [entry]})


def test_text_that_ruby_would_interpret_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be in a formula"):
        formula(OWN, "0.1.0", 'https://example.org/#{system("x")}', [])
