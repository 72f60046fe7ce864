"""Reads text, tool calls and errors from streams and whole responses of OpenAI's two APIs and of Anthropic's API."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tools.agents.recorder import Exchange


@dataclass
class Received:
    """Content of a response.

    Attributes:
        text: text for the user.
        reasoning: reasoning.
        calls: name of each tool call, and its arguments as JSON text.
        usage: numbers of prompt tokens and of cached prompt tokens; None if the response has no usage.
        error: error that the response reports; None if there is none.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    error: str | None = None


def is_generation(exchange: Exchange) -> bool:
    """Return True if the request generates text."""
    path = exchange.path.partition("?")[0]
    return exchange.method == "POST" and path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def received(exchange: Exchange) -> Received:
    """Parse the response of a request that generates text. A response that cannot be read has an ``error``."""
    if exchange.status != 200:
        return Received(error=f"status {exchange.status}: {exchange.response.strip()[:300]}")
    path = exchange.path.partition("?")[0]
    read = {"/v1/chat/completions": _chat, "/v1/messages": _messages, "/v1/responses": _responses}[path]
    try:
        if exchange.response.lstrip().startswith("{"):
            return read([json.loads(exchange.response)])
        lines = [line.removeprefix("data: ") for line in exchange.response.splitlines() if line.startswith("data: ")]
        return read([json.loads(line) for line in lines if line != "[DONE]"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Received(error=f"the response cannot be read: {type(error).__name__}: {error}")


def _chat(chunks: list[dict[str, Any]]) -> Received:
    found = Received()
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        if "error" in chunk:
            found.error = json.dumps(chunk["error"])
        if usage := chunk.get("usage"):
            found.usage = usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or choice.get("message") or {}
            found.text += delta.get("content") or ""
            found.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
            for at, call in enumerate(delta.get("tool_calls") or []):
                parts = calls.setdefault(call.get("index", at), ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
    found.calls = [(name, arguments) for _, (name, arguments) in sorted(calls.items())]
    return found


def _messages(events: list[dict[str, Any]]) -> Received:
    found = Received()
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        match event["type"]:
            case "message":  # a whole response
                found.usage = _anthropic_usage(event["usage"])
                blocks = event["content"]
                texts = [json.dumps(block["input"]) if block["type"] == "tool_use" else "" for block in blocks]
            case "message_start":
                found.usage = _anthropic_usage(event["message"]["usage"])
            case "content_block_start":
                blocks.append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                delta = event["delta"]
                texts[event["index"]] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            case "error":
                found.error = json.dumps(event["error"])
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            found.calls.append((block["name"], text or "{}"))
        elif block["type"] == "thinking":
            found.reasoning += block.get("thinking", "") + text
        else:
            found.text += block.get("text", "") + text
    return found


def _anthropic_usage(usage: dict[str, Any]) -> tuple[int, int]:
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached


def _responses(events: list[dict[str, Any]]) -> Received:
    whole = events[0] if events[0].get("object") == "response" else events[-1].get("response", {})
    found = Received()
    if whole.get("status") != "completed":
        return Received(error=f"status {whole.get('status')}: {json.dumps(whole.get('error'))}")
    usage = whole["usage"]
    found.usage = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    for item in whole["output"]:
        if item["type"] == "message":
            found.text += "".join(part.get("text", "") for part in item["content"])
        elif item["type"] == "reasoning":
            found.reasoning += "".join(part.get("text", "") for part in item.get("content") or [])
        elif item["type"] == "function_call":
            space = f"{item['namespace']}__" if item.get("namespace") else ""
            found.calls.append((space + item["name"], item["arguments"]))
    return found
