"""Functions shared by the scripts of this folder. They run in a client's environment and use only Python's library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

URL = os.environ.get("SERVER_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SERVER_MODEL", "demo")
KEY = "none"

QUESTION = "What is the capital of France?"
CITY_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PERSON_TEXT = "Extract the person: Anna is 31 years old."


def try_all(*attempts: Callable[[], object]) -> None:
    """Run each function and print a line of JSON with its name and its error, or None."""
    for attempt in attempts:
        try:
            attempt()
            error = None
        except Exception as raised:  # noqa: BLE001
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"what": attempt.__name__.replace("_", " "), "error": error}), flush=True)


def expect(condition: object, what: object) -> None:
    """Raise AssertionError if ``condition`` is false. ``what`` is the actual result, which the message shows."""
    if not condition:
        raise AssertionError(f"got {str(what)[:300]!r}")


def expect_paris(text: object) -> None:
    expect(isinstance(text, str) and "Paris" in text, text)


def run(*command: str, cwd: Path | None = None, **env: str) -> str:
    """Run a program of this environment and return its output, errors included.

    Raises:
        AssertionError: the program failed. The message has the end of its output.
        subprocess.TimeoutExpired: the program took longer than 540 s.
    """
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run(
        [str(program), *command[1:]],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    expect(done.returncode == 0, done.stdout[-600:])
    return done.stdout
