"""What coding tools have to be told to use this server: variables of their environment, and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

# What tools may ask an answer to have at most, as their own defaults are.
_MAX_OUTPUT_TOKENS = 32_000
_PROVIDER = "metal-engine"


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: without ``/v1``.
        api_key: what clients send; any text for a server without keys.
        model: the name that its answers carry.
        max_model_len: tokens of a request, prompt and output.
    """

    url: str
    api_key: str
    model: str
    max_model_len: int

    @property
    def max_output_tokens(self) -> int:
        """What to leave an answer: the prompt, which grows, gets the rest."""
        return min(self.max_model_len // 4, _MAX_OUTPUT_TOKENS)


@dataclass(frozen=True)
class Tool:
    """A coding tool.

    Attributes:
        program: what it is started with.
        install: how it is installed: a command.
        environment: its variables, for a server.
        arguments: what its command line begins with, for a server.
        prompt_tokens: about what its first prompt takes; 0 for little.
    """

    program: str
    install: str
    environment: Callable[[RunningServer], dict[str, str]]
    arguments: Callable[[RunningServer], list[str]] = lambda server: []
    prompt_tokens: int = 0


def _claude(server: RunningServer) -> dict[str, str]:
    models = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",  # what older versions call the last one
        "CLAUDE_CODE_SUBAGENT_MODEL",
    )
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key,
        "ANTHROPIC_API_KEY": "",  # the user's own is not for this server
        **dict.fromkeys(models, server.model),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.max_output_tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.max_model_len),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # the billing line, which the server would drop
    }


def _codex_key(server: RunningServer) -> dict[str, str]:
    return {"OPENAI_API_KEY": server.api_key}


def _codex(server: RunningServer) -> list[str]:
    """Settings as its file has them, for this run alone. Left out is what OpenAI's own service does, and agents below
    agents, whose tools make the prompt a third longer."""
    provider = f"model_providers.{_PROVIDER}"
    texts = {
        "model": server.model,
        "model_provider": _PROVIDER,
        f"{provider}.name": _PROVIDER,
        f"{provider}.base_url": f"{server.url}/v1",
        f"{provider}.env_key": "OPENAI_API_KEY",
        f"{provider}.wire_api": "responses",
        "web_search": "disabled",
    }
    # A TOML text is written as JSON's, but it has no pairs of escaped surrogates.
    values = {name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()}
    values["model_context_window"] = str(server.max_model_len)
    values |= {f"features.{name}": "false" for name in ("apps", "image_generation", "multi_agent", "plugins")}
    return [argument for name, value in values.items() for argument in ("-c", f"{name}={value}")]


def _opencode(server: RunningServer) -> dict[str, str]:
    limit = {"context": server.max_model_len, "output": server.max_output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _PROVIDER,
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.api_key},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    model = f"{_PROVIDER}/{server.model}"
    config = {"provider": {_PROVIDER: provider}, "model": model, "small_model": model}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _aider(server: RunningServer) -> dict[str, str]:
    return {
        "OPENAI_API_BASE": f"{server.url}/v1",
        "OPENAI_API_KEY": server.api_key,
        "AIDER_MODEL": f"openai/{server.model}",
        "AIDER_SHOW_MODEL_WARNINGS": "false",  # it asks about models that it does not know
    }


TOOLS = {
    "claude": Tool("claude", "npm install -g @anthropic-ai/claude-code", _claude, prompt_tokens=23_000),
    "codex": Tool("codex", "npm install -g @openai/codex", _codex_key, _codex, prompt_tokens=6_500),
    "opencode": Tool("opencode", "npm install -g opencode-ai", _opencode, prompt_tokens=7_700),
    "aider": Tool("aider", "python -m pip install aider-install && aider-install", _aider),
}
