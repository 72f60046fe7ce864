"""Small invalid requests: contradictions, broken JSON, odd numbers, grammars, paths and methods."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from tests.grammars.hostile import NESTED_REPEATS, PATTERNS
from tests.server.hostile.attacks import CHATS, GENERATING, calls, tool
from tests.server.hostile.cases import Case, attack, raw
from tests.support.fillers import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    ENDPOINTS,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
    TOKENIZE,
    USER,
    with_field,
)

# --- numbers, texts and JSON that no client means ----------------------------------------------------------

NUMBERS = ("1e400", "-1e400", "1e-400", "9" * 4_000, "9" * 100_000, "-0.0", "0.1" + "0" * 100_000, "NaN", "-Infinity")
NUMBER_FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens", "presence_penalty",
    "repetition_penalty", "truncate_prompt_tokens", "prompt_logprobs", "logprobs", "priority",
)  # fmt: skip
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "spaces": b" " * 1_000_000,
    "null": b"null",
    "a list": b"[" + b"1," * 40_000 + b"1]",
    "a text": b'"' + b"a" * 1_000_000 + b'"',
    "no JSON": b"{" * 1_000_000,
    "depth": b"[" * 1_000_000 + b"]" * 1_000_000,
    "objects within objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "half a body": b'{"prompt": "a", "x": [' + b"1," * 500_000,
    "half an escape": b'{"prompt": "\\ud83d"}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "UTF-32": '{"prompt": "a"}'.encode("utf-32"),
    "a byte order mark": b"\xef\xbb\xbf" + b'{"prompt": "a"}',
    "CESU-8": b'{"prompt": "\xed\xa0\xbd\xed\xb8\x80"}',
    "a million escapes": b'{"prompt": "' + b"\\u0000" * 1_000_000 + b'"}',
    "a million surrogates": b'{"a": "' + b"\\ud83d\\ude00" * 500_000 + b'\\ud800"}',
    "pickle": b"\x80\x04\x95" + bytes(range(256)) * 100,
    "a million commas": b'{"prompt": [' + b"," * 1_000_000 + b"]}",
    "a million colons": b'{"prompt"' + b":" * 1_000_000 + b"}",
    "a million quotes": b'{"prompt": ' + b'"' * 1_000_000 + b"}",
    "a million minus signs": b'{"prompt": [' + b"-" * 1_000_000 + b"]}",
}


def _shown(number: str) -> str:
    return number if len(number) < 10 else f"{number[:3]}... of {len(number)} digits"


def broken() -> list[Case]:
    # An invalid number may be refused or accepted. A body that is not JSON must be refused.
    cases = [
        raw(f"{name} is {_shown(number)}", COMPLETIONS, partial(with_field, COMPLETIONS, name, number), None)
        for name in NUMBER_FIELDS
        for number in NUMBERS
    ]
    cases += [raw(f"a body of {name}", COMPLETIONS, lambda body=body: body, None) for name, body in BODIES.items()]
    cases += [raw("a body of depth", endpoint, lambda: BODIES["depth"]) for endpoint in ENDPOINTS[1:]]
    cases += [raw("a body of nothing", endpoint, lambda: b"") for endpoint in ENDPOINTS[1:]]
    # Another content type makes the body a text. Another charset changes nothing.
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
        "application/json; q=\x80",
    ):
        cases.append(raw(f"a body of {kind!r}", CHAT, lambda: b'{"messages": []}', 400, content_type=kind))
    cases.append(raw("a body that is compressed", CHAT, lambda: b"\x1f\x8b\x08", 415, content_encoding="gzip"))
    return cases


# --- what contradicts itself, or the model -----------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def contradictions() -> list[Case]:
    deep_arguments = "[" * 100_000 + "]" * 100_000
    long_name = "n" * 1_000_000
    kwargs = ("self", "messages", "tokenize", "chat_template", "conversation", "return_dict")
    return [
        attack("only the end allowed, and 3 tokens at least", COMPLETIONS, 400, allowed_token_ids=[2], min_tokens=3,
               max_tokens=5),
        *(attack(f"the template's {name}", CHAT, 400, chat_template_kwargs={name: 1}) for name in kwargs),
        attack("the template's self", TOKENIZE, 400, prompt=None, messages=USER, chat_template_kwargs={"self": 1}),
        attack("30,000 template variables", CHAT,
               chat_template_kwargs=lambda: {f"k{i}": i for i in range(30_000)}),
        attack("template variables that hide its functions", CHAT,
               chat_template_kwargs={"raise_exception": 1, "range": 1, "namespace": "a", "loop": [], "tojson": 0}),
        attack("both ends of a prompt", CHAT, 400, continue_final_message=True, add_generation_prompt=True),
        attack("two formats", CHAT, 400, response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        attack("two grammars", CHAT, 400, structured_outputs={"regex": "a", "choice": ["a"]}),
        attack("a grammar and allowed tokens", CHAT, 400, structured_outputs={"regex": "a"}, allowed_token_ids=[5]),
        attack("arguments of depth", CHAT, messages=calls(1, deep_arguments)),
        attack("arguments of a number", CHAT, messages=calls(1, "9" * 100_000)),
        attack("arguments that are no object", CHAT, messages=calls(1, "1e400")),
        attack("a call of a list", CHAT, messages=[*USER, {"role": "assistant", "tool_calls": [{"function": []}]}]),
        attack("a tool of depth", CHAT, tools=[tool(0, parameters=nested(400))]),
        attack("a tool of a long name", CHAT, 400, tools=[tool(0, name=long_name)]),
        attack("a tool that is not there", CHAT, 400, tools=[tool(0)],
               tool_choice={"type": "function", "function": {"name": long_name}}),
        attack("input of depth", MESSAGES, messages=[*USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "f", "input": nested(400)}]}, *USER]),
        attack("a schema of depth for a tool", MESSAGES, tools=[{"name": "f", "input_schema": nested(400)}]),
        attack("a model of a long name", CHAT, 404, model=long_name),
        attack("a role of a long name", CHAT, 400, messages=[{"role": long_name, "content": "a"}]),
        attack("a part of a long type", CHAT, 400, messages=[{"role": "user", "content": [{"type": long_name}]}]),
        attack("an unknown parameter of a long name", CHAT, 200, **{long_name: 1}),
        attack("an effort of a long name", CHAT, 400, reasoning_effort=long_name),
        attack("a salt of a million characters", CHAT, 400, cache_salt="s" * 1_000_000),
        attack("an answer to a long name", RESPONSES, 404, previous_response_id=long_name),
        attack("an item of a long type", RESPONSES, 400, input=[{"type": long_name}]),
        attack("an item of a wrong type", RESPONSES, 400, input=[{"type": [1], "content": {"a": 1}}]),
        attack("in the background", RESPONSES, 200, background=True),
        attack("a block of a wrong type", MESSAGES, 400, system=[{"type": ["text"], "text": 1}]),
        attack("a block of nothing", COUNT_TOKENS, 400, messages=[{"role": "user", "content": [{}]}]),
        attack("arguments of depth", OLLAMA_CHAT, messages=[*USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": nested(400)}}]}, *USER]),
        attack("a format of depth", OLLAMA_CHAT, format=nested(400)),
        attack("a format of patterns", OLLAMA_CHAT, 400, format=PATTERNS["json"]),
        attack("a tool of depth", OLLAMA_CHAT, tools=[tool(0, parameters=nested(400))]),
        attack("a model of a long name", OLLAMA_CHAT, 404, model=long_name),
        attack("an option of a long name", OLLAMA_CHAT, 200, options={long_name: 1, "num_predict": 2}),
        attack("thinking of a long name", OLLAMA_CHAT, 400, think=long_name),
        attack("tokens beyond 64 bits", OLLAMA_GENERATE, 400, options={"num_predict": 10**30}),
        attack("a temperature of 1e400", OLLAMA_GENERATE, options={"temperature": 10**400}),
        attack("tokens beyond the vocabulary", DETOKENIZE, 400, tokens=[10**18]),
        attack("tokens below zero", DETOKENIZE, 400, tokens=[-1]),
        attack("tokens beyond 64 bits", DETOKENIZE, 400, tokens=[10**30]),
        attack("stop tokens beyond 64 bits", COMPLETIONS, stop_token_ids=[10**30]),
        *(attack("allowed tokens beyond 64 bits", one, 400, allowed_token_ids=[5, 2**63]) for one in GENERATING),
        attack("allowed tokens beyond the vocabulary", COMPLETIONS, 400, allowed_token_ids=[5, 2**62]),
        attack("biases of odd digits", COMPLETIONS, logit_bias={"٣": 1, "1_0": 1}),
        attack("no digits for a bias", COMPLETIONS, 400, logit_bias={"²": 1}),
        attack("an empty stop", COMPLETIONS, 400, stop=[""]),
        attack("KV of nobody", COMPLETIONS, kv_transfer_params={"do_remote_prefill": True, "do_remote_decode": True}),
        attack("a priority beyond 64 bits", COMPLETIONS, priority=10**30),
        attack("a negative priority", COMPLETIONS, 200, priority=-(2**62)),
        *(attack("a text that is half a character", endpoint, 400, user="a", **{
            "input" if endpoint is RESPONSES else "messages" if endpoint in CHATS else "prompt": [
                {"role": "user", "content": "\ud800"}]}) for endpoint in GENERATING),
    ]  # fmt: skip


# --- grammars ----------------------------------------------------------------------------------------------

REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2_500)} | {"d2500": {"type": "integer"}}
SCHEMAS: dict[str, Any] = {
    "of 400 levels": nested(400),
    "of 400 objects within objects": {"type": "object", "properties": nested(400)},
    "of itself": {"$ref": "#"},
    "of another machine": {"$ref": "http://127.0.0.1:1/schema.json"},
    "of a loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "of nothing": {"enum": []},
    "of two types at once": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "of a wrong pattern": {"type": "string", "pattern": "("},
    "of a look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "of 3,000 properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3_000)}},
    "of 3,000 alternatives": {"anyOf": [{"const": f"c{i}"} for i in range(3_000)]},
    "of many digits": {"type": "integer", "minimum": 10**300, "maximum": 10**301},
    "of a million items": {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000},
    # A reference to a reference: code that follows references recursively can run out of stack.
    "of 2,500 references": {"$ref": "#/$defs/d0", "$defs": REFERENCES},
    "of a long text": {"type": "string", "minLength": 1_000_000_000},
}
REGEXES = {
    "of 15,000 loops within one": NESTED_REPEATS["regex"],
    "of counts of counts": "(((a{100}){100}){100}){100}",
    "of classes": "[\\p{L}--a]{1,1000}" * 50,
    "of alternatives": "|".join(f"word{i}" for i in range(10_000)),
}
GRAMMARS = {
    "of itself": "start: start",
    "of nobody": "start: nobody",
    "of ambiguity": "start: a\na: a a | a a a | \"x\" | ",
    # The compiler follows the rules recursively until its stack overflows, which ends the process.
    "of 5,000 rules": "start: r0\n" + "".join(f"r{i}: r{i + 1} | \"x\"\n" for i in range(5_000)) + 'r5000: "x"',
    "of brackets": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
}  # fmt: skip


def grammars() -> list[Case]:
    cases = [attack(f"a schema {name}", CHAT, structured_outputs={"json": schema}) for name, schema in SCHEMAS.items()]
    cases += [attack(f"a regex {name}", CHAT, structured_outputs={"regex": regex}) for name, regex in REGEXES.items()]
    cases += [attack(f"a grammar {name}", CHAT, structured_outputs={"grammar": g}) for name, g in GRAMMARS.items()]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": PATTERNS["json"]}}
    tools = [tool(0, parameters={"type": "object", "properties": {"a": PATTERNS["json"]}})]
    return [
        *cases,
        attack("a schema of patterns", CHAT, 400, structured_outputs=PATTERNS),
        attack("a format of patterns", CHAT, 400, response_format=form),
        attack("a tool of patterns", CHAT, 400, tools=tools, tool_choice="required"),
        attack("1,024 choices", CHAT, 200, structured_outputs={"choice": [f"choice {i}" for i in range(1_024)]}),
        attack("2,000 choices", CHAT, 400, structured_outputs={"choice": ["a"] * 2_000}),
        attack("choices of 15 MB", CHAT, 400, structured_outputs={"choice": ["a" * 15_000_000]}),
        attack("a schema of 15 MB", CHAT, 400, structured_outputs={"json": {"title": "a" * 15_000_000}}),
        attack("a schema as text that is none", CHAT, 400, structured_outputs={"json": "{" * 100_000}),
        attack("30,000 unknown structures", CHAT, 400, structured_outputs=lambda: {f"k{i}": 0 for i in range(30_000)}),
        attack("a format of 30,000 names", CHAT, 400, response_format=lambda: {f"k{i}": 0 for i in range(30_000)}),
        attack("white space of white space", CHAT,
               structured_outputs={"json_object": True, "whitespace_pattern": "( *)*" * 1_000}),
    ]  # fmt: skip


# --- paths and methods -------------------------------------------------------------------------------------


def routes() -> list[Case]:
    long = "a" * 60_000
    gets = {
        "/health": 200, "/ready": 200, "/version": 200, "/metrics": 200, "/v1/models": 200, "/v1/models/tiny": 200,
        "/openapi.json": 200, "/docs": 200, "/redoc": 200,
        "/v1/models/nobody": 404, f"/v1/models/{long}": None, "/v1/models/..%2f..%2fetc%2fpasswd": 404,
        "/v1/models/%00": 404, "/v1/models/%ff%fe": 404, "/v1/models/%F0%9F%98%80": 404, "/v1/models/": None,
        "/v1/responses/nobody": 404, f"/v1/responses/{long}": None, "/v1/responses/%E2%80%AE": 404,
        "/health/": None, "//health": None, "/health?a=1&a=2": 200, f"/health?{long}": None, "/%2e%2e/health": None,
        "/v1": 404, "/": 200, "/favicon.ico": 404, "/.git/config": 404, "/v1/completions": 405, "/tokenize": 405,
        "/tokenizer_info": 200, "/api/tags": 200, "/api/ps": 200, "/api/version": 200, "/api/chat": 405,
        "/api/pull": 405, "/api/": 404, "/api": 404, "/v1/chat/completions/": None,
        "/V1/Completions": 404, f"/{'a/' * 30_000}": None,
    }  # fmt: skip
    cases = [Case(f"GET {path[:60]}", "GET", path, status=status) for path, status in gets.items()]
    for path in ("/v1/responses/nobody", "/v1/responses/%00", f"/v1/responses/{'a' * 3_000}"):
        cases.append(Case(f"DELETE {path[:60]}", "DELETE", path, status=404))
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        cases.append(Case(f"{method} /v1/chat/completions", method, "/v1/chat/completions", lambda: b"{}", 405))
    cases += [Case(f"HEAD {path}", "HEAD", path, status=200) for path in ("/", "/health", "/docs", "/v1/models")]
    for path in ("/health", "/metrics", "/v1/models", "/openapi.json"):
        cases.append(Case(f"POST {path}", "POST", path, lambda: b"{}" * 100_000, 405))
        cases.append(Case(f"GET {path} with a body", "GET", path, lambda: b"a" * 1_000_000, 200))
    headers = {"x-request-id": "a" * 10_000, "accept": "*/*;q=" + "9" * 10_000, "user-agent": "%n%s\\x00"}
    cases.append(Case("GET /metrics with odd headers", "GET", "/metrics", status=200, headers=headers))
    cases.append(Case("GET /metrics with 60 headers", "GET", "/metrics", status=200,
                      headers={f"x-{i}": "a" for i in range(60)}))  # fmt: skip
    embeddings = lambda: json.dumps({"input": ["a"] * 100_000}).encode()  # noqa: E731
    for body in (embeddings, lambda: b"", lambda: BODIES["depth"]):
        cases.append(Case(f"embeddings of {len(body())} bytes", "POST", "/v1/embeddings", body, 400))
    return cases
