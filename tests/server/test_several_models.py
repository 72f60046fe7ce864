"""Several models behind one server: model selection by name in each API, load comments in streams, and more."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from metal_engine.model_pool.model_entry import ModelState
from metal_engine.settings.server_args import ServerArgs
from tests.support.serving import DEADLINE, wait_until
from tests.support.several_models import MEMORY_FOR_TWO, FakeModel, SeveralFakes, events, serve_models
from tools.fixtures.fake_engine import byte_ids


@pytest.fixture
def several() -> Iterator[SeveralFakes]:
    models = {name: FakeModel(salt) for salt, name in enumerate(["org/a", "b", "c"])}
    with serve_models({name: one.source for name, one in models.items()}, MEMORY_FOR_TWO) as served:
        made = SeveralFakes(served, models)
        yield made
        for one in models.values():
            one.gate.set()
        made.wait_until_idle()


MESSAGES = [{"role": "user", "content": "hello"}]


def test_every_api_picks_by_name(several: SeveralFakes) -> None:
    post = several.served.post
    for name in ("b", "c", "org/a"):
        told = several.chat_text(name, "hello")
        several.check(name, "once upon")
        chat = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        answer = post("/v1/chat/completions", chat).json()
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == (name, told)
        answer = post("/v1/messages", chat).json()
        assert (answer["model"], answer["content"][0]["text"]) == (name, told)
        response = {"model": name, "input": "hello", "max_output_tokens": 8, "temperature": 0}
        answer = post("/v1/responses", response).json()
        assert (answer["model"], answer["output"][0]["content"][0]["text"]) == (name, told)
        ollama = {"model": name, "messages": MESSAGES, "stream": False}
        answer = post("/api/chat", {**ollama, "options": {"num_predict": 8, "temperature": 0}}).json()
        assert (answer["model"], answer["message"]["content"]) == (name, told)
        generate = {"model": f"{name}:latest", "prompt": "hello", "raw": True, "options": {"num_predict": 8}}
        lines = post("/api/generate", {**generate, "options": {"num_predict": 8, "temperature": 0}}).text.splitlines()
        assert "".join(json.loads(line)["response"] for line in lines) == several.text(name, "hello")
        answer = post("/v1/embeddings", {"model": name, "input": "hello"}).json()
        assert answer["model"] == name and len(answer["data"]) == 1
        assert len(post("/api/embed", {"model": name, "input": "hello"}).json()["embeddings"]) == 1
        assert post("/tokenize", {"model": name, "prompt": "abc"}).json()["tokens"] == byte_ids("abc")
        assert post("/detokenize", {"model": name, "tokens": byte_ids("abc")}).json() == {"prompt": "abc"}
        assert post("/v1/messages/count_tokens", {"model": name, "messages": MESSAGES}).json()["input_tokens"] > 5
        assert several.served.get(f"/tokenizer_info?model={name}").json()["eos_token"] == "<|im_end|>"
        rerank = {"model": name, "query": "a", "documents": ["b"]}
        assert "neither a reranker" in post("/v1/rerank", rerank).json()["error"]["message"]
        several.wait_until_idle()
        assert several.served.states()[name] == "loaded"
    assert sorted(several.served.states().values()) == ["loaded", "loaded", "unloaded"]


def test_a_request_without_a_name_gets_the_first(several: SeveralFakes) -> None:
    answer = several.served.post("/v1/completions", {"prompt": "x", "max_tokens": 8, "temperature": 0}).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("org/a", several.text("org/a", "x"))


def test_unknown_names(several: SeveralFakes) -> None:
    body = {"model": "d", "prompt": "x", "messages": MESSAGES, "input": "x", "max_tokens": 1, "stream": True}
    for path in ("completions", "chat/completions", "responses", "embeddings", "messages"):
        answer = several.served.post(f"/v1/{path}", body)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["message"] == "The model `d` does not exist. This server has `org/a`, `b`, `c`."
        assert error.get("code") == (None if path == "messages" else "model_not_found")
    assert several.served.get("/v1/models/d").status_code == 404
    assert set(several.served.states().values()) == {"unloaded"}


def test_a_stream_says_that_its_model_is_being_loaded(several: SeveralFakes) -> None:
    several.check("b", "first")
    model = several.models["org/a"]
    model.gate.clear()
    body = {"model": "org/a", "prompt": "once", "max_tokens": 8, "temperature": 0, "stream": True}
    with httpx.stream("POST", several.served.url + "/v1/completions", json=body, timeout=DEADLINE) as stream:
        lines = stream.iter_lines()
        assert stream.status_code == 200 and next(lines) == ': loading "org/a"'
        for i in range(10):  # other models are served during the load
            several.check("b", f"meanwhile {i}")
        assert several.served.states()["org/a"] == "loading"
        model.gate.set()
        rest = "\n".join(lines)
    assert {one["id"] for one in events(rest)} == {stream.headers["x-generation-id"]}
    assert "".join(one["choices"][0]["text"] for one in events(rest)) == several.text("org/a", "once")
    # The stream of a loaded model starts like any other stream.
    text = several.served.post("/v1/completions", body).text
    assert "loading" not in text and text.startswith("data: ")


def test_what_goes_wrong_in_such_a_stream_is_its_last_event(several: SeveralFakes) -> None:
    bad = {"model": "b", "max_tokens": 8, "top_p": 7, "stream": True}
    text = several.served.post("/v1/completions", {**bad, "prompt": "x"}).text
    assert text.startswith(": loading") and "top_p" in events(text)[-1]["error"]["message"]
    several.models["c"].problem = "its weights are cut short"
    text = several.served.post("/v1/chat/completions", {"model": "c", "messages": MESSAGES, "stream": True}).text
    assert events(text)[-1]["error"]["code"] == "model_load_failed"
    asked = {"model": "c", "messages": MESSAGES, "max_tokens": 4, "stream": True}
    text = several.served.post("/v1/messages", asked).text
    assert "event: error" in text and "cut short" in events(text)[-1]["error"]["message"]
    text = several.served.post("/v1/responses", {"model": "c", "input": "x", "stream": True}).text
    assert "event: error" in text and "cut short" in events(text)[-1]["message"]
    lines = several.served.post("/api/chat", {"model": "c", "messages": MESSAGES})
    assert lines.status_code == 500 and "cut short" in lines.json()["error"]
    answer = several.complete("c", "x")
    assert answer.status_code == 500 and "cut short" in answer.json()["error"]["message"]
    several.check("b", "others go on")
    (card,) = [one for one in several.served.get("/v1/models").json()["data"] if one["id"] == "c"]
    assert not card["loaded"] and "cut short" in card["error"]
    several.models["c"].problem = None
    several.check("c", "and so does this one")


def test_what_never_fits(several: SeveralFakes) -> None:
    several.models["c"].num_bytes = MEMORY_FOR_TWO + 50
    answer = several.complete("c", "x")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "model_too_large", "model")
    assert "50 bytes are missing" in error["message"] and "--models-memory" in error["message"]


def test_a_client_that_leaves_holds_no_model(several: SeveralFakes) -> None:
    model = several.models["b"]
    model.gate.clear()
    body = {"model": "b", "prompt": "once", "max_tokens": 200, "stream": True}
    with httpx.stream("POST", several.served.url + "/v1/completions", json=body, timeout=DEADLINE) as stream:
        assert next(stream.iter_lines()).startswith(": loading")
    model.gate.set()
    with httpx.stream("POST", several.served.url + "/v1/completions", json=body, timeout=DEADLINE) as stream:
        next(line for line in stream.iter_lines() if line.startswith("data: "))
    several.wait_until_idle()


def test_what_is_shown_of_them(several: SeveralFakes) -> None:
    several.check("b", "x")
    several.wait_until_idle()
    cards = {one["id"]: one for one in several.served.get("/v1/models").json()["data"]}
    assert [one["loaded"] for one in cards.values()] == [False, True, False]
    assert cards["b"]["max_model_len"] == several.models["b"].config.scheduler.max_model_len
    assert cards["b"]["memory_bytes"] == 100 and cards["c"]["max_model_len"] is None
    health = several.served.get("/health").json()
    assert (health["status"], health["memory_bytes"], health["used_bytes"]) == ("ok", MEMORY_FOR_TWO, 100)
    assert [one["state"] for one in health["models"]] == ["unloaded", "loaded", "unloaded"]
    kv_dtype = several.models["b"].config.model.kv_dtype
    assert [one.get("kv_cache_dtype") for one in health["models"]] == [None, kv_dtype, None]
    assert [one.get("images") for one in health["models"]] == [None, "refused: the model takes text only", None]
    assert several.served.get("/ready").json() == {"ready": True}
    metrics = several.served.get("/metrics").text
    assert 'metal_engine:model_loaded{model_name="b"} 1.0' in metrics
    assert 'metal_engine:model_loaded{model_name="c"} 0.0' in metrics
    several.check("c", "x")
    metrics = several.served.get("/metrics").text
    for name in "bc":
        assert f'metal_engine:generation_tokens_total{{model_name="{name}"}} 8.0' in metrics
    assert metrics.count("# TYPE metal_engine:generation_tokens_total counter") == 1
    several.complete("b", "x", top_p=7)
    rejected = 'metal_engine:requests_rejected_total{model_name="b",reason="invalid"} 1.0'
    assert rejected in several.served.get("/metrics").text
    names = [one["name"] for one in several.served.get("/api/tags").json()["models"]]
    assert names == ["org/a:latest", "b:latest", "c:latest"]
    assert [one["name"] for one in several.served.get("/api/ps").json()["models"]] == ["b:latest", "c:latest"]
    shown = [several.served.post("/api/show", {"model": name}).json() for name in ("org/a", "b")]
    assert [one["details"]["family"] for one in shown] == ["", "fake"]
    assert several.served.states()["org/a"] == "unloaded", "to look at a model loads nothing"


def test_health_names_models_to_those_with_the_key() -> None:
    """Only clients with the key get names and errors with file paths. All clients get totals."""
    model = FakeModel(1, problem="/secret/weights.safetensors is cut short")
    args = ServerArgs(api_key=("k",), shutdown_timeout=1)
    with serve_models({"hidden-name": model.source}, 100, args=args) as served:
        key = {"authorization": "Bearer k"}
        body = {"model": "hidden-name", "prompt": "x"}
        assert httpx.post(served.url + "/v1/completions", json=body, headers=key).status_code == 500
        for headers in ({}, {"authorization": "Bearer wrong"}):
            response = httpx.get(served.url + "/health", headers=headers)
            assert response.status_code == 200 and response.json()["models"] == []
            assert "hidden" not in response.text and "secret" not in response.text
        (told,) = httpx.get(served.url + "/health", headers=key).json()["models"]
        assert told["name"] == "hidden-name" and told["error"] == model.problem


def test_no_get_loads_a_model(several: SeveralFakes) -> None:
    """Any web page can make a browser send a GET, for example with an image."""
    app: Any = several.served.server.config.app
    paths = {route.path for route in app.routes if "GET" in (getattr(route, "methods", None) or ())}
    assert {"/tokenizer_info", "/watch", "/v1/models/{model_id:path}"} <= paths
    for path in paths:
        filled = path.replace("{model_id:path}", "b").replace("{name:path}", "b").replace("{response_id}", "b")
        for query in ("", "?model=b", "?model=b&seconds=0"):
            if path != "/watch" or "seconds" in query:
                several.served.get(filled + query)
    assert set(several.served.states().values()) == {"unloaded"}
    error = several.served.get("/tokenizer_info?model=b").json()["error"]
    assert error["code"] == "model_not_loaded"
    assert several.served.get("/tokenizer_info?model=d").status_code == 404


def test_a_model_that_is_looked_at(several: SeveralFakes) -> None:
    served = several.served
    assert served.get("/watch?seconds=0").json()["error"]["code"] == "model_not_loaded"
    several.check("b", "x")
    assert '"models":["b"]' in served.get("/watch?seconds=0").text
    assert served.get("/watch?model=c&seconds=0").status_code == 503
    assert served.get("/watch?model=d&seconds=0").status_code == 404
    with httpx.stream("GET", served.url + "/watch?model=b", timeout=DEADLINE) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: snapshot"
        for name in ("org/a", "c"):  # b must be unloaded, even with a viewer
            several.check(name, "x")
        for _ in lines:
            pass
    assert served.registry.find("b").state is ModelState.UNLOADED  # type: ignore[union-attr]


def test_requests_that_wait_for_a_model_are_told_of_the_end() -> None:
    model = FakeModel(1)
    model.gate.clear()
    asked: list[httpx.Response] = []
    with serve_models({"a": model.source}, 100, args=ServerArgs(shutdown_timeout=0)) as served:

        def ask() -> None:
            asked.append(served.post("/v1/completions", {"model": "a", "prompt": "x"}))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(model.began.is_set, "loading")
        server_ends = served.stop()
        thread.join()
        model.gate.set()
        server_ends.result(DEADLINE)
    assert asked[0].status_code == 503 and asked[0].json()["error"]["code"] == "shutting_down"


def test_a_model_whose_engine_dies_is_made_anew_and_others_go_on(several: SeveralFakes) -> None:
    for name in ("b", "c"):
        several.check(name, "x")
    loaded_engine = several.served.registry.find("b").loaded_engine  # type: ignore[union-attr]
    core: Any = loaded_engine.engine._engine.core  # type: ignore[union-attr]
    core.scheduler.schedule = core.scheduler.check_integrity = lambda: 1 / 0
    answer = several.complete("b", "x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    told = {one["name"]: one.get("error") for one in several.served.get("/health").json()["models"]}
    assert "engine has stopped" in told["b"] and told["c"] is None
    assert several.served.get("/health").status_code == 200
    several.check("c", "y")
    several.check("b", "y")
