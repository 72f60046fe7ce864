"""Images beside other features, in engines on checkpoints: outputs are those of mlx-vlm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from metal_engine.build import build_engine
from metal_engine.settings.args import EngineArgs
from tests.support.draft_heads import draft_always, random_head
from tests.support.speculation import draft_for_free
from tests.support.vision import QWEN3_5, QWEN3_VL, VisionPrompt, golden, tiny_text_model, vision_prompt
from tests.test_image_input import PARTS, SIZES, run_prompt, write_vision_checkpoint


@pytest.mark.parametrize("config", [QWEN3_VL, QWEN3_5], ids=["qwen3_vl", "qwen3_5"])
def test_a_store_of_kv(config: dict[str, Any], tmp_path: Path) -> None:
    """After a restart, a known prompt is not computed, but a prompt with another image is.

    The next start finds nothing if the processing of images or the encoder has changed.
    """
    model = tmp_path / "m"
    tiny = write_vision_checkpoint(model, config)
    prompt, other = (vision_prompt(tiny, (20, (4, 6, seed), 9)) for seed in (1, 2))

    def num_loaded(*prompts: VisionPrompt, **settings: Any) -> list[int]:
        """Return the number of tokens that a new engine loads for each prompt."""
        settings |= {"kv_cache_dir": str(tmp_path / "kv"), "block_size": 8}
        engine = build_engine(EngineArgs(model=str(model), **SIZES | settings))
        assert engine.core.config.model.image_refusal is None
        counts = [0]
        for one in prompts:
            assert run_prompt(engine, one) == golden(tiny, one, 6).token_ids
            assert engine.core.metrics.kv_transfer is not None
            counts.append(engine.core.metrics.kv_transfer.prompt_tokens_store)
        engine.close()
        return np.diff(counts).tolist()

    assert num_loaded(prompt) == [0]
    assert num_loaded(prompt, other) == [48, 0]
    assert num_loaded(prompt, mm_processor_kwargs='{"image_mean": [0.4, 0.4, 0.4]}') == [0]
    weights = dict(mx.load(str(model / "model.safetensors")))
    name = next(name for name in weights if name.startswith("vision_tower.") and name.endswith("mlp.linear_fc1.weight"))
    changed = weights | {name: 1.5 * weights[name]}
    mx.eval(changed)
    mx.save_safetensors(str(model / "model.safetensors"), changed, metadata={"format": "mlx"})
    tiny.reference.load_weights([(name, changed[name])], strict=False)
    assert num_loaded(prompt) == [0]


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
