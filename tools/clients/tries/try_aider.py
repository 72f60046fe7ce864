"""aider, one message, on a repository made for it.

The demo model is too small to edit code: what counts is that aider runs, gets its answer from the server and reports
no error. A larger model also makes the edit.
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


def message() -> None:
    repository = FOLDER / "scratch"
    repository.mkdir()
    (FOLDER / "models.yml").write_text(SETTINGS)
    (repository / "hello.py").write_text("def hello():\n    return 'hello'\n")
    git = ("git", "-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run([*git, *command], cwd=repository, check=True)
    printed = run(
        *("aider", "--model", f"openai/{MODEL}", *QUIET, "--edit-format", "whole", "--map-tokens", "0"),
        *("--model-settings-file", str(FOLDER / "models.yml")),
        *("--message", "Make hello return 'good morning'.", "hello.py"),
        cwd=repository,
        **ENV,
    )
    expect("Tokens:" in printed and "Error" not in printed, printed[-600:])


if __name__ == "__main__":
    try_all(message)
