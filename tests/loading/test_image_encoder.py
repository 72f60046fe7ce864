"""Image encoders of checkpoints on disk: read, counted, checked, or refused with the reason while text is served."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from copy import deepcopy
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import quantize_model

from metal_engine.checkpoints import image_encoders, loader
from metal_engine.checkpoints.image_encoders import ENCODERS, image_refusal
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.errors import ConfigError, PromptError
from metal_engine.loading.build import build_engine
from metal_engine.lora_adapter import Adapter
from metal_engine.models.multimodal import mlx_vlm_encoder
from metal_engine.models.multimodal.mlx_vlm_encoder import MlxVlmEncoder
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from tests.support.checkpoint_files import write_tokenizer
from tests.support.sweeps import sweep
from tests.support.vision import (
    CONFIGS,
    GEMMA3,
    QWEN3_5,
    QWEN3_VL,
    TinyVision,
    VisionPrompt,
    golden,
    make_tiny_vision,
    merged,
    tiny_vision,
    vision_prompt,
)

SIZES: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 128, "max_num_batched_tokens": 64}
# Settings of Qwen's image processor for the tiny encoders.
PROCESSOR: dict[str, Any] = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 64 * 64}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
PARTS = (7, (4, 6, 1), 9)
DRAFT = '{"method": "draft_model", "model": "./m", "num_speculative_tokens": 2}'
# As published: with InternVL's own name of the text model's configuration.
INTERNVL_CHAT = {name.replace("text_", "llm_"): value for name, value in CONFIGS["internvl_chat"].items()}


# Names of Hugging Face's tensors by mlx-vlm's. Then tensors whose channels are before their height and width.
PUBLISHED_NAMES = {
    "gemma4": {
        "vision_tower.": "model.vision_tower.",
        "embed_vision.": "model.embed_vision.",
        "language_model.model.": "model.language_model.",
    },
    "qwen3_vl": {"vision_tower.": "model.visual.", "language_model.model.": "model.language_model."},
    "smolvlm": {
        "vision_model.": "model.vision_model.",
        "connector.": "model.connector.",
        "language_model.": "model.text_model.",
    },
}
PUBLISHED_CONVOLUTIONS = {
    "model.visual.patch_embed.proj.weight",
    "model.vision_model.embeddings.patch_embedding.weight",
}


def _published_name(config: dict[str, Any], name: str) -> str:
    names = {"language_model.lm_head.": "lm_head."} | PUBLISHED_NAMES[config["model_type"]]
    return next((theirs + name.removeprefix(ours) for ours, theirs in names.items() if name.startswith(ours)), name)


def weights_of(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def write_vision_checkpoint(
    folder: Path,
    config: dict[str, Any],
    *,
    as_published: bool = False,
    sidecar: bool = False,
    bits: int | None = None,
    dtype: mx.Dtype = mx.float32,
) -> TinyVision:
    """Write a checkpoint of mlx-vlm's form. Return the model whose weights it has.

    Args:
        as_published: use the names and the layout of Hugging Face's models.
        sidecar: store the encoder in a file of its own.
        bits: quantize the encoder and the text model.
    """
    tiny = make_tiny_vision(config if "llm_config" not in config else CONFIGS["internvl_chat"])
    tiny.reference.update(tree_map(lambda a: a.astype(dtype), tiny.reference.parameters()))
    full = deepcopy(config)
    if bits is not None:
        quantized, full = quantize_model(tiny.reference, full, 32, bits)
        tiny = TinyVision(config, quantized, tiny.paged, tiny.encoder)
    weights = weights_of(tiny.reference)
    if as_published:
        weights = {_published_name(config, name): array for name, array in weights.items()}
        for name in PUBLISHED_CONVOLUTIONS & weights.keys():
            weights[name] = weights[name].transpose(0, weights[name].ndim - 1, *range(1, weights[name].ndim - 1))
    folder.mkdir(parents=True, exist_ok=True)
    of_text = {name: array for name, array in weights.items() if "language_model." in name or "lm_head" in name}
    of_encoder = {name: array for name, array in weights.items() if name not in of_text}
    if sidecar:
        mx.save_safetensors(str(folder / "vision.safetensors"), of_encoder)
        weights = of_text
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(full))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    write_tokenizer(folder)
    return tiny


def run_prompt(
    engine: BuiltEngine, prompt: VisionPrompt, num_tokens: int = 6, *, adapter: Adapter | None = None
) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    (prepared,) = engine.preparer.prepare_all([prompt.token_ids], params, adapter=adapter, images=[prompt.images])
    engine.core.add_request("r", prepared)
    outputs = []
    while engine.core.has_requests:
        outputs += engine.core.step()
    return merged(outputs).token_ids


def text_prompt(engine: BuiltEngine) -> list[int]:
    return run_prompt(engine, VisionPrompt([1, 2, 3, 4], None), 3)


CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (QWEN3_VL, {}),
    "as published": (QWEN3_VL, {"as_published": True}),
    "sidecar": (QWEN3_5, {"sidecar": True}),
    "quantized": (QWEN3_VL, {"bits": 8}),
    "half precision": (QWEN3_VL, {"dtype": mx.bfloat16}),
    "smolvlm": (CONFIGS["smolvlm"], {}),
    "smolvlm as published": (CONFIGS["smolvlm"], {"as_published": True}),
    "smolvlm quantized": (CONFIGS["smolvlm"], {"bits": 8}),
    "internvl": (CONFIGS["internvl"], {}),
    "internvl_chat": (INTERNVL_CHAT, {}),
    "gemma4 small": (CONFIGS["gemma4 small"], {"as_published": True}),
}
QUICK = ("as published", "sidecar", "smolvlm quantized", "internvl_chat")


@pytest.mark.parametrize("name", sweep(CHECKPOINTS, lambda name: name in QUICK))
def test_a_checkpoint_with_an_encoder(tmp_path: Path, name: str) -> None:
    config, options = CHECKPOINTS[name]
    tiny = write_vision_checkpoint(tmp_path / "m", config, **options)
    (tmp_path / "m" / "._model.safetensors").write_bytes(b"attributes of a file")  # as macOS does
    engine = build_engine(EngineArgs(model=str(tmp_path / "m"), **SIZES))
    model, scheduler = engine.core.config.model, engine.core.config.scheduler
    assert model.image_refusal is None
    assert (scheduler.max_num_encoder_tokens, scheduler.image_cache_tokens) == (2048, 8192)
    assert model.feature_bytes == 64 * 4 * (3 if config is QWEN3_VL else 1)
    if not options.get("bits"):
        plain = sum(array.size * 4 for array in weights_of(tiny.reference).values())
        assert model.weight_bytes == plain  # in float32 on a CPU
    assert engine.core.config.image_bytes > 8192 * model.feature_bytes
    prompt = vision_prompt(tiny, PARTS)
    if not options.get("bits"):
        tiny.reference.update(tree_map(lambda a: a.astype(mx.float32), tiny.reference.parameters()))
    assert run_prompt(engine, prompt) == golden(tiny, prompt, 6).token_ids
    assert len(text_prompt(engine)) == 3


@pytest.mark.parametrize(("name", "budget"), [("gemma3", 64), ("gemma3", None), ("gemma4", None)])
def test_a_step_has_room_for_an_image_that_no_chunk_may_cut(tmp_path: Path, name: str, budget: int | None) -> None:
    tiny = write_vision_checkpoint(tmp_path / "m", CONFIGS[name])
    engine = build_engine(EngineArgs(model=str(tmp_path / "m"), **(SIZES | {"max_num_batched_tokens": budget})))
    assert engine.core.config.model.image_refusal is None
    scheduler = engine.core.config.scheduler
    assert scheduler.max_num_batched_tokens - scheduler.max_num_seqs >= 16 + 2 * engine.core.config.cache.block_size
    prompt = vision_prompt(tiny, PARTS)
    assert run_prompt(engine, prompt) == golden(tiny, prompt, 6).token_ids


def refused(folder: Path, **settings: Any) -> tuple[BuiltEngine, str]:
    engine = build_engine(EngineArgs(model=str(folder), **(SIZES | settings)))
    refusal = engine.core.config.model.image_refusal
    assert refusal is not None
    assert engine.core.config.scheduler.max_num_encoder_tokens == 0 == engine.core.config.image_bytes
    prompt = vision_prompt(tiny_vision("qwen3_vl"), PARTS)
    with pytest.raises(PromptError, match="cannot be given images here"):
        engine.preparer.prepare(prompt.token_ids, SamplingParams(), images=prompt.images)
    assert len(text_prompt(engine)) == 3
    return engine, refusal


def another_position(self: MlxVlmEncoder, *args: Any) -> Any:
    features = _encode(self, *args)
    return type(features)(features.embeddings[::-1], features.by_layer)


_encode = MlxVlmEncoder.encode


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder, patch: patch.setattr(MlxVlmEncoder, "encode", another_position), "are off from mlx-vlm's"),
        (lambda folder, patch: without_encoder(folder), "no weights of an image encoder"),
        (lambda folder, patch: without_encoder(folder, "vision_tower.blocks.1."), "Missing"),
        (lambda folder, patch: patch.setattr(mlx_vlm_encoder, "_create", fail), "mlx-vlm has changed"),
    ],
    ids=["off", "no weights", "half of the weights", "an error of mlx-vlm"],
)
def test_an_encoder_that_does_not_work(
    tmp_path: Path,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_vision_checkpoint(tmp_path / "m", QWEN3_VL)
    tiny_vision("qwen3_vl")  # has a working encoder
    spoil(tmp_path / "m", monkeypatch)
    with caplog.at_level(logging.WARNING, logger="metal_engine.loading.image_encoder"):
        _, refusal = refused(tmp_path / "m")
    assert reason in refusal
    (line,) = [record.getMessage() for record in caplog.records if record.name == "metal_engine.loading.image_encoder"]
    assert "serves text, and refuses images" in line and reason in line


def without_encoder(folder: Path, prefix: str = "vision_tower.") -> None:
    path = str(folder / "model.safetensors")
    weights = {name: mx.array(array) for name, array in mx.load(path).items() if not name.startswith(prefix)}
    mx.eval(weights)
    mx.save_safetensors(path, weights, metadata={"format": "mlx"})


def fail(*args: Any) -> Any:
    raise AttributeError("mlx-vlm has changed")


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (QWEN3_VL, {"speculative_config": DRAFT}, "the method draft_model of --speculative-config takes text only"),
        (
            GEMMA3,
            {"max_num_batched_tokens": 20},
            "at least 16 tokens, which one step .* raise --max-num-batched-tokens",
        ),
        (GEMMA3, {"max_model_len": 16}, "an image has at least 16 tokens, but --max-model-len is 16"),
        (GEMMA3, {"mm_processor_kwargs": '{"do_pan_and_scan": true}'}, "do_pan_and_scan"),
        (QWEN3_VL, {"mm_processor_kwargs": '{"size": "large"}'}, r"image processor cannot be used: \w+Error: "),
        (CONFIGS["llava"], {"max_num_encoder_tokens": 15}, "--max-num-encoder-tokens.* less than the 16 tokens"),
    ],
    ids=["draft_model", "step", "context", "crops", "processor", "encoder tokens"],
)
def test_settings_that_do_not_go_with_images(
    tmp_path: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reason is logged before the weights are read. Settings for images only are an error."""
    write_vision_checkpoint(tmp_path / "m", config)
    monkeypatch.chdir(tmp_path)  # the draft model is the model
    load_weights = loader.load_model

    def load(*args: Any, **kwargs: Any) -> Any:
        assert re.search(reason, caplog.text)
        return load_weights(*args, **kwargs)

    monkeypatch.setattr(loader, "load_model", load)
    if "max_num_encoder_tokens" in settings:
        with pytest.raises(ConfigError, match=reason):
            refused(tmp_path / "m", **settings)
        return
    _, refusal = refused(tmp_path / "m", **settings)
    assert re.search(reason, refusal) and caplog.text.count(refusal) == 1


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        ({"model_type": "llama"}, {}, "text only"),
        ({"model_type": "qwen3_vl", "vision_config": None}, {}, "text only"),
        ({"model_type": "paligemma", "vision_config": {}}, {}, "architecture paligemma has no supported"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, {"tensor_parallel_size": 2}, "several ranks"),
        (
            {"model_type": "qwen3_vl", "vision_config": {}},
            {"speculative_config": '{"method": "draft_model", "model": "a", "num_speculative_tokens": 2}'},
            "the method draft_model",
        ),
    ],
)
def test_reasons_before_the_weights_are_read(config: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    assert reason in (image_refusal(config, EngineArgs(model="m", **settings)) or "")


@pytest.mark.parametrize("method", ["ngram", "mtp", "auto"])
def test_images_work_with_ngram_mtp_and_auto_speculation(method: str) -> None:
    speculative = f'{{"method": "{method}", "num_speculative_tokens": 2}}'
    config = {"model_type": "qwen3_vl", "vision_config": {}}
    assert image_refusal(config, EngineArgs(model="m", speculative_config=speculative)) is None


@pytest.mark.parametrize(
    ("found", "reason"),
    [("0.7.10", None), ("0.7.12", None), ("0.7.9", "0.7.9 is not supported"), ("0.8.0", "0.8.0 is not supported"),
     (None, "mlx-vlm is not installed: pip install 'metal-engine")],
)  # fmt: skip
def test_versions_of_mlx_vlm(found: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "mlx-vlm" and found is None:
            raise metadata.PackageNotFoundError(name)
        return found or "13.0"

    monkeypatch.setattr(image_encoders, "version", version)
    refusal = image_refusal({"model_type": "qwen3_vl", "vision_config": {}}, EngineArgs(model="m"))
    assert refusal is reason is None or (refusal is not None and reason is not None and reason in refusal)


def test_each_encoder_has_a_family() -> None:
    assert set(ENCODERS.values()) == mlx_vlm_encoder.FAMILIES.keys()
