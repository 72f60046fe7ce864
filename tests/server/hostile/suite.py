"""All hostile requests, and the subset that `make test` sends."""

from __future__ import annotations

from tests.server.hostile.attacks import beside_content, many, texts
from tests.server.hostile.cases import Case
from tests.server.hostile.oddities import broken, contradictions, grammars, routes


def every_case() -> list[Case]:
    return [*texts(), *beside_content(), *many(), *broken(), *contradictions(), *grammars(), *routes()]


# Requests of `make test`: one of each kind. Small requests that caused a 5xx before are in the tests of each API.
QUICK = {
    "/v1/completions: 1000 bytes of special tokens",
    "/v1/chat/completions: 100000 bytes of combining marks",
    "/v1/completions: 15000000 bytes of multi-byte characters",
    "/v1/chat/completions: 1000000 special tokens in a name",
    "/v1/chat/completions: 1000000 special tokens in a variable",
    "/v1/chat/completions: 40000 special tokens in a tool's description",
    "/v1/chat/completions: 30000 unknown names",
    "/v1/messages: 30000 unknown names",
    "/v1/chat/completions: a part with 30,000 unknown fields",
    "/v1/chat/completions: 30,000 messages",
    "/v1/chat/completions: 500000 numbers for messages",
    "/v1/responses: 500000 numbers for input",
    "/v1/chat/completions: 20,000 calls",
    "/v1/completions: 100,000 prompts",
    "/v1/completions: all tokens allowed, n 128",
    "/v1/completions: 16,384 stops",
    "/v1/responses: metadata of 30,000",
    "/v1/completions: a body of depth",
    "/v1/completions: a body of half an escape",
    "/v1/chat/completions: arguments of depth",
    "/v1/chat/completions: a tool of depth",
    "/v1/chat/completions: a schema of a loop",
    "/v1/chat/completions: choices of 15 MB",
    "/detokenize: tokens beyond 64 bits",
    "/api/chat: 30000 unknown names",
    "/api/chat: 30,000 unknown options",
    "/api/chat: arguments of depth",
    "/api/generate: a context of 5,000,000 tokens",
    "/v1/completions: a suffix for 20,000 prompts",
    "HEAD /docs",
    "GET /v1/models/%ff%fe",
    "DELETE /v1/responses/%00",
    "GET /openapi.json",
    "GET /metrics with odd headers",
    "POST /health",
}
