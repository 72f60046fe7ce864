"""Requests of every kind on tiny models, and their outputs alone in undisturbed steps."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from metal_engine.request import RequestOutput, merge_outputs
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.rank_cases import PHASES
from tests.support.running import drain
from tests.support.speculation import speculative_config
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.fake_engine import byte_ids
from tools.fixtures.stepped_engine import SteppedEngine

LONG = byte_ids("a prompt of some length, of several chunks, and of blocks that others have")
MODELS: dict[str, dict[str, Any]] = {"attention": {}, "recurrent": {"architecture": "qwen3_5", "num_state_slots": 48}}
WINDOWS: dict[str, dict[str, Any]] = {"windows": {"architecture": "gemma3_text"}}
ALL_MODELS = MODELS | {"quantized": {"kv_cache_dtype": "int8"}}
MODES: dict[str, dict[str, Any]] = {
    "one by one": {},
    "one ahead": {"ahead": True},
    "behind, replayed": {"behind": True, "replay": True},
    "drafts": {"speculative": speculative_config()},
    "drafts ahead": {"speculative": speculative_config(), "ahead": True},
}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.8, "ignore_eos": True, "seed": 7, **fields})


# Prompts with their parameters. The outputs of a request with n > 1 are added consecutively.
MIXED: list[tuple[list[int], SamplingParams]] = [
    (LONG, params(n=2, logprobs=1)),
    (LONG[:50] + byte_ids("another end"), params(temperature=0.0, logprobs=2, logit_bias={70: 2.0})),
    (byte_ids("b"), params(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1)),
    (byte_ids("some digits"), params(structured_outputs=StructuredOutputsParams(regex="[0-9]{9}"), ignore_eos=False)),
    (byte_ids("Bakers"), params(phases=PHASES, max_tokens=25, ignore_eos=False)),
    (byte_ids("to be stopped"), params(stop=("a", "e", "i", "o", "u"), max_tokens=20, logprobs=0, top_k=20)),
    (byte_ids("to be stopped by a token"), params(stop_token_ids=range(40, 90), min_tokens=3, top_p=0.7, min_p=0.05)),
    (byte_ids("of known probability "), params(prompt_logprobs=1, logprobs=1, max_tokens=5)),
    (byte_ids("bad words"), params(bad_words=["a", "th"], logit_bias={65: 3.0}, seed=None)),
    (byte_ids("abcabcabcabc"), params(temperature=0.0, max_tokens=30)),
    (byte_ids("one"), params(max_tokens=1)),
]


def add_mixed(engine: SteppedEngine) -> None:
    for i, (prompt, one) in enumerate(MIXED):
        prepared = engine.prepare(prompt, one)
        for index in range(one.n):
            engine.add_request(f"{i}-{index}", prepared, index=index)


def check_equal(found: dict[str, list[RequestOutput]], model: str) -> None:
    """Assert that the merged outputs of each request equal its output alone, and that no output repeats earlier parts.

    Args:
        found: outputs by request id, in order.
        model: name of the model in ``ALL_MODELS`` or ``WINDOWS``.
    """
    # The order of a sum can change the rounding of a quantized K or V.
    tolerance = 1e-2 if model == "quantized" else 1e-4
    expected = undisturbed(model)
    assert found.keys() == expected.keys()
    for request_id, outputs in found.items():
        ours, theirs = merge_outputs(outputs), expected[request_id]
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        for name in ("text", "token_ids", "token_ends", "num_prompt_tokens", "num_output_tokens", "finish_reason"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert (ours.stop_reason, ours.error) == (theirs.stop_reason, None)
        for name in ("logprobs", "text_logprobs", "prompt_logprobs"):
            check_logprobs(getattr(ours, name), getattr(theirs, name), tolerance)
        assert all(output.prompt_logprobs is None for output in outputs[1:])


def check_logprobs(ours: list[Any] | None, theirs: list[Any] | None, tolerance: float) -> None:
    assert (ours is None) == (theirs is None) and len(ours or ()) == len(theirs or ())
    for a, b in zip(ours or (), theirs or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.token_id == b.token_id and len(a.top) == len(b.top)
            np.testing.assert_allclose(a.logprob, b.logprob, atol=tolerance)


@functools.cache
def undisturbed(model: str) -> dict[str, RequestOutput]:
    """Return the merged outputs of the requests on a model, one request at a time, one step at a time."""
    engine, found = tiny_engine(**(ALL_MODELS | WINDOWS)[model]), {}
    for i, (prompt, one) in enumerate(MIXED):
        prepared = engine.prepare(prompt, one)
        for index in range(one.n):
            engine.add_request(f"{i}-{index}", prepared, index=index)
            found |= drain(engine)
    return {request_id: merge_outputs(outputs) for request_id, outputs in found.items()}
