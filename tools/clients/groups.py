"""The tested clients: packages to install for each, and its script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRIES = Path(__file__).parent / "tries"


@dataclass(frozen=True)
class Client:
    """Client library or program that is tried in its own virtual environment.

    Attributes:
        name: common name of the client.
        package: package on PyPI to install. Its version is reported.
        requirements: further packages on PyPI to install.
        script: name of the script in ``tries/`` that prints a line of JSON for each attempt.
    """

    name: str
    package: str
    script: str
    requirements: tuple[str, ...] = ()

    def folder(self, venvs: Path) -> Path:
        return venvs / self.name


CLIENTS = {
    client.name: client
    for client in (
        Client("openai", "openai", "try_openai.py"),
        Client("anthropic", "anthropic", "try_anthropic.py"),
        Client("ollama", "ollama", "try_ollama.py"),
        Client("langchain", "langchain-openai", "try_langchain.py", ("langchain-anthropic",)),
        Client(
            "llamaindex", "llama-index-llms-openai-like", "try_llamaindex.py", ("llama-index-embeddings-openai-like",)
        ),
        Client("llm", "llm", "try_llm.py"),
        Client("instructor", "instructor", "try_instructor.py", ("openai",)),
        Client("outlines", "outlines", "try_outlines.py", ("openai",)),
        # litellm imports `mcp` for requests with tools, but does not require it.
        Client("litellm", "litellm", "try_litellm.py", ("mcp",)),
        Client("pydantic-ai", "pydantic-ai-slim", "try_pydantic_ai.py", ("pydantic-ai-slim[openai,anthropic]",)),
        Client("lm-eval", "lm-eval", "try_lm_eval.py", ("lm-eval[api]",)),
        Client("aider", "aider-chat", "try_aider.py"),
    )
}
