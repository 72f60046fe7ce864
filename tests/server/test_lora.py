"""LoRA adapters over HTTP: served under their own names, loaded and unloaded while the server runs."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest

from metal_engine.errors import ConfigError
from metal_engine.server.app import create_app
from metal_engine.server.workers import Weight
from metal_engine.settings.server_args import ServerArgs
from tests.support import adapters
from tests.support.raw_http import crowd, post
from tests.support.serving import DEADLINE, Served, serve, wait_until
from tests.support.tiny_engine import tiny_reference
from tools.fixtures.fake_engine import byte_ids, fake_engine, in_thread, tiny_tokenizer
from tools.fixtures.lora_adapters import write_peft

NUM_TOKENS = 8
INVISIBLE = ("a\nb", "a\0", "sql\u202etxt", "\x1b[2J", "\u3164", "\ufe0f")
TEXT = "Once upon a time"
HALF = "\N{REPLACEMENT CHARACTER}"  # part of a character that the last token leaves incomplete; servers do not send it
ASKED = {"prompt": TEXT, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the adapter folder with a, b, and c, which is too large. Its parent has an adapter that is off limits."""
    base = tmp_path_factory.mktemp("lora")
    model = tiny_reference()
    for seed, (name, rank) in enumerate((("root/a", 2), ("root/b", 4), ("root/c", 64), ("outside", 2))):
        adapters.write_mlx_lm(base / name, adapters.products(model, adapters.ALL, rank, seed))
    return base / "root"


@pytest.fixture(scope="module")
def answers(root: Path) -> dict[str, str]:
    """Return mlx-lm's output for each adapter."""
    found = {}
    for name in ("", "a", "b"):
        model = adapters.mlx_lms(tiny_reference(), root / name if name else None)
        found[name] = tiny_tokenizer().decode(adapters.mlx_lm_answer(model, byte_ids(TEXT), NUM_TOKENS))
    return {name: text.rstrip(HALF) for name, text in found.items()}


@pytest.fixture
def served(root: Path) -> Iterator[Served]:
    """Yield a server with adapter a and a slot for one more adapter."""
    with serve(
        engine=in_thread(lambda: adapters.adapted_engine({"a": root / "a"}, max_loras=2)),
        names=("base",),
        args=ServerArgs(lora_dir=str(root), shutdown_timeout=1),
    ) as served:
        yield served


def ask(served: Served, model: str | None, **more: Any) -> Any:
    return served.post("/v1/completions", {**ASKED, "model": model, **more})


def answer(served: Served, model: str | None, **more: Any) -> str:
    response = ask(served, model, **more)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == (model or "base")
    return body["choices"][0]["text"].rstrip(HALF)


def load(served: Served, name: str, path: str, **more: Any) -> Any:
    return served.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})


def unload(served: Served, name: str) -> Any:
    return served.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_the_model_of_a_request_picks(served: Served, answers: dict[str, str]) -> None:
    assert answer(served, "a") == answers["a"]
    for base in ("base", None):
        assert answer(served, base) == answers[""]
    assert answers["a"] != answers[""]


def test_every_endpoint_accepts_the_adapter_name(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "a", "messages": messages, "max_tokens": 2}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert served.post(path, body).json()["model"] == "a"
    assert served.post("/v1/responses", {"model": "a", "input": "x", "max_output_tokens": 2}).json()["model"] == "a"
    embedded = [served.post("/v1/embeddings", {"model": m, "input": "x"}).json() for m in ("a", "base")]
    assert [one["model"] for one in embedded] == ["a", "base"]
    assert embedded[0]["data"][0]["embedding"] != embedded[1]["data"][0]["embedding"]
    assert served.post("/tokenize", {"model": "a", "prompt": "hi"}).status_code == 200
    assert served.post("/v1/messages/count_tokens", body).status_code == 200
    ollama = {"model": "a:latest", "messages": messages, "stream": False, "options": {"num_predict": 2}}
    assert served.post("/api/chat", ollama).json()["model"] == "a:latest"


def test_models(served: Served, root: Path) -> None:
    """Models are listed as in vLLM: an adapter's root is its path, its parent the model."""
    base, adapter = served.client().models.list()
    assert (base.id, adapter.id) == ("base", "a")
    assert adapter.root == str(root / "a") and adapter.parent == "base"  # type: ignore[attr-defined]
    assert "parent" not in base.model_dump() and base.root == "fake"  # type: ignore[attr-defined]
    assert served.client().models.retrieve("a") == adapter


