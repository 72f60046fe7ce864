"""Ollama's API as its clients use it, in plain JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from metal_engine.server.ollama.routes import API_VERSION
from metal_engine.settings.server_args import ServerArgs
from tests.server.openai.test_infilling import VOCAB, expected, fim_tokenizer
from tests.support.calling import ANSWER, CONFIG, RECORD, USER
from tests.support.raw_http import crowd, post
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import CHAT_TEMPLATE, byte_ids, echo, fake_config, generated, script, tiny_tokenizer

CHAT, GENERATE = "/api/chat", "/api/generate"
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def text_of(served: Served, messages: list[dict[str, Any]], num_tokens: int, **flags: Any) -> str:
    return "".join(map(chr, generated(served.tokenizer.apply_chat_template(messages, **flags), num_tokens)))


def limit(num_tokens: int) -> dict[str, Any]:
    return {"options": {"num_predict": num_tokens}}


def whole(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = served.post(path, {**body, "stream": False})
    assert response.status_code == 200 and response.headers["content-type"] == "application/json", response.text
    answer: dict[str, Any] = response.json()
    assert answer["done"] is True and answer.keys() >= {"model", "created_at", "done_reason"}
    return answer


def lines(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = served.post(path, body)
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson", response.text
    assert response.content.endswith(b"\n") and response.content.isascii()
    told = [json.loads(line) for line in response.text.removesuffix("\n").split("\n")]
    assert [one["done"] for one in told] == [False] * (len(told) - 1) + [True]
    for one in told:
        age = datetime.now(UTC) - datetime.fromisoformat(one["created_at"])
        assert timedelta(0) <= age < timedelta(minutes=10) and one["created_at"].endswith("Z")
        assert (one.keys() >= COUNTS) == one["done"] and ("done_reason" in one) == one["done"]
    return told


def check_counts(answer: dict[str, Any], num_prompt: int, num_output: int) -> None:
    assert (answer["prompt_eval_count"], answer["eval_count"], answer["load_duration"]) == (num_prompt, num_output, 0)
    assert abs(answer["prompt_eval_duration"] + answer["eval_duration"] - answer["total_duration"]) <= 2
    assert answer["prompt_eval_duration"] > 0 and answer["eval_duration"] >= 0 and answer["total_duration"] < 60e9


def test_chat(served: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    text = text_of(served, messages, 20)
    num_prompt = len(served.tokenizer.apply_chat_template(messages))
    body = {"model": MODEL, "messages": messages, **limit(20)}
    answer = whole(served, CHAT, body)
    assert answer["message"] == {"role": "assistant", "content": text} and answer["model"] == MODEL
    assert answer["done_reason"] == "length"
    check_counts(answer, num_prompt, 20)
    *pieces, last = lines(served, CHAT, body)
    assert "".join(piece["message"]["content"] for piece in pieces) == text
    assert last["message"] == {"role": "assistant", "content": ""} and last["done_reason"] == "length"
    check_counts(last, num_prompt, 20)


def test_generate(served: Served) -> None:
    for fields, messages in (
        ({"prompt": "hi"}, USER),
        ({"prompt": "hi", "system": "s", "context": [1, 2]}, [{"role": "system", "content": "s"}, *USER]),
    ):
        text = text_of(served, messages, 12)
        answer = whole(served, GENERATE, {"model": MODEL, **fields, **limit(12)})
        assert answer["response"] == text and "thinking" not in answer and "context" not in answer
        check_counts(answer, len(served.tokenizer.apply_chat_template(messages)), 12)
        *pieces, last = lines(served, GENERATE, {"model": MODEL, **fields, **limit(12)})
        assert "".join(piece["response"] for piece in pieces) == text
        assert (last["response"], last["done_reason"]) == ("", "length")


def test_a_raw_prompt(served: Served) -> None:
    body = {"model": MODEL, "prompt": "<|im_start|>abc", "raw": True, **limit(9)}
    text = "".join(map(chr, generated(served.tokenizer.encode("<|im_start|>abc"), 9)))
    answer = whole(served, GENERATE, body)
    assert answer["response"] == text
    check_counts(answer, 4, 9)
    assert "".join(piece["response"] for piece in lines(served, GENERATE, body)) == text


def test_a_suffix() -> None:
    with serve(config=fake_config(vocab_size=VOCAB), tokenizer=fim_tokenizer()) as served:
        body = {"model": MODEL, "prompt": "def f(", "suffix": "return", **limit(9)}
        assert whole(served, GENERATE, body)["response"] == expected("def f(", "return", 9)
        assert "".join(one["response"] for one in lines(served, GENERATE, body)) == expected("def f(", "return", 9)
        assert served.post("/api/show", {"model": MODEL}).json()["capabilities"] == ["completion", "tools", "insert"]


def test_generation_without_a_positive_num_predict_is_unlimited() -> None:
    """A completion here has 16 tokens by default. Ollama's completions are unlimited."""
    text = "one two three four five six"
    with serve(script(text)) as served:
        for fields in ({}, limit(-1), limit(-2), limit(0), {"options": {"num_predict": None}}):
            for more in ({"prompt": "a", "raw": True}, {"prompt": "a"}):
                answer = whole(served, GENERATE, {"model": MODEL, **more, **fields})
                assert (answer["response"], answer["done_reason"]) == (text, "stop")


