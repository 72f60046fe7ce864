"""A draft head beside images. Outputs equal mlx-vlm's, and drafts equal the drafts of an uncached float64 computation.

The head gets the features of image tokens, and the rotary positions on three axes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.models.draft_head import PagedDraftHead
from metal_engine.models.multimodal.encoder import Axes
from tests.models.multimodal.test_generation import PARTS, TOLERANCE
from tests.support.draft_heads import HeadReference, draft_always, head_outputs, random_head, watch_drafts
from tests.support.speculation import draft_for_free, head_config
from tests.support.vision import (
    QWEN3_5,
    Golden,
    VisionPrompt,
    gap,
    golden,
    make_engine,
    make_tiny_vision,
    run,
    vision_prompt,
)
from tools.fixtures.stepped_engine import SteppedEngine

NUM_TOKENS = 12


class Model(HeadReference):
    """The tiny Qwen3.5 with a random head, and greedy outputs and drafts without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = make_tiny_vision(QWEN3_5)
        self.head = PagedDraftHead(random_head(self.tiny.paged.model), self.tiny.paged)
        self.text: Any = self.tiny.paged.model.language_model
        self.prompts = [vision_prompt(self.tiny, parts, seed) for seed, parts in enumerate(PARTS)]
        self.expected = [golden(self.tiny, prompt, NUM_TOKENS) for prompt in self.prompts]
        self.table = np.array(self.text.model.embed_tokens.weight).astype(np.float64)
        self.lm_head = np.array(self.text.lm_head.weight).astype(np.float64)
        self.axes: Axes = self.tiny.encoder.axes

    def engine(self, **options: Any) -> SteppedEngine:
        engine = make_engine(self.tiny, draft=self.head, speculative=head_config(3), **options)
        draft_for_free(engine)
        draft_always(engine)
        return engine

    def logits(self, known: list[int], drafts: list[int]) -> np.ndarray:
        (prompt,) = (one for one in self.prompts if known[: len(one.token_ids)] == one.token_ids)
        length, num_rows = len(prompt.token_ids), len(known) - 1
        inputs = {name: mx.array(array) for name, array in prompt.inputs.items()}
        pixels = inputs.pop("pixel_values", None)
        merged = self.tiny.reference.get_input_embeddings(mx.array([prompt.token_ids]), pixels, **inputs).inputs_embeds
        embeddings = np.concatenate([np.array(merged[0]).astype(np.float64), self.table[known[length:]]])
        axes = np.repeat(np.arange(num_rows + len(drafts))[None], 3, axis=0)
        if prompt.images is not None:
            axes = prompt.images.axes.at(0, num_rows + len(drafts))
        model = self.tiny.reference.language_model.model
        ids = mx.array([known[:-1]])
        states = model(
            ids,
            inputs_embeds=mx.array(embeddings[None, :-1].astype(np.float32)),
            position_ids=mx.array(axes[:, None, :num_rows]),
        )
        hidden, following, rows = np.array(states[0]).astype(np.float64), embeddings[1:], []
        args = self.text.args
        positions = axes[self.axes.of_frequencies(int(args.head_dim * args.partial_rotary_factor) // 2)].T
        for draft in drafts:
            output = head_outputs(self.head.head, args, following, hidden, positions[: len(hidden)])
            rows.append(output[-1] @ self.lm_head.T)
            hidden, following = np.concatenate([hidden, output[-1:]]), np.concatenate([following, self.table[[draft]]])
        return np.array(rows)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def drafts_of(model: Model, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Run the prompts, whose outputs must be mlx-vlm's. Return known tokens and the head's drafts after them."""
    with monkeypatch.context() as patch:
        found = watch_drafts(patch)
        engine = model.engine(**options)
        outputs = run(engine, model.prompts, NUM_TOKENS)
    assert max(gap(output, one) for output, one in zip(outputs, model.expected, strict=True)) < TOLERANCE
    assert engine.core.metrics.num_draft_tokens > 20
    assert engine.scheduler.num_preemptions > 0 or options.get("num_blocks") is None
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 512},
        {"budget": 37},
        {"budget": 13, "ahead": True},
        {"budget": 64, "num_blocks": 18},
        {"budget": 19, "replay": True, "ahead": True, "behind": True},
        {"budget": 64, "caching": True},
    ],
    ids=str,
)
def test_drafts_with_images_equal_the_uncached_reference(
    model: Model, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drafts_of(model, monkeypatch, **options)
    assert max(model.gap(known, drafts) for known, drafts in found[::2]) < 1e-4  # the reference is slow


def test_a_chunk_that_ends_before_an_image(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head gets the embedding of the image token for that row, if the image is not encoded yet."""
    prompt: VisionPrompt = model.prompts[0]
    expected: Golden = model.expected[0]
    engine = model.engine(budget=prompt.images.images[0].start)
    (output,) = run(engine, [prompt], NUM_TOKENS)
    assert gap(output, expected) < TOLERANCE and engine.core.metrics.num_draft_tokens > 5