def test_loading_and_unloading(served: Served, answers: dict[str, str]) -> None:
    assert ask(served, "b").status_code == 404
    response = load(served, "b", "b")
    assert response.status_code == 200 and response.text == "Success: LoRA adapter 'b' added successfully."
    assert answer(served, "b") == answers["b"]
    assert answer(served, "a") == answers["a"]
    response = unload(served, "b")
    assert response.status_code == 200 and response.text == "Success: LoRA adapter 'b' removed successfully."
    error = ask(served, "b")
    assert error.status_code == 404
    assert error.json()["error"]["message"] == "The model `b` does not exist. This server has `base`, `a`."
    assert [model.id for model in served.client().models.list()] == ["base", "a"]
    # Load it again, and in place of the other adapter.
    assert load(served, "b", "./b").status_code == 200
    assert unload(served, "b").status_code == 200
    assert load(served, "a", "b", load_inplace=True).status_code == 200
    assert answer(served, "a") == answers["b"]


def test_invalid_adapter_loads_get_a_400(served: Served) -> None:
    for name, path, param, problem in [
        ("x", "../outside", "lora_path", "is outside"),
        ("x", "/etc", "lora_path", "is outside"),
        ("x", "nothing", "lora_path", "is not a directory"),
        ("x", "", "lora_path", "at least 1 character"),
        ("x", "a\0b", "lora_path", "null"),
        ("x", "x" * 5000, "lora_path", "at most 4096 characters"),
        ("x" * 300, "a", "lora_name", "at most 256 characters"),
        ("x", "c", "lora_path", "has rank 64, more than the 8 of --max-lora-rank"),
        ("a", "b", "lora_name", "has already been loaded"),
        ("base", "b", "lora_name", "is the model's own name"),
        *((name, "b", "lora_name", "not visible") for name in INVISIBLE),
    ]:
        response = load(served, name, path)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert problem in error["message"] and error["param"] == param and error["type"] == "invalid_request_error"
        assert name not in INVISIBLE or (error["message"].isascii() and error["message"].isprintable())
        assert [model.id for model in served.client().models.list()] == ["base", "a"]
    assert load(served, "a$(cmd) 'b'", "b").status_code == 200


def test_malformed_adapters_are_refused_without_affecting_loaded_adapters(
    served: Served, root: Path, answers: dict[str, str]
) -> None:
    """Each error names the file and the problem. The slot for the adapter stays free."""
    made = adapters.products(tiny_reference(), adapters.ALL, 2, seed=0)
    last = sorted(made)[-1]  # the other arrays have already been stored by then
    nan = {**made, last: (made[last][0], np.full_like(made[last][1], np.nan))}
    folders = [
        ("huge", made, {"alpha": 10**400}, "adapter_config.json: lora_alpha is 1000"),
        ("large", made, {"alpha": 1e300}, "adapter_config.json: lora_alpha is 1e+300"),
        ("nan", nan, {}, f"adapter_model.safetensors: base_model.model.{last}.lora_B.weight has weights that"),
        ("flag", made, {"use_rslora": "false"}, "adapter_config.json: use_rslora is 'false'"),
    ]
    for name, weights, config, problem in folders:
        write_peft(root / name, weights, **config)
        response = load(served, name, name)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert problem in error["message"] and error["param"] == "lora_path"
        assert ask(served, name).status_code == 404
        assert answer(served, "a") == answers["a"] and answer(served, "base") == answers[""]
    assert load(served, "b", "b").status_code == 200 and answer(served, "b") == answers["b"]
    response = load(served, "b2", "b")
    assert response.status_code == 400 and "all 2 of --max-loras are in use" in response.json()["error"]["message"]
    assert unload(served, "nothing").status_code == 404


def test_load_inplace_replaces_an_adapter_with_all_slots_in_use(
    served: Served, root: Path, answers: dict[str, str]
) -> None:
    """Replacement fails while a request uses the old adapter or if the new weights are invalid: the old one stays."""
    assert load(served, "b", "b").status_code == 200
    assert served.engine.adapters is not None
    held = served.engine.adapters.find("a")
    assert load(served, "a", "b", load_inplace=True).status_code == 400
    del held
    bad = adapters.products(tiny_reference(), adapters.ALL, 2, seed=9)
    bad[max(bad)] = (bad[max(bad)][0], bad[max(bad)][1] * np.nan)
    adapters.write_mlx_lm(root / "root" / "nan", bad)
    assert load(served, "a", "nan", load_inplace=True).status_code == 400
    assert answer(served, "a") == answers["a"]
    assert load(served, "a", "b", load_inplace=True).status_code == 200
    assert answer(served, "a") == answers["b"]
    assert unload(served, "b").status_code == 200
    assert load(served, "a", "a", load_inplace=True).status_code == 200
    assert answer(served, "a") == answers["a"]


