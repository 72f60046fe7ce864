"""Images beside other features, in engines on checkpoints. Outputs equal mlx-vlm's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from metal_engine.loading.build import build_engine
from metal_engine.lora.layers import shape_of
from metal_engine.settings.args import EngineArgs
from tests.loading.test_image_encoder import PARTS, SIZES, run_prompt, write_vision_checkpoint
from tests.support.adapters import ALL
from tests.support.draft_heads import draft_always, random_head
from tests.support.speculation import draft_for_free
from tests.support.vision import QWEN3_5, QWEN3_VL, VisionPrompt, golden, tiny_text_model, vision_prompt
from tools.fixtures.lora_adapters import products_for, write_peft


@pytest.mark.parametrize(
    "config", [pytest.param(QWEN3_VL, marks=pytest.mark.full), QWEN3_5], ids=["qwen3_vl", "qwen3_5"]
)
def test_a_store_of_kv(config: dict[str, Any], tmp_path: Path) -> None:
    """A restarted engine loads the KV of a known prompt, and computes a prompt with another image.

    The next engine finds nothing if the processing of images or the encoder has changed.
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
            counts.append(engine.core.metrics.kv_transfer.prompt_tokens_store)
        engine.close()
        return np.diff(counts).tolist()

    assert num_loaded(prompt) == [0] and num_loaded(prompt, other) == [48, 0]
    assert num_loaded(prompt, mm_processor_kwargs='{"image_mean": [0.4, 0.4, 0.4]}') == [0]
    weights = dict(mx.load(str(model / "model.safetensors")))
    name = next(name for name in weights if name.startswith("vision_tower.") and name.endswith("mlp.linear_fc1.weight"))
    changed = weights | {name: 1.5 * weights[name]}
    mx.eval(changed)
    mx.save_safetensors(str(model / "model.safetensors"), changed, metadata={"format": "mlx"})
    tiny.reference.load_weights([(name, changed[name])], strict=False)
    assert num_loaded(prompt) == [0]


def test_adapters(tmp_path: Path) -> None:
    """An adapter changes the text model only. A prefix with the same image is cached for each adapter."""
    model = tmp_path / "m"
    tiny = write_vision_checkpoint(model, QWEN3_VL)
    layers = dict(tiny_text_model(QWEN3_VL).named_modules())
    names = [f"language_model.model.layers.{i}.{key}" for i in (0, 2) for key in ALL]
    made = products_for({name: shape_of(layers[name]) for name in names}, 2, seed=1)
    folder = write_peft(tmp_path / "a", made, alpha=4.0)  # factor 2
    engine = build_engine(EngineArgs(model=str(model), lora_modules=(f"a={folder}",), **SIZES))
    assert engine.core.config.model.image_refusal is None and engine.adapters is not None
    prompt = vision_prompt(tiny, PARTS)
    plain = golden(tiny, prompt, 6).token_ids
    weights = dict(tree_flatten(tiny.reference.parameters()))
    changed = [(f"{n}.weight", weights[f"{n}.weight"] + mx.array(2 * (a @ b).T)) for n, (a, b) in made.items()]
    tiny.reference.load_weights(changed, strict=False)
    adapted = golden(tiny, prompt, 6).token_ids
    assert plain != adapted
    adapter = engine.adapters.find("a")
    assert run_prompt(engine, prompt, adapter=adapter) == adapted
    assert run_prompt(engine, prompt) == plain
    assert run_prompt(engine, prompt, adapter=adapter) == adapted
    assert engine.core.stats.images_encoded == 1  # the features do not depend on the adapter


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
