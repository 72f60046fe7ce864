"""Default sampling parameters of requests: the checkpoint's recommended values, if it has any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metal_engine.sampling_params import SamplingParams
from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import fake_config

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}


def ask(served: Served, path: str, **given: float) -> SamplingParams:
    """Return the sampling parameters with which the engine ran a request."""
    message = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    response = served.post(path, {"model": MODEL, "max_tokens": 2, **message, **given})
    assert response.status_code == 200, response.text
    return served.runner.seen_params[-1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_silence_means_what_the_checkpoint_recommends(path: str) -> None:
    config = fake_config()
    config = replace(config, model=replace(config.model, default_sampling=RECOMMENDED))
    with serve(config=config) as served:
        silent = ask(served, path)
        assert {name: getattr(silent, name) for name in RECOMMENDED} == RECOMMENDED
        # Neutral values count as explicit.
        given = ask(served, path, temperature=1.0, top_k=0)
        assert (given.temperature, given.top_k, given.top_p, given.min_p) == (1.0, 0, 0.95, 0.05)


def test_without_a_recommendation_the_defaults_are_openais() -> None:
    with serve() as served:
        params = ask(served, "/v1/completions")
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
