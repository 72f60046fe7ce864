"""Every error has the right status, OpenAI's shape and the invalid field. The server keeps running."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tools.fixtures.fake_engine import VOCAB_SIZE, Death, generated

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
UNSUPPORTED = "unsupported_parameter"
TOOL = {"type": "function", "function": {"name": "f"}}
USER = [{"role": "user", "content": "hi"}]


def check_error(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["message"] and error["param"] == param and error["code"] == code, error
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


# Invalid values by field.
BAD_VALUES: dict[str, list[Any]] = {
    "prompt": [5, None, [], "", [[]], ["a", 1], [1, 2.5], [[1], ["a"]], [True], [0, VOCAB_SIZE], [-1], ["fine", ""],
        [10**30]],
    "max_tokens": [0, -5, "16", 1.5, True],
    "temperature": [-0.1, "hot", 10**400],
    "top_p": [0, 1.1],
    "top_k": [-2],
    "min_p": [2],
    "seed": [2**63, 2**70, 10**3999],
    "n": [10**30, 0],
    "stop": ["x" * 1_000_000, ["x" * 20] * 50_000, "", [1], {"a": 1}],
    "stop_token_ids": [[5] * 100_000, ["a"], [-(2**63) - 1]],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "logprobs": [21, -1, True],
    "prompt_logprobs": [21],
    "echo": ["yes"],
    "logit_bias": [{"5": 101}, {"five": 1}, {str(VOCAB_SIZE): 1}, [1], {str(2**63): 1}, {"5": 10**400},
        dict.fromkeys(range(30_000), "x")],
    "presence_penalty": [2.5],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, "1"],
    "min_tokens": [-1, 20],
    "allowed_token_ids": [[], [VOCAB_SIZE], [5, 2**31], [5, 2**63], [-(2**63) - 1], [10**4000]],
    "cache_salt": ["s" * 1025],
    "bad_words": [[""], "word"],
    "truncate_prompt_tokens": [0, 10**6],
    "structured_outputs": [{"regex": "("}, {"regex": "a", "choice": ["b"]}, {"regex": 5}, {"json": {"type": 5}},
        {"json": {"$ref": "#"}}, {"json": "{"}, {"choice": []}, {"choice": [5]}, {"grammar": "start: %%"},
        {"regex": "a" * 200_000}, {"magic": 1}],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}],
}  # fmt: skip
UNSUPPORTED_FIELDS = {"best_of": 3, "suffix": "end", "grammar": "root ::= [0-9]", "json_schema": {}}  # fmt: skip
BAD_COMPLETIONS = [
    # body, param, code
    ({}, "prompt", None),
    ({"prompt": "a" * 512}, "prompt", "context_length_exceeded"),
    ({"prompt": "a" * 10_000, "max_tokens": 1}, "prompt", "context_length_exceeded"),
    ({"prompt": "a" * (1 << 20)}, "prompt", "context_length_exceeded"),
    ({"prompt": "a", "max_tokens": 512}, "max_tokens", "context_length_exceeded"),
    ({"prompt": "a", "max_tokens": 10**40}, "max_tokens", "context_length_exceeded"),
    ({"prompt": ["a"] * 100, "n": 100}, "n", None),
    ({"prompt": "a", "stream": True, "stream_options": {"include_usage": 3}}, "stream_options", None),
    ({"prompt": "a", "allowed_token_ids": [98], "stop_token_ids": [98], "min_tokens": 3}, "allowed_token_ids", None),
    ({"prompt": "a", "allowed_token_ids": [98], "bad_words": ["b"]}, "allowed_token_ids", None),
    ({"prompt": "a", "stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 3}, "min_tokens", None),
    ({"prompt": "a", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", None),
    *(({"prompt": "a", field: value}, field, None) for field, values in BAD_VALUES.items() for value in values),
    *(({"prompt": "a", field: value}, field, UNSUPPORTED) for field, value in UNSUPPORTED_FIELDS.items()),
]

BAD_CHAT_VALUES: dict[str, list[Any]] = {
    "messages": [[], "hi", ["hi"], [{"content": "no role"}], [{"role": "wizard", "content": "hi"}], [{"role": "user"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio"}]}]],
    "max_completion_tokens": [0],
    "continue_final_message": [True],
    "add_generation_prompt": ["no"],
    "logprobs": [3],
    "top_logprobs": [3],
    "chat_template_kwargs": [{"tokenize": True}, {"self": 1}, {"raise_exception": 1}],
    "tools": [[{"type": "function"}], [TOOL, TOOL], "f"],
    "tool_choice": ["required", "sometimes"],
    "parallel_tool_calls": ["no"],
    "response_format": ["json_object", {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}],
}  # fmt: skip
UNSUPPORTED_CHAT_FIELDS = {"xtc_probability": 0.5, "logits_processors": ["x"], "moderation": {"model": "x"},
    "plugins": [{"id": "web"}], "prompt": "a", "top_n_sigma": 1.5, "echo": True}  # fmt: skip
BAD_CHATS = [
    ({}, "messages", None),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "a" * (1 << 20)}]}, "messages", "context_length_exceeded"),
    ({"messages": USER, "max_tokens": 600}, "max_tokens", "context_length_exceeded"),
    ({"messages": USER, "max_completion_tokens": 600}, "max_completion_tokens", "context_length_exceeded"),
    ({"messages": [*USER, {"role": "assistant", "content": "I"}], "continue_final_message": True,
      "add_generation_prompt": True}, "continue_final_message", None),
    ({"messages": [*USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, *USER]},
     "messages.function_call", UNSUPPORTED),
    ({"messages": [*USER, {"role": "assistant", "audio": {"id": "x"}}, *USER]}, "messages.audio", UNSUPPORTED),
    ({"messages": [*USER, {"role": "assistant", "content": "I", "prefix": True}]}, "messages.prefix", UNSUPPORTED),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    *(({"messages": USER, field: value}, field, None) for field, values in BAD_CHAT_VALUES.items() for value in values),
    *(({"messages": USER, field: value}, field, UNSUPPORTED) for field, value in UNSUPPORTED_CHAT_FIELDS.items()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [(COMPLETIONS, *case) for case in BAD_COMPLETIONS] + [(CHAT, *case) for case in BAD_CHATS],
)
def test_bad_request(served: Served, path: str, body: dict[str, Any], param: str, code: str | None) -> None:
    num_steps = served.runner.num_steps
    for stream in (False, True):
        more = {} if "stream_options" in body else {"stream": stream}
        error = check_error(served.post(path, more | body), 400, param, code)
        assert param in error["message"] or code == "context_length_exceeded" or "prompt" in error["message"]
    assert served.runner.num_steps == num_steps


BROKEN_BODIES = [
    b"",
    b"{",
    b'{"prompt": "a",}',
    b"[]",
    b'"text"',
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"prompt": "a", "n": "\\udfff"}',
    b'{"prompt": "a", "model": "\\ud800"}',
    b'{"prompt": "a", "stop": "\\uDBFF"}',
    b'{"prompt": "a", "user": "\xed\xa0\x80"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "anything": [-Infinity]}',
    b'{"prompt": "a", "anything": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
]


JSON = {"content-type": "application/json"}


def test_broken_bodies_beside_good_ones(served: Served) -> None:
    """Other requests finish with their own text while a client sends only malformed bodies."""
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(served.post, COMPLETIONS, {"prompt": f"good {i}", "max_tokens": 40}) for i in range(8)]
        for content in BROKEN_BODIES:
            response = httpx.post(served.url + COMPLETIONS, content=content, headers=JSON, timeout=DEADLINE)
            assert response.status_code == 400, (content[:50], response.text)
            assert response.json()["error"]["type"] == "invalid_request_error"
        for i, future in enumerate(good):
            expected = "".join(map(chr, generated(served.tokenizer.encode(f"good {i}"), 40)))
            assert future.result().json()["choices"][0]["text"] == expected


@pytest.mark.parametrize("depth", [50, 400, 2000])
@pytest.mark.parametrize("field", ["prompt", "stop", "anything", "logit_bias", "response_format"])
def test_deep_nesting(served: Served, field: str, depth: int) -> None:
    """JSON as deep as the parser accepts causes no failure in later code."""
    nested = "[" * depth + "]" * depth
    start = '{"max_tokens": 1, ' + ('"prompt": "a", ' if field != "prompt" else "")
    response = httpx.post(served.url + COMPLETIONS, content=f'{start}"{field}": {nested}}}', headers=JSON)
    if response.status_code == 200:
        assert field == "anything", response.text
    else:
        check_error(response, 400, response.json()["error"]["param"])


def test_a_body_that_is_not_json_gets_a_400(served: Served) -> None:
    response = httpx.post(served.url + COMPLETIONS, content=b'{"prompt": oops}', headers=JSON)
    assert "not valid JSON" in check_error(response, 400)["message"]
    response = httpx.post(served.url + COMPLETIONS, data={"prompt": "a"})
    assert "application/json" in check_error(response, 400)["message"]
    body = b'{"prompt": "a"}'
    for encoding, content in (("gzip", gzip.compress(body)), ("GZIP", body)):
        response = httpx.post(served.url + COMPLETIONS, content=content, headers=JSON | {"content-encoding": encoding})
        assert "Content-Encoding 'gzip'" in check_error(response, 415)["message"]
    response = httpx.post(served.url + COMPLETIONS, content=body, headers=JSON | {"content-encoding": "utf-8"})
    assert response.status_code == 200


def test_unknown_model(served: Served) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER, "stream": True})):
        message = check_error(served.post(path, {"model": "other", **body}), 404, "model", "model_not_found")["message"]
        assert "`other`" in message and f"`{MODEL}`" in message
    with pytest.raises(openai.NotFoundError):
        served.client().completions.create(model="other", prompt="a")


def test_unknown_routes(served: Served) -> None:
    check_error(httpx.get(served.url + "/nowhere"), 404)
    response = httpx.get(served.url + COMPLETIONS)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"


def sse_events(text: str) -> list[Any]:
    return [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n") if event != "data: [DONE]"]


def submit_and_hold(served: Served, pool: Any, body: dict[str, Any]) -> Any:
    """Send a request and stop the engine in the step that computes this request alone."""
    served.runner.running.clear()
    pending = pool.submit(served.post, COMPLETIONS, body)
    wait_until(lambda: served.engine.stats.num_running >= 1, "the request to run")
    return pending


@pytest.mark.parametrize(
    ("prompt", "stream"), [("doomed", True), (["doomed", "too"], False), (["doomed", "too"], True)]
)
def test_a_step_that_raises_fails_its_requests_only(
    stream: bool, prompt: str | list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with serve() as served, ThreadPoolExecutor() as pool:
        doomed = submit_and_hold(served, pool, {"prompt": prompt, "max_tokens": 9, "stream": stream})
        num_doomed = 1 if isinstance(prompt, str) else len(prompt)
        wait_until(lambda: served.engine.num_open_requests == num_doomed, "all prompts")
        other = pool.submit(served.post, COMPLETIONS, {"prompt": "other", "max_tokens": 9})
        wait_until(lambda: served.engine.num_open_requests == num_doomed + 1, "the other")
        others = [served.tokenizer.encode(text) for text in ("other", "more")]
        fire = RuntimeError("the GPU is on fire")
        served.runner.error_for = lambda tokens: None if any(tokens[: len(one)] == one for one in others) else fire
        served.runner.running.set()
        if stream:
            response = doomed.result()
            assert response.status_code == 200 and "[DONE]" not in response.text
            error = sse_events(response.text)[-1]["error"]
        else:
            error = check_error(doomed.result(), 500, None, "generation_failed")
        assert error["type"] == "server_error" and "the GPU is on fire" in error["message"]
        expected = "".join(map(chr, generated(served.tokenizer.encode("other"), 9)))
        assert other.result().json()["choices"][0]["text"] == expected
        assert served.post(COMPLETIONS, {"prompt": "more"}).status_code == 200
        assert httpx.get(served.url + "/health").status_code == 200
    assert "step 0 failed" in caplog.text


def test_an_error_within_a_stream_reaches_the_official_client() -> None:
    with serve(step_time=0.002) as served:
        stream = served.client().completions.create(model=MODEL, prompt="a", max_tokens=400, stream=True)
        next(iter(stream))
        served.runner.error_for = lambda tokens: RuntimeError("no more")
        with pytest.raises(openai.APIError, match="no more"):
            list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_engine_death(stream: bool) -> None:
    with serve() as served, ThreadPoolExecutor() as pool:
        doomed = submit_and_hold(served, pool, {"prompt": "a", "max_tokens": 9, "stream": stream})
        queued = pool.submit(served.post, COMPLETIONS, {"prompt": "b"})
        wait_until(lambda: served.engine.num_open_requests == 2, "both")
        served.runner.raise_next = Death("gone")
        served.runner.running.set()
        check_error(queued.result(), 503, None, "engine_dead")
        if stream:
            assert sse_events(doomed.result().text)[-1]["error"]["code"] == "engine_dead"
        else:
            check_error(doomed.result(), 503, None, "engine_dead")
        response = httpx.get(served.url + "/health")
        assert response.status_code == 503 and response.json()["status"] == "error"
        assert "gone" in response.json()["error"]
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
            check_error(served.post(path, {**body, "stream": stream}), 503, None, "engine_dead")
        assert served.engine.num_open_requests == 0