def test_tools_and_thinking(calling: Served) -> None:
    body = {"model": MODEL, "messages": USER, "tools": TOOLS, "think": True}
    answer = whole(calling, CHAT, body)
    message = answer["message"]
    assert (message["thinking"], message["content"], answer["done_reason"]) == ("hm", RECORD.content, "stop")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == RECORD.calls
    assert [call["function"]["index"] for call in message["tool_calls"]] == [0, 1]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    pieces = [one["message"] for one in lines(calling, CHAT, body)]
    assert "".join(piece.get("thinking", "") for piece in pieces) == "hm"
    assert "".join(piece["content"] for piece in pieces) == RECORD.content
    calls = [call["function"] for piece in pieces for call in piece.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == RECORD.calls
    # Each piece has one whole call.
    assert all(len(piece["tool_calls"]) == 1 for piece in pieces if "tool_calls" in piece)


def test_thinking_of_a_generation(calling: Served) -> None:
    body = {"model": MODEL, "prompt": "hi"}
    answer = whole(calling, GENERATE, body)
    assert (answer["thinking"], answer["response"]) == ("hm", RECORD.text)
    told = lines(calling, GENERATE, body)
    assert "".join(one.get("thinking", "") for one in told) == "hm"
    assert "".join(one["response"] for one in told) == RECORD.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_incomplete_tool_call_is_returned_as_content(calling: Served, stream: bool) -> None:
    """Clients must not run half a call, so its text becomes content."""
    num_tokens = len(byte_ids(ANSWER[: ANSWER.index('"days"')]))
    body = {"model": MODEL, "messages": USER, "tools": TOOLS, **limit(num_tokens)}
    told = lines(calling, CHAT, body) if stream else [whole(calling, CHAT, body)]
    assert told[-1]["done_reason"] == "length"
    assert not any("tool_calls" in one["message"] for one in told)
    content = "".join(one["message"]["content"] for one in told)
    assert content.startswith(RECORD.content) and '"city"' in content


def test_ollama_messages_and_think_reach_the_template() -> None:
    """The fake model repeats the prompt, so the answer shows what the template received."""
    template = "{% for m in messages %}{{ m | tojson }}|{% endfor %}{{ enable_thinking }}|{{ add_generation_prompt }}"
    template += "{% if tools %}{{ tools }}{% endif %}"  # a template that ignores tools gets calls as text
    call = {"function": {"name": "f", "arguments": {"a": [1, {"b": "é"}]}}}
    messages: list[dict[str, Any]] = [
        *USER,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_name": "f"},
    ]
    reasoning = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "hm")
    seen = [
        *USER,
        {**messages[1], **reasoning, "tool_calls": [{"id": "call_1_0", "type": "function", **call}]},
        {"role": "tool", "content": "r", "name": "f"},
    ]
    with serve(echo, tokenizer=tiny_tokenizer(template), config=CONFIG) as served:
        for think, shown in ((True, "True"), (False, "False"), ("high", "True"), (None, "")):
            body = {"model": MODEL, "messages": messages, "think": think}
            *told, enable_thinking, begins = whole(served, CHAT, body)["message"]["content"].split("|")
            assert [json.loads(one) for one in told] == seen
            assert (enable_thinking, begins) == (shown, "True")


def test_a_prefill_is_continued(served: Served) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well,"}]
    ids = served.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,")
    answer = whole(served, CHAT, {"model": MODEL, "messages": messages, **limit(10)})
    assert answer["message"]["content"] == "".join(map(chr, generated(ids, 10)))


