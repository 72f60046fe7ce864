"""Check at load that images reach a model correctly: compares a tiny prompt with mlx-vlm's own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.rows import ImageSpans, step_rows
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.kv_cache.writes import choose_writes
from metal_engine.models.check import LOGITS_TOLERANCE
from metal_engine.models.multimodal.encoder import ImageFeatures
from metal_engine.models.multimodal.merging import StepImages
from metal_engine.models.multimodal.mlx_vlm_encoder import MlxVlmEncoder
from metal_engine.models.multimodal.published_masks import published_masks
from metal_engine.models.paged_model import PagedModel
from metal_engine.prompt_images import AxesPositions, PromptImage

_ROWS, _COLUMNS = 3, 4  # features of the image, if its size is free
_NUM_BEFORE, _NUM_AFTER = 5, 6  # text tokens around the image
_BLOCK_SIZE = 8
_QUANTIZED = nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear
# In half precision, rounding may route a token to another expert, as in the check of text.
_ATTEMPTS = {mx.float32: 1, mx.float16: 3, mx.bfloat16: 3}


@dataclass(frozen=True)
class _Prompt:
    """A prompt with one image, with mlx-vlm's own logits for its tokens, [T, vocab_size] float32."""

    token_ids: np.ndarray
    image: PromptImage
    axes: AxesPositions | None
    logits: np.ndarray


def check_images(paged: PagedModel, encoder: MlxVlmEncoder, language_model: nn.Module) -> float:
    """Run a tiny prompt with an image in chunks, and compare it with mlx-vlm's forward pass of the whole prompt.

    Chunks end within the image, unless its tokens attend to each other. Both sides use the same weights. K and V are
    not quantized in the check. Allocates the pool of ``paged``, and releases it at the end.

    Args:
        paged: model that takes the features of ``encoder``.
        encoder: image encoder of the model, without its language model.
        language_model: mlx-vlm's language model. Its weights are replaced by those of the text model.

    Returns:
        Largest difference of a logit, divided by the largest magnitude of the logits of its row.

    Raises:
        UnsupportedModelError: the logits differ.
        ValueError: the language model and the text model have different weights.
        Exception: any other error of mlx-vlm.
    """
    share_text_weights(language_model, paged.model)
    gap = 0.0
    for seed in range(_ATTEMPTS[paged.dtype]):
        with encoder.language_model(language_model):
            prompt = _prompt(encoder, paged.vocab_size, seed)
        pool = paged.pool if paged.kv_bits is None else paged.pool.unquantized()
        with paged.using_pool(pool):
            gap = _largest_gap(paged, encoder, prompt)
        if gap <= LOGITS_TOLERANCE[paged.dtype]:
            return gap
    raise UnsupportedModelError(f"logits of a prompt with an image are off from mlx-vlm's by {gap:.1g} of their size")


def share_text_weights(language_model: nn.Module, model: nn.Module) -> None:
    """Set the weights of mlx-vlm's language model to the arrays of mlx-lm's model, without a copy.

    Only the matrices that compute keys and values from latents (MLA) are new arrays, because mlx-lm stores them in
    another form.

    Args:
        language_model: mlx-vlm's model, with weights that are not evaluated yet.
        model: mlx-lm's model of the same text model. Its quantized layers are shared, too.

    Raises:
        ValueError: the models have different weights.
    """
    text = cast(nn.Module, getattr(model, "language_model", model))
    own = {name for name, _ in language_model.named_modules()}
    trunk = "" if "model" in own else "model."  # SmolVLM's layers are in the language model itself
    quantized = [
        (name.removeprefix(trunk), module)
        for name, module in text.named_modules()
        if isinstance(module, _QUANTIZED) and name.removeprefix(trunk) in own
    ]
    language_model.update_modules(cast(dict[str, Any], tree_unflatten(quantized)))
    weights = dict(_latent_weights(text, own))
    parameters = ((name.removeprefix(trunk), array) for name, array in _parameters(text))
    weights |= {name: array for name, array in parameters if name.rpartition(".")[0] in own}
    if "lm_head" in own and "lm_head" not in text:  # tied to the embedding
        language_model.lm_head = dict(text.named_modules())["model.embed_tokens"].as_linear
    language_model.load_weights(list(weights.items()))


def _latent_weights(text: nn.Module, own: set[str]) -> Iterator[tuple[str, mx.array]]:
    """Yield (name, matrix) for each matrix that computes keys and values from latents (``kv_b_proj``).

    mlx-lm stores it as two matrices for each head, ``embed_q`` and ``unembed_out``.

    Args:
        text: mlx-lm's text model.
        own: names of the modules of mlx-vlm's language model.
    """
    for name, module in text.named_modules():
        if name.endswith(".embed_q") and (joined := name.removesuffix("embed_q") + "kv_b_proj") in own:
            values = dict(text.named_modules())[name.removesuffix("embed_q") + "unembed_out"]
            by_head = mx.concatenate([_plain(module).swapaxes(-1, -2), _plain(values)], axis=1)
            yield f"{joined}.weight", by_head.reshape(-1, by_head.shape[-1])


def _plain(module: Any) -> mx.array:
    if "scales" not in module:
        return cast(mx.array, module.weight)
    biases = module.get("biases")
    return mx.dequantize(module.weight, module.scales, biases, module.group_size, module.bits)


