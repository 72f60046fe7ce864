"""Tests of the server that run once more with engines in processes of their own."""
# ruff: noqa: F401

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from metal_engine.settings.server_args import ServerArgs
from tests.server.anthropic.test_messages import test_stream
from tests.server.generation.test_parameters import (
    test_bad_words,
    test_logit_bias_and_allowed_tokens,
    test_logprobs_of_chats,
    test_logprobs_of_completions,
    test_min_tokens_and_stops,
    test_n,
    test_penalties,
    test_priority_and_salt,
    test_prompt_logprobs,
    test_structured_outputs,
    test_truncated_prompt,
)
from tests.server.generation.test_phases import answer_format, test_calls_that_the_model_begins, tokenizer
from tests.server.ollama.test_ollama import test_a_client_disconnect_aborts_the_request
from tests.server.openai.test_completions import test_several_prompts, test_stream_equals_completion
from tests.server.openai.test_responses import test_text
from tests.server.status.test_metrics import test_names
from tests.server.status.test_status import test_health, test_models, test_server_info
from tests.support.engine_child import pid_of, started
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tools.fixtures.fake_engine import TOOL_TEMPLATE


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Yield a server whose fake engine has a process of its own."""
    with serve(engine=started("fake")) as served:
        yield served


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    """Yield a server whose tiny model has a process of its own."""
    with serve(engine=started("tiny", num_blocks=512)) as served:
        yield served


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    """Yield a server whose model begins the reasoning itself, if at all."""
    own = tokenizer(TOOL_TEMPLATE)
    sizes = {"max_model_len": 2048, "num_blocks": 4096, "max_num_batched_tokens": 1024}
    options = {"template": TOOL_TEMPLATE, "vocab_size": len(own.hf_tokenizer), "ahead": True, **sizes}
    with serve(engine=started("tiny", tokenizer=own, **options), answer_format=answer_format("json_tools")) as served:
        yield served


def test_embeddings(served: Served) -> None:
    response = served.post("/v1/embeddings", {"input": ["a", "a long text"], "model": MODEL})
    vectors = [entry["embedding"] for entry in response.json()["data"]]
    assert len(vectors) == 2 and abs(sum(x * x for x in vectors[1]) - 1.0) < 1e-5
    wait_until(lambda: served.engine.metrics.num_finished["stop"] >= 2, "the metrics")


def test_metrics_count_each_request_once(tiny: Served) -> None:
    before = tiny.engine.metrics.generation_tokens.sum
    tiny.client().completions.create(model=MODEL, prompt="abc", max_tokens=7, n=3, extra_body={"ignore_eos": True})
    assert tiny.engine.metrics.generation_tokens.sum == before + 21
    assert "metal_engine:generation_tokens_total" in httpx.get(tiny.url + "/metrics").text


def test_frames_of_the_page(tiny: Served) -> None:
    with httpx.stream("GET", tiny.url + "/watch", timeout=DEADLINE) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: snapshot"
        body = {"prompt": "watched", "max_tokens": 30, "ignore_eos": True}
        assert tiny.post("/v1/completions", body).status_code == 200
        for line in lines:
            if line.startswith("data: ") and json.loads(line[6:]).get("requests"):
                break


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_end_of_the_engine_is_an_error_for_every_request(stream: bool) -> None:
    engine = started("fake", step_time=0.01)
    args = ServerArgs(shutdown_timeout=1)
    with serve(engine=engine, death_grace=0.5, args=args) as served, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": stream}
        answers = [pool.submit(served.post, "/v1/completions", body) for _ in range(4)]
        wait_until(lambda: engine.stats.num_running == 4, "the requests to run")
        os.kill(pid_of(engine), signal.SIGKILL)
        for answer in answers:
            response = answer.result()
            assert "the engine's process has ended with SIGKILL" in response.text
            assert response.status_code == (200 if stream else 503)
        wait_until(lambda: served.server.should_exit, "the end of the server")
        assert served.server.exit_status == 1


def test_a_restart_is_visible_and_harmless(tmp_path: Path) -> None:
    delay = tmp_path / "delay"
    engine = started("fake", max_restarts=10, delayed_by=str(delay))
    with serve(engine=engine, args=ServerArgs(max_num_queued_reqs=1)) as served:
        check_restart(served, delay)


def check_restart(served: Served, delay: Path) -> None:
    """Check the responses during a restart. The restart lasts while the file ``delay`` exists."""
    with httpx.stream("GET", served.url + "/watch", timeout=DEADLINE) as watch:
        events = (json.loads(line[6:]) for line in watch.iter_lines() if line.startswith("data: "))
        views = (event["stats"]["restarting"] for event in events if "stats" in event)
        assert next(views) is False
        delay.touch()
        os.kill(pid_of(served.engine), signal.SIGKILL)
        wait_until(lambda: served.engine.is_restarting, "the end of the process")
        assert httpx.get(served.url + "/ready").status_code == 503
        health = httpx.get(served.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "restarting")
        assert any(views)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(served.post, "/v1/completions", {"prompt": "abc", "max_tokens": 5})
            wait_until(lambda: served.engine.num_waiting == 1, "the request")
            assert served.engine.is_restarting
            assert served.post("/v1/completions", {"prompt": "abc"}).json()["error"]["code"] == "overloaded"
            delay.unlink()
            answer = waiting.result()
        assert not all(views)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
        assert httpx.get(served.url + "/ready").status_code == 200
        metrics = httpx.get(served.url + "/metrics").text
        assert "metal_engine:restart_seconds_count" in metrics and "metal_engine:resumed_requests_total" in metrics
