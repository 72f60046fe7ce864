"""tools.clients: the reports of its scripts match its table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.clients import run
from tools.clients.groups import CLIENTS, TRIES

SCRIPT = """\
import os, sys
sys.path.insert(0, {tries!r})
from tried import MODEL, URL, expect, expect_paris, try_all

def works():
    expect(URL == "http://127.0.0.1:9" and MODEL == "demo", (URL, MODEL))
    expect_paris("Paris.")

def sees_no_keys():
    expect("OPENAI_API_KEY" not in os.environ and "HTTP_PROXY" not in os.environ, sorted(os.environ))

def fails():
    expect_paris("Rome | Milan")

def raises():
    return {{}}["a"]

print("what a client prints")
try_all(works, sees_no_keys, fails, raises)
{end}
"""


def attempts(folder: Path, end: str = "") -> dict[str, str | None]:
    script = folder / "try_it.py"
    script.write_text(SCRIPT.format(tries=str(TRIES), end=end))
    return {one.what: one.error for one in run.attempts_of(Path(sys.executable), script, "http://127.0.0.1:9", "demo")}


def test_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert attempts(tmp_path) == {
        "works": None,
        "sees no keys": None,
        "fails": "AssertionError: got 'Rome | Milan'",
        "raises": "KeyError: 'a'",
    }


def test_a_script_that_dies_has_failed(tmp_path: Path) -> None:
    found = attempts(tmp_path, end="raise SystemExit('gone')")
    assert found.pop("the script") == "exit status 1: gone"
    assert len(found) == 4


@pytest.mark.parametrize("cut", ['{"what": "cut', "é"])
def test_a_script_that_is_stopped_has_failed(cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output can end within a line, and within a character."""
    report = '{"what": "works", "error": null}\n' + cut

    def stopped(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 1800, report.encode()[:-1])

    monkeypatch.setattr(subprocess, "run", stopped)
    assert attempts(tmp_path) == {"works": None, "the script": "1800 s passed"}


@pytest.mark.parametrize(
    ("output", "last"),
    [({"stderr": "a\nno match\n"}, "no match"), ({"output": b"no ensurepip\n"}, "no ensurepip"), ({}, "no output")],
)
def test_an_installation_that_fails(
    output: dict[str, Any], last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module venv gives the output of its own pip as ``output``, in bytes."""

    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "pip", **output)

    monkeypatch.setattr(run, "install", fail)
    found = run.try_client(next(iter(CLIENTS.values())), tmp_path, "http://127.0.0.1:9", "demo")
    assert found.attempts == (run.Attempt("installing", last),)
