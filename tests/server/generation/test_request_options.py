"""Prefix caching, priorities and default sampling parameters from a client's view."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metal_engine.request import RequestOptions
from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import fake_config

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
# 40 tokens, one per byte, because no merge applies. Blocks of the fake engine hold 8 tokens.
PROMPT = "0123456789" * 4


PROMPTS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}


def cached_tokens(served: Served, **body: object) -> int:
    completion = served.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, extra_body=body)
    assert completion.usage is not None and completion.usage.prompt_tokens == 40
    return completion.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]


def test_usage_says_what_was_cached() -> None:
    with serve() as served:
        assert cached_tokens(served) == 0
        assert cached_tokens(served) == 32, "all full blocks but the last: one token is always computed"
        stream = served.client().completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk.usage for chunk in stream if chunk.usage is not None][-1]
        assert usage.prompt_tokens_details.cached_tokens == 32  # type: ignore[union-attr]
        served.wait_until_idle()

    with serve() as served:
        messages: list[dict[str, str]] = [{"role": "user", "content": PROMPT}]
        cached = []
        for _ in range(3):
            answer = served.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=20)  # type: ignore[arg-type]
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "and?"})
        assert cached[0] == 0 and 40 < cached[1] < cached[2]


def test_options_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(config=fake_config(scheduling_policy="priority")) as served:
        scheduler = served.core.scheduler
        seen: list[tuple[RequestOptions, str]] = []
        add = scheduler.add_request
        monkeypatch.setattr(scheduler, "add_request", lambda r: (add(r), seen.append((r.options, r.cache_salt))))
        kv = [{"kv_transfer_params": {f"do_remote_{what}": True}} for what in ("prefill", "decode")]
        for given in ({"priority": -7, "cache_salt": "s"}, *kv):
            served.client().completions.create(model=MODEL, prompt="a", extra_body=given)
        options = (
            RequestOptions(priority=-7),
            RequestOptions(do_remote_prefill=True),
            RequestOptions(do_remote_decode=True),
        )
        assert [one for one, _ in seen] == list(options) and seen[0][1] == "s"
        for field in ("priority", "cache_salt"):
            response = served.post("/v1/completions", {"prompt": "a", field: [1]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("role", "asked", "told"),
    [
        ("kv_producer", None, True),
        ("kv_producer", {"do_remote_decode": True}, True),
        ("kv_both", {"do_remote_decode": True}, True),
        ("kv_both", None, False),
        ("kv_consumer", {"do_remote_decode": True}, False),
        (None, {"do_remote_decode": True}, False),
    ],
)
def test_who_computes_kv_for_others_says_so(role: str | None, asked: dict[str, bool] | None, told: bool) -> None:
    with serve(config=replace(fake_config(), kv_role=role)) as served:
        options = {} if asked is None else {"kv_transfer_params": asked}
        for path, prompt in PROMPTS.items():
            answer = served.post(path, {**prompt, **options, "max_tokens": 1}).json()
            assert answer["choices"]
            wanted = {"kv_transfer_params": {"do_remote_prefill": True}} if told else {}
            assert {key: answer[key] for key in answer if key == "kv_transfer_params"} == wanted
        served.wait_until_idle()


def test_silence_means_what_the_checkpoint_recommends() -> None:
    """Without a recommendation, the defaults are OpenAI's."""
    config = fake_config()
    told = replace(config, model=replace(config.model, default_sampling=RECOMMENDED))
    openais = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for asked_of, expected in ((config, openais), (told, RECOMMENDED)):
        with serve(config=asked_of) as served:
            for path, prompt in PROMPTS.items():
                # Neutral values count as explicit.
                for given in ({}, {"temperature": 1.0, "top_k": 0}):
                    assert served.post(path, {"max_tokens": 2, **prompt, **given}).status_code == 200
                    seen = served.runner.seen_params[-1]
                    assert {name: getattr(seen, name) for name in expected} == expected | given
