"""A draft head beside images. Outputs equal mlx-vlm's, and drafts equal the drafts of an uncached float64 computation.

The head gets the features of image tokens, and the rotary positions on three axes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.models.draft_head import PagedDraftHead
from metal_engine.models.multimodal.encoder import Axes
from metal_engine.runner import head_drafter, image_rows
from metal_engine.runner.features import FeatureCache
from metal_engine.runner.head_drafter import HeadDrafter
from metal_engine.step import Drafting
from tests.models.multimodal.test_generation import PARTS, TOLERANCE
from tests.support.draft_heads import draft_always, head_outputs, random_head
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


class Model:
    """The tiny Qwen3.5 with a random head, and greedy outputs and drafts without a cache."""

    def __init__(self) -> None:
        self.tiny = make_tiny_vision(QWEN3_5)
        self.head = PagedDraftHead(random_head(self.tiny.paged.model), self.tiny.paged)
        self.text: Any = self.tiny.paged.model.language_model
        self.prompts = [vision_prompt(self.tiny, parts, seed) for seed, parts in enumerate(PARTS)]
        self.expected = [golden(self.tiny, prompt, NUM_TOKENS) for prompt in self.prompts]
        self.table = np.array(self.text.model.embed_tokens.weight).astype(np.float64)
        self.lm_head = np.array(self.text.lm_head.weight).astype(np.float64)
        assert self.tiny.encoder.axes is not None
        self.axes: Axes = self.tiny.encoder.axes
        self._gaps: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def engine(self, **options: Any) -> SteppedEngine:
        engine = make_engine(self.tiny, draft=self.head, speculative=head_config(3), **options)
        draft_for_free(engine)
        draft_always(engine)
        return engine

    def logits(self, known: list[int], drafts: list[int]) -> np.ndarray:
        """Return the head's logits at each of some drafts that follow known tokens, [T, V]."""
        (prompt,) = (one for one in self.prompts if known[: len(one.token_ids)] == one.token_ids)
        length, num_rows = len(prompt.token_ids), len(known) - 1
        inputs = {name: mx.array(array) for name, array in prompt.inputs.items()}
        pixels = inputs.pop("pixel_values", None)
        merged = self.tiny.reference.get_input_embeddings(mx.array([prompt.token_ids]), pixels, **inputs).inputs_embeds
        embeddings = np.concatenate([np.array(merged[0]).astype(np.float64), self.table[known[length:]]])
        axes = np.repeat(np.arange(num_rows + len(drafts))[None], 3, axis=0)
        if prompt.images is not None:
            assert prompt.images.axes is not None
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

    def gap(self, known: list[int], drafts: list[int]) -> float:
        """Return the largest gap between the best logit and a draft's logit, relative to the largest magnitude."""
        key = tuple(known), tuple(drafts)
        if key not in self._gaps:  # most tests have the same outputs and drafts
            gaps = [
                (row.max() - row[i]) / np.abs(row).max()
                for row, i in zip(self.logits(known, drafts), drafts, strict=True)
            ]
            self._gaps[key] = float(max(gaps))
        return self._gaps[key]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def drafts_of(model: Model, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Run the prompts, whose outputs must be mlx-vlm's. Return known tokens and the head's drafts after them."""
    found: list[tuple[list[int], list[int]]] = []
    draft = HeadDrafter.draft

    def watched(self: HeadDrafter, table: Any, plan: Any) -> Drafting | None:
        drafting = draft(self, table, plan)
        if drafting is not None:
            found.extend((table.token_ids(table.index(r)).tolist(), d) for r, d in drafting.token_ids.items() if d)
        return drafting

    with monkeypatch.context() as patch:
        patch.setattr(HeadDrafter, "draft", watched)
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
def test_drafts_are_those_of_the_reference(
    model: Model, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drafts_of(model, monkeypatch, **options)
    assert max(model.gap(known, drafts) for known, drafts in found[::2]) < 1e-4  # the reference is slow


@pytest.mark.parametrize("mutant", ["no features", "shifted features", "one axis", "no delta in chains"])
def test_mistakes_change_drafts_but_no_output(model: Model, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, kept = PagedDraftHead.__call__, FeatureCache.kept_of_step

    def on_one_axis(self: PagedDraftHead, token_ids: Any, hidden: Any, rows: Any, *args: Any) -> Any:
        return call(self, token_ids, hidden, replace(rows, rotary_positions=None), *args)

    def shifted(self: FeatureCache, images: image_rows.ImageRows | None) -> Any:
        return kept(self, None if images is None else replace(images, rows=np.roll(images.rows, 1)))

    if mutant == "no features":
        monkeypatch.setattr(FeatureCache, "kept_of_step", lambda self, images: None)
    elif mutant == "shifted features":
        monkeypatch.setattr(FeatureCache, "kept_of_step", shifted)
    elif mutant == "one axis":
        monkeypatch.setattr(PagedDraftHead, "__call__", on_one_axis)
    else:
        monkeypatch.setattr(head_drafter, "replace", lambda rows, **changes: rows)
    found = drafts_of(model, monkeypatch)
    assert max(model.gap(known, drafts) for known, drafts in found[::3]) > 1e-3  # the reference is slow


def test_a_chunk_that_ends_before_an_image(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head gets the embedding of the image token for that row, if the image is not encoded yet."""
    prompt: VisionPrompt = model.prompts[0]
    assert prompt.images is not None
    expected: Golden = model.expected[0]
    engine = model.engine(budget=prompt.images.images[0].start)
    (output,) = run(engine, [prompt], NUM_TOKENS)
    assert gap(output, expected) < TOLERANCE and engine.core.metrics.num_draft_tokens > 5
