"""Environment variables and arguments that make coding tools use this server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

# Maximum output length that tools request, the same as their own defaults.
_MAX_OUTPUT_TOKENS = 32_000
_PROVIDER = "metal-engine"


@dataclass(frozen=True)
class RunningServer:
    """A server that responds.

    Attributes:
        url: URL without ``/v1``.
        api_key: key that clients send. Any text for a server without keys.
        model: name of the model in requests.
        max_model_len: maximum number of tokens in a request, prompt and output together.
    """

    url: str
    api_key: str
    model: str
    max_model_len: int

    @property
    def max_output_tokens(self) -> int:
        """Maximum number of output tokens to request: a quarter of the context, at most _MAX_OUTPUT_TOKENS.

        The remaining context is for the prompt, which grows in the course of a conversation.
        """
        return min(self.max_model_len // 4, _MAX_OUTPUT_TOKENS)


@dataclass(frozen=True)
class Tool:
    """A coding tool.

    Attributes:
        program: name of its executable.
        install: command that installs the tool.
        environment: function that returns its environment variables for a server.
        arguments: function that returns the first arguments of its command line for a server.
        prompt_tokens: approximate length of its first prompt in tokens; 0 if it is short.
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
        "ANTHROPIC_SMALL_FAST_MODEL",  # older name of ANTHROPIC_DEFAULT_HAIKU_MODEL
        "CLAUDE_CODE_SUBAGENT_MODEL",
    )
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key,
        "ANTHROPIC_API_KEY": "",  # the user's own key is not for this server
        **dict.fromkeys(models, server.model),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.max_output_tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.max_model_len),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # disables the billing line, which the server would remove
    }


def _codex_key(server: RunningServer) -> dict[str, str]:
    return {"OPENAI_API_KEY": server.api_key}


def _codex(server: RunningServer) -> list[str]:
    """Return arguments ``-c NAME=VALUE`` that override Codex's configuration file for one run.

    They also disable features that need OpenAI's own service, and nested agents, whose tools make the prompt a third
    longer.
    """
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
    # TOML strings have the format of JSON strings, but without escaped surrogate pairs.
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
        "AIDER_SHOW_MODEL_WARNINGS": "false",  # otherwise aider asks about unknown models
    }


TOOLS = {
    "claude": Tool("claude", "npm install -g @anthropic-ai/claude-code", _claude, prompt_tokens=20_300),
    "codex": Tool("codex", "npm install -g @openai/codex", _codex_key, _codex, prompt_tokens=6_500),
    "opencode": Tool("opencode", "npm install -g opencode-ai", _opencode, prompt_tokens=7_700),
    "aider": Tool("aider", "python -m pip install aider-install && aider-install", _aider),
}