def test_options_reach_the_runner(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3.0, "min_p": 0.1, "seed": 7, "stop": ["zzz"], "num_predict": 4,
        "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4,
        "mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "num_ctx": 8192, "num_gpu": 1,
    }  # fmt: skip
    for path, fields in (
        (CHAT, {"messages": USER}),
        (GENERATE, {"prompt": "a"}),
        (GENERATE, {"prompt": "a", "raw": True}),
    ):
        with caplog.at_level(logging.WARNING):
            whole(served, path, {"model": MODEL, **fields, "options": options, "keep_alive": "5m"})
        seen = served.runner.seen_params[-1]
        assert (seen.temperature, seen.top_p, seen.top_k, seen.min_p, seen.seed) == (0.5, 0.9, 3, 0.1, 7)
        assert (seen.stop, seen.max_tokens) == (("zzz",), 4)
        assert (seen.repetition_penalty, seen.presence_penalty, seen.frequency_penalty) == (1.2, 0.3, 0.4)
    noted = [record.getMessage() for record in caplog.records if "option" in record.getMessage()]
    assert len(noted) == 2 and "num_ctx" in noted[0] and "num_gpu" in noted[1]
    whole(served, CHAT, {"model": MODEL, "messages": USER, "options": {"seed": -1, "num_predict": 1, "top_k": None}})
    assert served.runner.seen_params[-1].seed is None


