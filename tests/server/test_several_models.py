"""Several models behind one server: selected by name in each API, loaded and unloaded over HTTP, and more."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from metal_engine.errors import ConfigError
from metal_engine.model_pool.model_entry import ModelSource, ModelState
from metal_engine.settings.server_args import ServerArgs
from tests.support.serving import DEADLINE, wait_until
from tests.support.several_models import MEMORY_FOR_TWO, FakeModel, SeveralFakes, events, serve_fakes, serve_models
from tools.fixtures.fake_engine import byte_ids


@pytest.fixture
def several() -> Iterator[SeveralFakes]:
    with serve_fakes(["org/a", "b", "c"]) as made:
        yield made


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


def test_a_stream_starts_with_a_comment_while_the_model_loads(several: SeveralFakes) -> None:
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


def test_an_error_in_a_stream_that_loads_a_model_is_the_last_event(several: SeveralFakes) -> None:
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


def test_a_model_larger_than_models_memory_gets_a_400(several: SeveralFakes) -> None:
    several.models["c"].num_bytes = MEMORY_FOR_TWO + 50
    answer = several.complete("c", "x")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "model_too_large", "model")
    assert "50 bytes are missing" in error["message"] and "--models-memory" in error["message"]


def test_a_disconnected_client_does_not_keep_a_model_in_use(several: SeveralFakes) -> None:
    model = several.models["b"]
    model.gate.clear()
    body = {"model": "b", "prompt": "once", "max_tokens": 200, "stream": True}
    with httpx.stream("POST", several.served.url + "/v1/completions", json=body, timeout=DEADLINE) as stream:
        assert next(stream.iter_lines()).startswith(": loading")
    model.gate.set()
    with httpx.stream("POST", several.served.url + "/v1/completions", json=body, timeout=DEADLINE) as stream:
        next(line for line in stream.iter_lines() if line.startswith("data: "))


def test_status_endpoints_show_the_state_of_each_model(several: SeveralFakes) -> None:
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


def test_health_names_models_only_to_clients_with_the_key() -> None:
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
    assert several.served.get("/tokenizer_info?model=b").json()["error"]["code"] == "model_not_loaded"
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


def test_requests_waiting_for_a_model_get_a_503_at_shutdown() -> None:
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


def test_an_engine_death_reloads_the_model_and_spares_other_models(several: SeveralFakes) -> None:
    for name in ("b", "c"):
        several.check(name, "x")
    core: Any = several.served.registry.find("b").loaded_engine.engine._engine.core  # type: ignore[union-attr]
    core.scheduler.schedule = core.scheduler.check_integrity = lambda: 1 / 0
    answer = several.complete("b", "x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    told = {one["name"]: one.get("error") for one in several.served.get("/health").json()["models"]}
    assert "engine has stopped" in told["b"] and told["c"] is None
    assert several.served.get("/health").status_code == 200
    several.check("c", "y")
    several.check("b", "y")


def test_load_and_unload_endpoints_are_disabled_by_default() -> None:
    with serve_models({"b": FakeModel(1).source}, MEMORY_FOR_TWO) as served:
        for path in ("load", "unload"):
            assert served.post(f"/v1/models/{path}", {"model": "b"}).status_code in (404, 405)
        assert served.states() == {"b": "unloaded"}


def test_clients_load_and_unload() -> None:
    models = {name: FakeModel(salt) for salt, name in enumerate("abc")}

    def discover(name: str) -> ModelSource | None:
        return models["c"].source if name == "c" else None

    with serve_models({name: models[name].source for name in "ab"}, MEMORY_FOR_TWO, discover=discover) as served:
        made = SeveralFakes(served, models)
        card = served.post("/v1/models/load", {"model": "a"}).json()
        assert (card["id"], card["state"], card["loaded"]) == ("a", "loaded", True)
        made.check("a", "x")
        assert served.post("/v1/models/load", {"model": "../x"}).status_code == 404
        assert served.post("/v1/models/unload", {"model": "c"}).status_code == 404
        assert served.post("/v1/models/load", {"model": "c"}).json()["state"] == "loaded"
        made.check("c", "x")
        assert served.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        for _ in range(2):
            assert served.post("/v1/models/unload", {"model": "a"}).json()["state"] == "unloaded"
        assert served.post("/v1/models/load", {}).status_code == 400
        models["b"].problem = "no"
        assert served.post("/v1/models/load", {"model": "b"}).json()["error"]["code"] == "model_load_failed"
        models["b"].problem = None
        made.check("b", "x")
        served.post("/v1/models/unload", {"model": "b"})
        # Unloading cancels a load in progress.
        models["b"].gate.clear()
        models["b"].began.clear()
        asked: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: asked.append(made.complete("b", "x")))
        thread.start()
        wait_until(models["b"].began.is_set, "loading")
        assert served.post("/v1/models/unload", {"model": "b"}).json()["state"] == "unloaded"
        thread.join()
        assert asked[0].status_code == 503 and "was to be unloaded" in asked[0].text
        assert asked[0].json()["error"]["code"] == "model_unloaded" and int(asked[0].headers["retry-after"]) > 0
        (card,) = [one for one in served.get("/v1/models").json()["data"] if one["id"] == "b"]
        assert card["error"] is None
        models["b"].gate.set()
        made.check("b", "x")


def test_how_many_wait_for_a_model_and_how_long() -> None:
    model = FakeModel(1)
    model.gate.clear()
    body = {"model": "a", "prompt": "x", "max_tokens": 1}
    with serve_models({"a": model.source}, 100, args=ServerArgs(shutdown_timeout=1, request_timeout=0.1)) as served:
        answer = served.post("/v1/completions", body)
        assert answer.status_code == 504 and "--request-timeout" in answer.text
        model.gate.set()


def test_queue_and_time_limits_apply_to_model_loads() -> None:
    model, other = FakeModel(1), FakeModel(2)
    model.gate.clear()
    sources = {"a": model.source, "b": other.source}
    load, unload = "/v1/models/load", "/v1/models/unload"
    args = ServerArgs(shutdown_timeout=1, max_num_queued_reqs=2)
    with serve_models(sources, 100, args=args, discover=lambda name: None) as served, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(served.post, load, {"model": "a"}) for _ in range(2)]
        entry = served.registry.entries[0]
        wait_until(lambda: entry.num_waiting == 2, "two that wait")
        asking = {"model": "a", "prompt": "x"}
        for path, body in ((load, {"model": "a"}), ("/v1/completions", asking | {"stream": True})):
            answer = served.post(path, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert "wait" in answer.text and "retry-after" in answer.headers
        model.gate.set()
        assert [one.result().json()["state"] for one in asked] == ["loaded", "loaded"]
    model.gate.clear()
    args = ServerArgs(shutdown_timeout=1, request_timeout=0.1)
    with serve_models(sources, 100, args=args, discover=lambda name: None) as served:
        answer = served.post(load, {"model": "a"})
        assert answer.status_code == 504 and "a was not loaded within 0.1 s (--request-timeout)" in answer.text
        entry = served.registry.entries[0]
        # The thread must notice before the gate opens. A load without further memory claims would complete.
        wait_until(lambda: entry.state is ModelState.UNLOADED, "the load to be given up")
        model.gate.set()
        # Loaded without the limit, which a busy machine exceeds.
        entry = served.registry.entries[1]
        asyncio.run_coroutine_threadsafe(served.registry.load(entry), served.loop).result(DEADLINE)
        assert served.states()["b"] == "loaded"
        served.loop.call_soon_threadsafe(lambda: setattr(entry, "num_leases", 1))
        answer = served.post(unload, {"model": "b"})
        assert answer.status_code == 504 and "not unloaded within" in answer.text
        served.loop.call_soon_threadsafe(served.registry.release, entry)
        wait_until(lambda: entry.state is ModelState.UNLOADED, "it to go after its request")


def test_a_folder_of_models_that_cannot_be_read_any_more() -> None:
    def discover(name: str) -> ModelSource | None:
        raise ConfigError("--models-dir", "cannot read --models-dir /models: Permission denied")

    with serve_models({"a": FakeModel(1).source}, 100, discover=discover) as served:
        answer = served.post("/v1/models/load", {"model": "b"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (500, "model_load_failed", "model")
        assert error["message"] == "cannot read --models-dir /models: Permission denied"
        assert served.post("/v1/models/load", {"model": "a"}).json()["state"] == "loaded"


def test_unloading_a_loading_model_ends_waiting_streams_with_an_error() -> None:
    model = FakeModel(1)
    model.gate.clear()
    with serve_models({"a": model.source}, 100, discover=lambda name: None) as served:
        body = {"model": "a", "prompt": "x", "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=DEADLINE) as stream:
            lines = stream.iter_lines()
            assert next(lines) == ': loading "a"'
            wait_until(model.began.is_set, "loading")
            assert served.post("/v1/models/unload", {"model": "a"}).json()["state"] == "unloaded"
            (told,) = events("\n".join(lines))
        assert (told["error"]["code"], told["error"]["type"]) == ("model_unloaded", "server_error")
        assert "error" not in {key for one in served.get("/health").json()["models"] for key in one if one[key]}
        model.gate.set()
