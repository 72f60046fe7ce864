"""Rows of an image that attend to each other: the portable backend and its units, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS, Limits
from metal_engine.kv_cache.rows import ImageSpans, StepRows
from tools.fixtures.packed_step import PackedStep, make_step

# (query_len, context_len) of each request, and the images' rows within the segment of each request.
STEPS: dict[str, list[tuple[int, int, list[tuple[int, int]]]]] = {
    "one image": [(20, 0, [(4, 16)])],
    "a whole chunk": [(16, 37, [(0, 16)])],
    "neighbours": [(40, 5, [(2, 14), (14, 26), (30, 39)])],
    "with text and decodes": [(1, 70, []), (30, 3, [(7, 29)]), (1, 5, []), (12, 0, []), (25, 60, [(0, 20)])],
}
MANY_ROWS = {"long": [(180, 40, [(3, 90), (91, 170)]), (1, 300, []), (70, 0, [(1, 69)])]}
TILED = replace(CPU_LIMITS, small_area=0, tile_rows=8, span=2048, scores=512, min_keys=4)
LIMITS = {"cpu": CPU_LIMITS, "gpu": GPU_LIMITS, "tiled": TILED}


def step_with_images(
    parts: list[tuple[int, int, list[tuple[int, int]]]], sees_itself: Any = "every layer", **options: Any
) -> PackedStep:
    step = make_step([(n, context) for n, context, _ in parts], **options)
    starts = step.rows.cu_seqlens_q.tolist()
    spans = [
        (first + a, first + b)
        for first, (_, _, of_request) in zip(starts[:-1], parts, strict=True)
        for a, b in of_request
    ]
    rows = replace(step.rows, image_spans=ImageSpans(np.array(spans, np.int32), sees_itself))
    return replace(step, rows=rows)


def expected(step: PackedStep, **options: Any) -> np.ndarray:
    spans = step.rows.spans_of_layer(options.get("window"))
    return step.reference(scale=0.25, **options, spans=[] if spans is None else spans.tolist())


def error(step: PackedStep, limits: Limits, **options: Any) -> float:
    out, wanted = step.attend(limits, scale=0.25, **options), expected(step, **options)
    assert np.isfinite(out).all()
    return float((np.linalg.norm(out - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max())


@pytest.mark.parametrize("window", [None, 6, 15, 64])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", [*STEPS, *MANY_ROWS])
def test_rows_see_their_image(name: str, limits: str, window: int | None) -> None:
    """Slots before every row's window, and slots after the last row, contain NaN."""
    step = step_with_images((STEPS | MANY_ROWS)[name], window=window)
    step.rows.validate(10_000)
    assert error(step, LIMITS[limits], window=window) < 1e-5


@pytest.mark.parametrize("window", [None, 6])
def test_softcap_and_sinks(window: int | None) -> None:
    step = step_with_images(STEPS["with text and decodes"], window=window)
    assert error(step, CPU_LIMITS, window=window, softcap=2.0) < 1e-5


def test_images_that_attend_only_in_layers_with_windows() -> None:
    step = step_with_images(STEPS["neighbours"], "layers with windows")
    causal = replace(step, rows=replace(step.rows, image_spans=None))
    assert np.array_equal(step.attend(scale=0.25), causal.attend(scale=0.25))
    assert error(step, CPU_LIMITS, window=9) < 1e-5
    assert not np.allclose(step.attend(scale=0.25, window=9), causal.attend(scale=0.25, window=9))


def test_text_rows_have_the_bits_of_a_step_without_images() -> None:
    parts = STEPS["with text and decodes"]
    step = step_with_images(parts)
    text = np.ones(step.rows.num_tokens, bool)
    for first, end in step.rows.image_spans.rows.tolist():  # type: ignore[union-attr]
        text[first:end] = False
    whole = step.attend(scale=0.25)
    causal = replace(step, rows=replace(step.rows, image_spans=None)).attend(scale=0.25)
    np.testing.assert_allclose(whole[text], causal[text], atol=1e-5)
    assert (np.abs(whole[~text] - causal[~text]).max(axis=(1, 2)) > 1e-3).mean() > 0.8


@pytest.mark.parametrize("mutant", ["limit ignored", "limit of the next image", "limit for all layers"])
def test_mutants(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sees_itself = "layers with windows" if mutant == "limit for all layers" else "every layer"
    step = step_with_images(STEPS["neighbours"], sees_itself)
    wanted = expected(step)
    if mutant == "limit ignored":
        monkeypatch.setattr(StepRows, "spans_of_layer", lambda *_: None)
    elif mutant == "limit for all layers":
        monkeypatch.setattr(StepRows, "spans_of_layer", lambda rows, _: rows.image_spans.rows)
    else:
        joined = np.array([[2, 26], [30, 39]], np.int32)
        monkeypatch.setattr(StepRows, "spans_of_layer", lambda *_: joined)
    assert np.abs(step.attend(scale=0.25) - wanted).max() > 0.05


@pytest.mark.parametrize("spans", [[(4, 4)], [(6, 9), (8, 11)], [(-1, 3)], [(5, 41)], [(18, 22)]])
def test_wrong_spans_are_refused(spans: list[tuple[int, int]]) -> None:
    step = make_step([(20, 0), (20, 4)])
    rows = replace(step.rows, image_spans=ImageSpans(np.array(spans, np.int32), "every layer"))
    with pytest.raises(ValueError, match="bad step"):
        rows.validate(10_000)


def test_chunks_of_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="within chunks"):
        step_with_images(STEPS["one image"]).attend(scale=0.25, chunk=8)