def test_formats_reach_the_runner(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given in (schema, "json", "", None):
        for path, fields in ((CHAT, {"messages": USER}), (GENERATE, {"prompt": "a"})):
            response = served.post(path, {"model": MODEL, "format": given, "stream": False, **fields, **limit(1)})
            assert response.status_code == 200, response.text
            wanted = served.runner.seen_params[-1].structured_outputs
            if not given:
                assert wanted is None
            else:
                assert wanted is not None and (wanted.json_object if given == "json" else wanted.json == schema)


def test_names(served: Served) -> None:
    """A request without messages or prompt only loads the model."""
    for name in (MODEL, f"{MODEL}:latest"):
        assert whole(served, CHAT, {"model": name, "messages": USER, **limit(1)})["model"] == name
        assert served.post("/api/show", {"name": name}).status_code == 200
        answer = served.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
        assert answer.json().get("model") == MODEL
    for path, fields in ((CHAT, {"messages": USER}), (GENERATE, {"prompt": "a"}), ("/api/show", {})):
        for name in ("other", "other:latest", f"{MODEL}:7b"):
            response = served.post(path, {"model": name, **fields})
            assert response.status_code == 404 and name.removesuffix(":latest") in response.json()["error"]
    for stream in (True, False):
        for path, body in ((CHAT, {"messages": []}), (CHAT, {}), (CHAT, {"keep_alive": 0}), (GENERATE, {})):
            answer = served.post(path, {"model": MODEL, "stream": stream, **body}).json()
            assert (answer["done"], answer["done_reason"]) == (True, "load")
            assert answer.get("message", {"role": "assistant", "content": answer.get("response")})["content"] == ""


# Invalid values of fields and options.
BAD_FIELDS: dict[str, list[Any]] = {
    "messages": ["hi"], "tools": ["f"], "format": ["xml", {"type": 5}, 5], "think": ["very", True, "low"],
    "logprobs": [True], "options": [[1]], "stream": ["no"], "n": [3],
}  # fmt: skip
BAD_OPTIONS: dict[str, list[Any]] = {
    "temperature": [-1, "hot"], "num_predict": [1.5, True, -3], "stop": [[1]], "mirostat": [2], "repeat_penalty": [0],
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "named"), [
    *((CHAT, {"messages": USER, field: value}, field) for field, values in BAD_FIELDS.items() for value in values),
    *((CHAT, {"messages": USER, "options": {name: value}}, f"options.{name}") for name, values in BAD_OPTIONS.items()
      for value in values),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "arguments"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": USER, "options": {"num_predict": 9999}}, "context"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "context"),
    (GENERATE, {"prompt": "a" * 600}, "context"),
    (GENERATE, {"prompt": 5}, "prompt"),
    (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
    (GENERATE, {"prompt": "a", "images": ["aGk="]}, "images"),
    (GENERATE, {"prompt": "a", "raw": True, "system": "s"}, "system"),
    (GENERATE, {"prompt": "a", "raw": True, "think": True}, "think"),
    (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix"),
    (GENERATE, {"prompt": "a", "context": ["b"]}, "context"),
])  # fmt: skip
def test_errors_name_the_invalid_field(served: Served, path: str, body: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        response = served.post(path, {"model": MODEL, "stream": stream, **body})
        assert response.status_code == 400, response.text
        assert response.json().keys() == {"error"} and named in response.json()["error"], response.text


def test_errors_have_ollamas_shape_everywhere(served: Served) -> None:
    for method, path, status in [
        ("GET", CHAT, 405), ("POST", "/api/tags", 405), ("POST", "/api/pull", 404), ("GET", "/api/nothing", 404),
    ]:  # fmt: skip
        response = httpx.request(method, served.url + path)
        assert response.status_code == status and response.json().keys() == {"error"}
    response = httpx.post(served.url + CHAT, content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 400 and "not valid JSON" in response.json()["error"]
    with serve(args=ServerArgs(api_key=("k",))) as guarded:
        response = httpx.get(guarded.url + "/api/tags")
        assert response.status_code == 401 and "API key" in response.json()["error"]
        assert httpx.get(guarded.url + "/api/tags", headers={"authorization": "Bearer k"}).status_code == 200


def test_a_failure_is_the_last_line() -> None:
    """Lines of JSON cannot contain comments, even if the model takes its time."""
    with serve(args=ServerArgs(sse_keep_alive=0.02), step_time=0.05) as served:
        assert len(lines(served, CHAT, {"model": MODEL, "messages": USER, **limit(5)})) >= 5
        served.runner.running.clear()
        body = {"model": MODEL, "messages": USER, **limit(50)}
        with httpx.stream("POST", served.url + CHAT, json=body, timeout=DEADLINE) as response:
            served.runner.error_for = lambda tokens: RuntimeError("broken")
            served.runner.running.set()
            told = [json.loads(line) for line in response.iter_lines()]
        assert told[-1].keys() == {"error"} and told[-1]["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_disconnect_aborts_the_request(served: Served, stream: bool) -> None:
    """The engine is stopped, so that no request can end by itself."""
    served.runner.running.clear()
    body = json.dumps({"model": MODEL, "messages": USER, "stream": stream}).encode()
    with crowd(served.url, 1, post(body=body).replace(b"/v1/completions", CHAT.encode())):
        wait_until(lambda: served.engine.num_open_requests == 1, "the request to come")
    wait_until(lambda: served.engine.num_open_requests == 0, "the request to be aborted")
    served.runner.running.set()


def test_tags_ps_show_and_version_describe_the_served_models(calling: Served) -> None:
    with serve(names=("demo", "org/m:q4"), config=CONFIG, args=ServerArgs(enable_auto_tool_choice=False)) as served:
        tags = httpx.get(served.url + "/api/tags").json()["models"]
        assert [one["name"] for one in tags] == [one["model"] for one in tags] == ["demo:latest", "org/m:q4"]
        (first, second) = tags
        assert first["digest"] != second["digest"] and len(first["digest"]) == 64
        assert first["details"]["family"] == "fake" and first["details"]["quantization_level"] == "F32"
        datetime.fromisoformat(first["modified_at"])
        for name in (one["name"] for one in tags):
            assert served.post(CHAT, {"model": name, "messages": USER, "stream": False, **limit(1)}).status_code == 200
        loaded = httpx.get(served.url + "/api/ps").json()["models"]
        assert [one["name"] for one in loaded] == ["demo:latest", "org/m:q4"]
        assert loaded[0]["context_length"] == 4096 and loaded[0]["size_vram"] == 0
        show = served.post("/api/show", {"model": "demo"}).json()
        assert show["template"] == CHAT_TEMPLATE and show["capabilities"] == ["completion"]
        assert (
            show["model_info"]["general.architecture"] == "fake" and show["model_info"]["fake.context_length"] == 4096
        )
        assert httpx.get(served.url + "/api/version").json() == {"version": API_VERSION}
        for path in ("/api/tags", "/api/ps", "/api/version"):
            head = httpx.head(served.url + path)
            assert (head.status_code, head.content) == (200, b"")
    assert calling.post("/api/show", {"model": MODEL}).json()["capabilities"] == ["completion", "tools", "thinking"]
    response = calling.post("/api/pull", {"model": "qwen3:8b"})
    assert response.status_code == 404 and "`metal-engine pull OWNER/NAME`" in response.json()["error"]


def test_bodies_need_no_type(served: Served) -> None:
    """LiteLLM and curl send none. Requests that a web page can send need JSON's."""
    body = json.dumps({"messages": USER, "options": {"num_predict": 1}, "stream": False, "max_tokens": 1}).encode()
    forms = ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data")

    def status(path: str = CHAT, **headers: str) -> int:
        return httpx.post(served.url + path, content=body, headers=headers, timeout=DEADLINE).status_code

    assert status() == status(**{"content-type": "application/json", "origin": "null"}) == 200
    for kind in (*forms, ""):
        assert status(**{"content-type": kind}) == 200
    for origin in ("null", "https://page.example"):
        assert status(origin=origin) == 400
        for kind in forms:
            assert status(**{"content-type": kind, "origin": origin}) == 400
    for headers in ({}, {"content-type": forms[0]}):
        assert status("/v1/chat/completions", **headers) == 400