def _parameters(module: nn.Module) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))


def _prompt(encoder: MlxVlmEncoder, vocab_size: int, seed: int) -> _Prompt:
    """Return a prompt with random text and an image, and mlx-vlm's logits for it.

    The encoder must have its language model (:meth:`MlxVlmEncoder.language_model`), which this function runs.
    """
    from mlx_vlm.models.cache import make_prompt_cache

    model = encoder.model
    sample = encoder.sample(_ROWS, _COLUMNS)
    values = (value for name, value in vars(model.config).items() if name.endswith(("_token_id", "_token_index")))
    control = {token for value in values for token in (value if isinstance(value, list) else [value])}
    text = [token for token in range(vocab_size) if token not in control]
    before, after = np.split(np.random.default_rng(seed).choice(text, _NUM_BEFORE + _NUM_AFTER), [_NUM_BEFORE])
    start = getattr(model.config, "vision_start_token_id", None)
    if start is not None:  # mlx-vlm finds images of Qwen by this token
        before[-1] = start
    placeholders = np.full(sample.num_features, encoder.image_token_id)
    token_ids = np.concatenate([before, placeholders, after]).astype(np.int32)
    positions = np.arange(_NUM_BEFORE, _NUM_BEFORE + sample.num_features, dtype=np.int32)

    input_ids = mx.array(token_ids[None])
    inputs = {name: mx.array(array) for name, array in sample.inputs.items()}
    pixels = inputs.pop("pixel_values")
    axes = None
    if encoder.axes is not None:
        merged = model.get_input_embeddings(input_ids, pixels, **inputs)
        mx.eval(merged.position_ids, merged.rope_deltas)  # raises errors of operations; NumPy would not
        prompt_axes = np.array(merged.position_ids).reshape(3, -1).astype(np.int32)
        axes = AxesPositions(prompt_axes, int(np.array(merged.rope_deltas).item()))
    cache = make_prompt_cache(model.language_model)
    image = PromptImage(positions, b"", sample.inputs, encoder.bidirectional_layers)
    if image.bidirectional_layers:
        with published_masks(model.language_model, [image]):
            embeddings = model.get_input_embeddings(input_ids, pixels, mask=mx.ones_like(input_ids), **inputs)
            by_layer = {"per_layer_inputs": embeddings.per_layer_inputs}
            logits = model.language_model(
                input_ids, inputs_embeds=embeddings.inputs_embeds, cache=cache, **by_layer
            ).logits[0]
    else:
        logits = model(input_ids, pixel_values=pixels, mask=None, cache=cache, **inputs).logits[0]
    mx.eval(logits)
    return _Prompt(token_ids, image, axes, np.array(logits.astype(mx.float32)))


def _largest_gap(paged: PagedModel, encoder: MlxVlmEncoder, prompt: _Prompt) -> float:
    """Run the prompt in chunks. Return the largest difference of the logits of each chunk's last token.

    Each difference is divided by the largest magnitude of mlx-vlm's logits for the same token.
    """
    num_tokens, image = len(prompt.token_ids), prompt.image
    features = encoder.encode(image.inputs, image.num_features)
    third = image.num_features // 3
    inside = [image.start] if image.bidirectional_layers else [image.start + third, image.start + 2 * third]
    cuts = [0, *inside, num_tokens - 1, num_tokens]
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    paged.pool.allocate(num_blocks, _BLOCK_SIZE, 1)
    gaps = []
    try:
        for start, stop in pairwise(cuts):
            logits = _run_chunk(paged, prompt, features, start, stop)
            mx.eval(logits)
            found = np.array(logits.astype(mx.float32))
            expected = prompt.logits[stop - 1]
            gaps.append(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))
    finally:
        paged.pool.release()
    return float(np.max(gaps))


def _run_chunk(paged: PagedModel, prompt: _Prompt, features: ImageFeatures, start: int, stop: int) -> mx.array:
    """Run the tokens from ``start`` up to ``stop``. Return the logits of the last token, [vocab_size]."""
    block_table = np.arange(-(-len(prompt.token_ids) // _BLOCK_SIZE), dtype=np.int32)[None]
    slots = np.array([1 if start else ZERO_STATE_SLOT], np.int32), np.ones(1, np.int32)
    rows = step_rows(
        block_table,
        np.array([start], np.int32),
        [stop - start],
        _BLOCK_SIZE,
        state_slots=slots,
        make_writes=choose_writes(page_aligned=False),
        rotary_positions=None if prompt.axes is None else prompt.axes.at(start, stop),
    )
    images = None
    first, end = prompt.image.features_in(start, stop)
    if first < end:
        embeddings, *by_layer = (array[first:end] for array in features.arrays)
        images = StepImages(mx.array(prompt.image.positions[first:end] - start), embeddings, tuple(by_layer))
        if prompt.image.bidirectional_layers:
            span = np.array([[prompt.image.start - start, prompt.image.stop - start]], np.int32)
            rows = replace(rows, image_spans=ImageSpans(span, prompt.image.bidirectional_layers))
    input_ids = mx.array(prompt.token_ids[start:stop])
    return paged(input_ids, rows, PortableBackend().for_step(rows), images=images)[0]
