"""Tries aider with a question and an edit, on a repository made for this script.

The demo model is too small to edit code. The attempt succeeds if aider gets responses from the server without an error,
even if aider reports that a response was cut off. A larger model also makes the edit.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tried import KEY, MODEL, URL, expect, run, try_all

FOLDER = Path(tempfile.mkdtemp(prefix="aider-"))
ENV = {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "1"}
SETTINGS = f"- name: openai/{MODEL}\n  extra_params: {{temperature: 0, max_tokens: 300}}\n"
QUIET = ("--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-pretty")


def aider(message: str, *options: str) -> str:
    printed = run(
        *("aider", "--model", f"openai/{MODEL}", *QUIET, "--map-tokens", "0", *options),
        *("--model-settings-file", str(FOLDER / "models.yml")),
        *("--message", message, "hello.py"),
        cwd=FOLDER / "scratch",
        **ENV,
    )
    expect("litellm." not in printed and "Traceback" not in printed, printed[-600:])
    return printed


def ask() -> None:
    printed = aider("What is the capital of France?", "--chat-mode", "ask")
    expect("Paris" in printed and "Tokens:" in printed, printed[-600:])


def edit() -> None:
    printed = aider("Make hello return 'good morning'.", "--edit-format", "whole")
    expect("Tokens:" in printed or "has hit a token limit" in printed, printed[-600:])


def make_repository() -> None:
    repository = FOLDER / "scratch"
    repository.mkdir()
    (FOLDER / "models.yml").write_text(SETTINGS)
    (repository / "hello.py").write_text("def hello():\n    return 'hello'\n")
    git = ("git", "-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run([*git, *command], cwd=repository, check=True)


if __name__ == "__main__":
    make_repository()
    try_all(ask, edit)
