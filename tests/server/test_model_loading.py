"""Loading and unloading models over HTTP: permissions, limits and error reports."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx

from metal_engine.errors import ConfigError
from metal_engine.model_pool.model_entry import ModelSource, ModelState
from metal_engine.settings.server_args import ServerArgs
from tests.support.serving import DEADLINE, wait_until
from tests.support.several_models import MEMORY_FOR_TWO, FakeModel, SeveralFakes, events, serve_models


def test_clients_load_nothing_unless_they_may() -> None:
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


def test_limits_hold_for_those_who_load_models_too() -> None:
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

    model = FakeModel(1)
    with serve_models({"a": model.source}, 100, discover=discover) as served:
        answer = served.post("/v1/models/load", {"model": "b"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (500, "model_load_failed", "model")
        assert error["message"] == "cannot read --models-dir /models: Permission denied"
        assert served.post("/v1/models/load", {"model": "a"}).json()["state"] == "loaded"


def test_a_stream_whose_model_is_unloaded_while_it_is_loaded() -> None:
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
