"""The demo model compared with llama.cpp: the same tokens and the same logits.

``tools/fixtures/llama_cpp.py`` creates the fixture. ``make test-full`` creates it again and compares.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metal_engine.checkpoints.demo import GGUF_SHA256
from metal_engine.text.tokenizer import Tokenizer
from tests.support.gguf_files import last_logits
from tools.fixtures.llama_cpp import TEXTS, LlamaCpp, make_fixture

ROOT = Path(__file__).parents[3]
FIXTURE: dict[str, Any] = json.loads((ROOT / "tests/fixtures/llama_cpp_smollm2.json").read_text())
# Both compute in float32 from the same dequantized weights, so only the order of sums differs. A float32 sum of 1,536
# terms has a relative error of about 1e-6, 30 layers add to it, and logits reach 40. 5e-4 is ten times this error
# (5e-5 was measured). 8-bit activations would cause a hundred times more.
LOGITS_TOLERANCE = 5e-4


def test_fixture_is_of_the_demo_model() -> None:
    assert FIXTURE["model_sha256"] == GGUF_SHA256
    assert len(FIXTURE["texts"]) >= 30
    assert len(FIXTURE["prompts"]) >= 8


@pytest.mark.parametrize("case", FIXTURE["texts"] + FIXTURE["prompts"], ids=lambda case: ascii(case["text"][:30]))
def test_token_ids(demo_tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    tokenizer = demo_tokenizer.hf_tokenizer
    token_ids = tokenizer.encode(case["text"], add_special_tokens=False)
    assert token_ids == case["token_ids"]
    # The file does not add a BOS token.
    assert tokenizer.encode(case["text"]) == case["token_ids"]
    assert tokenizer.decode(token_ids) == case["text"]


@pytest.mark.parametrize("case", FIXTURE["prompts"], ids=lambda case: ascii(case["text"][:30]))
def test_first_token_logits(reference_model: Any, case: dict[str, Any]) -> None:
    logits = last_logits(reference_model, case["token_ids"])
    assert np.abs(logits[case["top_ids"]] - case["top_logits"]).max() < LOGITS_TOLERANCE
    # No other logit exceeds the last of the top logits.
    assert np.delete(logits, case["top_ids"]).max() < case["top_logits"][-1] + LOGITS_TOLERANCE
    # The smallest margin in the fixture is 0.01, so the first token is the same.
    assert case["top_logits"][0] - case["top_logits"][1] > 2 * LOGITS_TOLERANCE
    assert logits.argmax() == case["top_ids"][0]


@pytest.mark.full
def test_fixture_equals_the_results_of_llama_cpp(demo_path: Path) -> None:
    """Fails without ``llama-cpp-python``; it is not skipped."""
    made = make_fixture(demo_path)
    assert made["texts"] == FIXTURE["texts"]
    for new, old in zip(made["prompts"], FIXTURE["prompts"], strict=True):
        assert new["token_ids"] == old["token_ids"]
        # Other versions and processors add in another order, so nearly equal logits may change places.
        for token_id, logit in zip(new["top_ids"], new["top_logits"], strict=True):
            if token_id in old["top_ids"]:
                assert abs(logit - old["top_logits"][old["top_ids"].index(token_id)]) < LOGITS_TOLERANCE
        assert len(set(new["top_ids"]) & set(old["top_ids"])) >= len(old["top_ids"]) - 1


@pytest.mark.full
def test_random_texts_and_prompts_live(demo_path: Path, demo_tokenizer: Tokenizer, reference_model: Any) -> None:
    """Random mixtures of pieces of the texts: 500 are tokenized, and the first 10 run through both models."""
    llama = LlamaCpp(demo_path)
    generator = random.Random(0)
    alphabet = "".join(TEXTS)
    for number in range(500):
        pieces = [
            "".join(generator.choices(alphabet, k=generator.randint(1, 12)))
            if generator.random() < 0.5
            else generator.choice(TEXTS)[generator.randint(0, 10) :][: generator.randint(1, 30)]
            for _ in range(generator.randint(1, 8))
        ]
        text = "".join(pieces)
        token_ids = llama.tokenize(text)
        assert demo_tokenizer.encode(text) == token_ids, text
        if number < 10:
            difference = np.abs(last_logits(reference_model, token_ids) - llama.logits(token_ids))
            assert difference.max() < LOGITS_TOLERANCE, text
