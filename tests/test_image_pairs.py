"""Images beside other features, in engines on checkpoints: outputs are those of mlx-vlm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from metal_engine.build import build_engine
from metal_engine.settings.args import EngineArgs
from tests.support.draft_heads import draft_always, random_head
from tests.support.speculation import draft_for_free
from tests.support.vision import QWEN3_5, golden, tiny_text_model, vision_prompt
from tests.test_image_input import PARTS, SIZES, run_prompt, write_vision_checkpoint


def test_a_draft_head(tmp_path: Path) -> None:
    model, head = tmp_path / "m", tmp_path / "head"
    tiny = write_vision_checkpoint(model, QWEN3_5)
    head.mkdir()
    flat: Any = tree_flatten(random_head(tiny_text_model(QWEN3_5)).parameters())
    mx.save_safetensors(str(head / "mtp.safetensors"), {f"mtp.{name}": array for name, array in flat})
    (head / "config.json").write_text('{"norms": "unshifted"}')
    speculative = json.dumps({"method": "auto", "num_speculative_tokens": 2, "model": str(head)})
    engine = build_engine(EngineArgs(model=str(model), speculative_config=speculative, **SIZES))
    assert engine.core.config.model.image_refusal is None and engine.core.config.draft is not None
    draft_for_free(engine.core)
    draft_always(engine.core)  # type: ignore[arg-type]
    prompt = vision_prompt(tiny, PARTS)
    assert run_prompt(engine, prompt, 12) == golden(tiny, prompt, 12).token_ids
    assert engine.core.metrics.num_draft_tokens > 5
