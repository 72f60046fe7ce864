"""/v1/models, /health, /version, and the schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import jinja2
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from metal_engine import __version__
from metal_engine.text.tokenizer import Tokenizer
from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import CHAT_TEMPLATE, EOS, fake_config


def test_models(served: Served) -> None:
    (model,) = served.client().models.list()
    assert model.id == MODEL and model.object == "model" and model.created > 1_700_000_000
    assert model.max_model_len == 512  # type: ignore[attr-defined]
    assert served.client().models.retrieve(MODEL) == model
    assert httpx.get(f"{served.url}/v1/models/{MODEL}").json()["id"] == MODEL
    with pytest.raises(openai.NotFoundError) as info:
        served.client().models.retrieve("other")
    assert info.value.code == "model_not_found"


def test_any_name() -> None:
    """Every endpoint accepts any name. Responses and the list of models have the real names."""
    with serve(names=("*", "demo", "other")) as served:
        client = served.client()
        assert [model.id for model in client.models.list()] == ["demo", "other"]
        assert client.models.retrieve("claude-opus-4").id == "demo"
        assert client.models.retrieve("other").id == "other"
        body = {"model": "claude-opus-4", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        for path in ("/v1/chat/completions", "/v1/messages"):
            assert served.post(path, body).json()["model"] == "demo"
        response = served.post("/v1/responses", {"model": "o3", "input": "hi", "max_output_tokens": 1})
        assert response.json()["model"] == "demo"
        assert served.post("/v1/messages/count_tokens", body).status_code == 200
        assert served.post("/tokenize", {"model": "x", "prompt": "hi"}).status_code == 200
    with serve(names=("*",)) as served:
        (model,) = served.client().models.list()
        assert model.id == served.engine.config.model.name


def test_health(served: Served) -> None:
    response = httpx.get(served.url + "/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "running": 0,
        "waiting": 0,
        "kv_cache_usage": 0.0,
        "kv_cache_dtype": "auto",
        "attention": "fake",
        "requests": "packed",
        "replay": "off",
        "images": "refused: the model takes text only",
        "preemptions": served.engine.stats.num_preemptions,
        "failed_steps": 0,
        "unconstrained_calls": 0,
        "unknown_parameters": response.json()["unknown_parameters"],
        "num_unknown_parameters": sum(response.json()["unknown_parameters"].values()),
    }


def test_version(served: Served) -> None:
    assert httpx.get(served.url + "/version").json() == {"version": __version__}


def test_tokenize_and_back(served: Served) -> None:
    for text in ("the thing", "日本語 😀", ""):
        answer = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        ids = served.tokenizer.encode(text)
        assert answer["tokens"] == ids and answer["count"] == len(ids) == len(answer["token_strs"])
        assert answer["max_model_len"] == 512
        assert served.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}


def test_tokenize_a_chat(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for flags in ({}, {"add_generation_prompt": False}):
        answer = served.post("/tokenize", {"messages": messages, "model": MODEL, **flags}).json()
        assert answer["tokens"] == served.tokenizer.apply_chat_template(messages, **flags)


def test_bad_tokenizations(served: Served) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, "messages"),
        ("/tokenize", {"messages": messages, "add_generation_prompt": 3}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ]:  # fmt: skip
        response = served.post(path, body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    assert served.post("/tokenize", {"model": "other", "prompt": "a"}).status_code == 404


def test_tokenizer_info(served: Served, tmp_path: Path) -> None:
    info = httpx.get(served.url + "/tokenizer_info").json()
    assert (info["tokenizer_class"], info["model_max_length"]) == (type(served.tokenizer.hf_tokenizer).__name__, 512)
    assert [info[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == [None, "<|im_end|>", None, None]
    assert info["chat_template"] == CHAT_TEMPLATE
    assert info["added_tokens_decoder"][str(EOS)] == {"content": "<|im_end|>", "special": True}
    # A tokenizer loaded from files does not reveal their location.
    served.tokenizer.hf_tokenizer.save_pretrained(tmp_path)
    loaded = Tokenizer(PreTrainedTokenizerFast.from_pretrained(tmp_path))
    assert loaded.info == served.tokenizer.info and str(tmp_path) not in json.dumps(loaded.info)


def test_a_remote_tokenizer(served: Served) -> None:
    """lm-eval's tokenizer needs the ids of special tokens by their spelling, and templates rendered by the server."""
    info = httpx.get(served.url + "/tokenizer_info").json()

    def encode(text: str) -> list[int]:
        return served.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]

    assert encode(info["eos_token"]) == [EOS]
    messages = [{"role": "user", "content": "hi"}]
    prompt = jinja2.Template(info["chat_template"]).render(messages=messages, add_generation_prompt=True)
    assert encode(prompt) == served.tokenizer.apply_chat_template(messages)
    assert served.post("/detokenize", {"tokens": encode(prompt)}).json() == {"prompt": prompt}


def test_server_info(served: Served) -> None:
    """The names of the fields are those of other servers, as gateways expect. The older path gives the same."""
    config = served.engine.config
    info = httpx.get(served.url + "/server_info").json()
    assert info == {
        "model": MODEL,
        "model_path": "fake",
        "served_model_name": MODEL,
        "version": __version__,
        "context_length": 512,
        "max_total_tokens": 256 * 8,
        "block_size": 8,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_running_requests": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": 64,
        "disaggregation_mode": "null",
    }
    assert httpx.get(served.url + "/get_server_info").json() == info
    for role, mode in (("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "null")):
        with serve(config=replace(fake_config(), kv_role=role)) as apart:
            assert httpx.get(apart.url + "/server_info").json()["disaggregation_mode"] == mode
