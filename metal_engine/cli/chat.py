"""The conversation of ``metal-engine chat``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metal_engine.llm import LLM
    from metal_engine.sampling_params import SamplingParams


def chat_loop(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Read lines from the user and print answers to them, one conversation, until the user leaves."""
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    while (line := _read_line()) is not None and line.strip() not in ("", "/exit"):
        if line.strip() == "/reset":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for output in llm.stream(llm.tokenizer.apply_chat_template(messages), params):
                answer += output.text
                print(output.text, end="", flush=True)
        except KeyboardInterrupt:
            pass  # ends this answer, not the conversation
        except ValueError as error:
            print(f"[{error}; /reset starts over]", end="")
            messages.pop()
            print()
            continue
        print()
        messages.append({"role": "assistant", "content": answer})


def _read_line() -> str | None:
    """Returns a line from the user; None when there are no more."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