def test_unloading_while_requests_run(served: Served, answers: dict[str, str]) -> None:
    """Running requests end unchanged. New requests cannot use the adapter."""
    num_tokens = 120
    first = threading.Event()
    texts: list[str] = []

    def stream() -> None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            body: dict[str, Any] = {**ASKED, "model": "a", "max_tokens": num_tokens, "stream": True}
            extra = {"ignore_eos": body.pop("ignore_eos")}
            for chunk in client.completions.create(**body, extra_body=extra):
                texts.append(chunk.choices[0].text)
                first.set()

    alone = answer(served, "a", max_tokens=num_tokens)
    thread = threading.Thread(target=stream)
    thread.start()
    assert first.wait(60)
    assert unload(served, "a").status_code == 200
    assert ask(served, "a").status_code == 404
    assert load(served, "b", "b").status_code == 200
    assert answer(served, "b") == answers["b"]
    thread.join(60)
    assert "".join(texts).rstrip(HALF) == alone


def test_an_adapter_load_blocks_other_loads_after_a_client_disconnect(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads at a time would occupy both threads for heavy work."""
    begun: list[str] = []
    release = threading.Event()

    def slow(name: str, *_: object, **__: object) -> None:
        begun.append(name)
        release.wait(DEADLINE)

    monkeypatch.setattr(served.engine, "load_adapter", slow)
    body = b'{"lora_name": "x", "lora_path": "b"}'
    with crowd(served.url, 1, post(body=body).replace(b"/v1/completions", b"/v1/load_lora_adapter")):
        wait_until(lambda: begun == ["x"], "the load to begin")
    lifecycle = served.server._lifecycle
    wait_until(lambda: lifecycle.num_active == 0, "the disconnect")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(load, served, "y", "b")
        try:
            wait_until(lambda: lifecycle.num_active == 1, "the second load")
            heavy = served.server._models.workers.run(Weight.HEAVY, int)
            assert asyncio.run_coroutine_threadsafe(heavy, served.loop).result(DEADLINE) == 0
            assert begun == ["x"]
        finally:
            release.set()
        assert second.result().status_code == 200
    assert begun == ["x", "y"]


def test_clients_may_not_without_the_setting() -> None:
    with serve() as served:
        assert load(served, "x", "x").status_code == 404
        assert unload(served, "x").status_code == 404


def test_settings_that_cannot_work(tmp_path: Path, root: Path) -> None:
    plain = fake_engine()
    adapted = in_thread(lambda: adapters.adapted_engine({"a": root / "a"}))
    try:
        with pytest.raises(ConfigError, match="--lora-dir needs --enable-lora"):
            create_app(plain, ["x"], ServerArgs(lora_dir=str(tmp_path)))
        with pytest.raises(ConfigError, match=r"--lora-dir .*is not a directory"):
            create_app(adapted, ["x"], ServerArgs(lora_dir=str(tmp_path / "nothing")))
        with pytest.raises(ConfigError, match="--lora-modules contains 'a', which is also a name of the model"):
            create_app(adapted, ["x", "a"])
    finally:
        plain.shutdown()
        adapted.shutdown()


# Types of timers: asyncio keeps up to 100 that were cancelled.
TIMERS = {"TimerHandle", "Context", "hamt", "hamt_bitmap_node"}


def counted() -> tuple[Counter[str], int, int, int]:
    """Return objects by type, bytes allocated by MLX, number of threads, number of open files."""
    gc.collect()
    objects = Counter(type(one).__qualname__ for one in gc.get_objects())
    return objects, mx.get_active_memory(), threading.active_count(), len(os.listdir("/dev/fd"))


def test_loading_and_unloading_adapters_leaks_no_resources(served: Served, answers: dict[str, str], root: Path) -> None:
    """The numbers of objects, arrays, threads and descriptors do not grow."""
    check_growth(served, answers, root, 20)


def check_growth(served: Served, answers: dict[str, str], root: Path, num_adapters: int) -> None:
    """Load, use and unload adapters."""
    names = ("a", "b")
    with httpx.Client(base_url=served.url, timeout=DEADLINE) as client:
        before = after = counted()
        for i in range(8 + num_adapters):
            if i == 8:  # objects and threads that are created once exist now
                before = counted()
            path = names[i % 2]
            loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(root / path)})
            assert loaded.status_code == 200, loaded.text
            answer = client.post("/v1/completions", json={"model": "x", **ASKED}).json()
            assert answer["choices"][0]["text"].rstrip(HALF) == answers[path]
            assert client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 200
        after = counted()
    grown = {name: n for name, n in (after[0] - before[0]).items() if n >= num_adapters // 2 and name not in TIMERS}
    assert not grown, "fewer than one for two adapters"
    assert after[1] <= before[1] + 1024, (before[1], after[1])
    # A pool starts another thread if its threads have not yet reported the end of their work.
    assert all(n < m + num_adapters // 2 for n, m in zip(after[2:], before[2:], strict=True)), (before[2:], after[2:])
