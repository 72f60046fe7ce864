"""Checks a checkpoint directory before it is loaded: its completeness, its validity and its memory requirement.

Loading reads gigabytes and fails late, with messages about tensors. These checks read only the small JSON files and the
headers of the weight files.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError, safe_open

from metal_engine.checkpoints.file_checks import MAX_HEADER_BYTES, check_readable, read_json, visible_files
from metal_engine.errors import ModelLoadError, one_line, short
from metal_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
# Files with a model's weights.
OWN_WEIGHTS = "model*.safetensors"
_LFS_POINTER = b"version https://git-lfs"
_ELEMENT_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16}
_ELEMENT_BITS |= {"I16": 16, "U16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
# Limit of the tensors of all files together. The largest published models have 210,000. Matching the names of tensors
# with a model takes 2 KB of memory and 20 us per tensor.
_MAX_TENSORS = 1 << 18
# No model has this many dimensions. MLX's sizes are int32.
_MAX_DIMS = 16
_MAX_SIZE = (1 << 31) - 1
_INTEGERS = ("I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8", "BOOL")


# Sections of config.json that must be objects, if present.
_SECTIONS = ("text_config", "quantization", "quantization_config")
# Settings that determine how many layer modules an architecture creates.
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# Settings that this engine uses. mlx-lm checks the rest of config.json.
_SIZES = ("hidden_size", "num_attention_heads", "head_dim", "vocab_size", "sliding_window")
# Settings with the length of the longest sequence.
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
# Settings that may be a list with one value per layer.
_MAYBE_LISTS = ("num_attention_heads",)
# Settings with the number of keys or blocks that a query attends to, or with the number of keys of a block.
_NUMBERS_OF_KEYS = ("index_topk", "index_topk_blocks", "index_block_size", "attention_chunk_size")
_FILE_NAME = re.compile(r"[^/\\\0]{1,255}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file: its name, safetensors type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _ELEMENT_BITS.get(self.dtype, 8) // 8


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the ``config.json`` of a checkpoint.

    InternVL's ``llm_config`` is also added as ``text_config``.

    Raises:
        ModelLoadError: the folder is not a checkpoint, or the file is invalid.
    """
    path = folder / "config.json"
    if not path.is_file():
        ggufs = visible_files(folder, "*.gguf")
        hint = f"; name the file itself: {ggufs[0]}" if ggufs else ""
        raise ModelLoadError(f"{folder} has no config.json: not a model directory{hint}")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{path} names no model_type: not the configuration of a model")
    if "llm_config" in config:  # InternVL's name
        config.setdefault("text_config", config["llm_config"])
    for name in _SECTIONS:
        if not isinstance(config.get(name) or {}, dict):
            raise ModelLoadError(f"{path}: {name} must be a JSON object, not {short(config[name])}")
    for name, value in _sizes(config):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_SIZE:
            raise ModelLoadError(f"{path}: {name} is {short(value)}, which is not a size")
    for section in (config, config.get("text_config") or {}):
        for name in _NUMBERS_OF_KEYS:
            value = section.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ModelLoadError(f"{path}: {name} is {short(value)}, which is not a number of keys")
    return config


def _sizes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each size in a configuration, except valid lists with one size per layer."""
    for section in (config, config.get("text_config") or {}):
        for name in (*_LAYER_COUNTS, *_SIZES, *_CONTEXT):
            value = section.get(name)
            if value not in (None, False) and not (name in _MAYBE_LISTS and isinstance(value, list)):
                yield name, value


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens, extended by YaRN if declared; None if ``config`` lacks a context length.

    ``config`` is a configuration, or its section with the text model.
    """
    length = next((int(config[key]) for key in _CONTEXT if config.get(key)), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if length is None or not isinstance(scaling, dict) or "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return length
    factors: list[Any] = [scaling.get("factor"), scaling.get("original_max_position_embeddings")]
    if not all(isinstance(value, int | float) and 0 < value <= _MAX_SIZE for value in factors):
        return length
    return max(length, min(int(math.prod(factors)), _MAX_SIZE))


def check_num_layers(config: dict[str, Any], num_tensors: int) -> None:
    """Refuse a configuration with more layers than the weights have tensors, before the layers are created.

    Raises:
        ModelLoadError: there are more layers than tensors.
    """
    for name, value in _sizes(config):
        if name in _LAYER_COUNTS and value > num_tensors:
            raise ModelLoadError(
                f"config.json says that {name} is {value}, but the weights have only {num_tensors} tensors: "
                "they do not belong together"
            )


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights, sorted by name, after checking that no file is missing.

    Raises:
        ModelLoadError: there are no weight files, or files that the index lists are missing.
    """
    files = visible_files(folder, OWN_WEIGHTS)
    index = folder / INDEX
    if index.is_file():
        listed = listed_files(index)
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder} is half-downloaded: {len(missing)} of {len(listed)} weight files are missing, "
                f"{missing[0]} first; fetch the rest"
            )
    if not files:
        others = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in visible_files(folder, pattern)]
        hint = f" (there is {others[0]}, which cannot be read from a directory)" if others else ""
        raise ModelLoadError(f"{folder} has no weights: no {OWN_WEIGHTS}{hint}")
    return files


def listed_files(index: Path) -> list[str]:
    """Return the names of the weight files that an index (``model.safetensors.index.json``) lists, sorted.

    Raises:
        ModelLoadError: the index is invalid or has no ``weight_map``, or an entry is not a plain file name.
    """
    weight_map = read_json(index, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelLoadError(f"{index} has no weight_map: download it again")
    for name in weight_map.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise ModelLoadError(f"{index} lists {short(name)}, which is not the name of a file beside it")
    return sorted(set(weight_map.values()))


def stored_tensors(files: list[Path]) -> Iterator[StoredTensor]:
    """Yield every tensor in some safetensors files, from their headers.

    Raises:
        ModelLoadError: a file is truncated or is not a safetensors file, or the files have too many tensors.
    """
    num_tensors = 0
    for path in files:
        check_readable(path)
        with path.open("rb") as start:
            if start.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelLoadError(f"{path} is only a Git LFS pointer: run `git lfs pull` in {path.parent}")
        try:
            with safe_open(path, "np") as file:
                names = file.keys()
                num_tensors += len(names)
                if num_tensors > _MAX_TENSORS:
                    raise ModelLoadError(f"the files up to {path} have {num_tensors} tensors: more than {_MAX_TENSORS}")
                slices = {name: file.get_slice(name) for name in names}
                tensors = [StoredTensor(n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()]
        except SafetensorError as error:
            raise ModelLoadError(
                f"{path} is truncated or is not a safetensors file ({one_line(error)}): if it is half-downloaded, "
                "download it again"
            ) from error
        for tensor in tensors:
            _check_shape(tensor, path)
            yield tensor


def _check_shape(tensor: StoredTensor, path: Path | str) -> None:
    if len(tensor.shape) > _MAX_DIMS or not all(0 <= size <= _MAX_SIZE for size in tensor.shape):
        raise ModelLoadError(f"{path}: tensor {short(tensor.name)} has a shape that no array can have")


def parse_safetensors_header(header: bytes, path: str) -> list[StoredTensor]:
    """Parse a safetensors header that was read without the rest of its file, and return its tensors.

    Args:
        header: JSON text after the file's first 8 bytes.
        path: name of the file in error messages.

    Raises:
        ModelLoadError: the text is not a safetensors header, or it has too many tensors or an impossible shape.
    """
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        tensors = [StoredTensor(n, str(e["dtype"]), tuple(map(int, e["shape"]))) for n, e in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file ({one_line(error)})") from error
    if len(tensors) > _MAX_TENSORS:
        raise ModelLoadError(f"{path} has {len(tensors)} tensors: more than {_MAX_TENSORS}")
    for tensor in tensors:
        _check_shape(tensor, path)
    return tensors


# Prefixes of the names of a multimodal model's tensors outside its text model. mlx-lm leaves these tensors out.
_VISION = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|vision_encoder|vision_embedder|visual|multi_modal_projector|mm_projector"
    r"|embed_vision|connector|mlp1)\."
)
_AUDIO = re.compile(r"(?:model\.)?(?:audio_tower|embed_audio)\.")


def is_vision_tensor(name: str) -> bool:
    """Return True if the tensor of this name belongs to an image encoder."""
    return _VISION.match(name) is not None


def text_tensors(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors of the text model."""
    return [tensor for tensor in tensors if not (_VISION.match(tensor.name) or _AUDIO.match(tensor.name))]


def vision_tensors(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors of the image encoder."""
    return [tensor for tensor in tensors if is_vision_tensor(tensor.name)]


def weight_bytes(tensors: Iterable[StoredTensor], config: dict[str, Any], float_bytes: int | None) -> int:
    """Return the size of weights in memory, in bytes.

    Args:
        tensors: tensors as stored.
        config: configuration of the checkpoint, with the bits of quantized weights.
        float_bytes: bytes per element if all weights are dequantized and converted; None if weights stay as stored.

    Raises:
        ModelLoadError: the configuration has an impossible number of bits.
    """
    stored = {tensor.name: tensor for tensor in tensors}
    if float_bytes is None:
        return sum(tensor.nbytes for tensor in stored.values())
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    default_bits = quantization.get("bits", 4)
    total = 0
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and f"{module}.scales" in stored:
            own = quantization.get(module)
            bits = own.get("bits", 4) if isinstance(own, dict) else default_bits
            if bits not in range(1, 33):
                raise ModelLoadError(f"config.json: quantized weights have {short(bits)} bits, which is impossible")
            total += tensor.size * 32 // bits * float_bytes
        elif kind in ("scales", "biases", "global_scale") and f"{module}.scales" in stored:
            continue  # removed by dequantization
        else:
            total += tensor.nbytes if tensor.dtype in _INTEGERS else tensor.size * float_bytes
    return total


# --- generation_config.json ---

# Sampling parameters that a checkpoint may recommend as defaults for requests. vLLM has the same list.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def eos_token_ids(*configs: dict[str, Any]) -> frozenset[int]:
    """Return all token ids that end generation, from the top level and the ``text_config`` of each configuration."""
    found: set[int] = set()
    for config in configs:
        for place in (config, config.get("text_config")):
            eos = place.get("eos_token_id") if isinstance(place, dict) else None
            found.update(i for i in (eos if isinstance(eos, list) else [eos]) if _is_token_id(i))
    return frozenset(found)


def _is_token_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read ``generation_config.json`` in a folder. Returns an empty dictionary if there is no such file.

    Raises:
        ModelLoadError: the file is invalid.
    """
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def default_sampling(generation_config: dict[str, Any]) -> dict[str, float]:
    """Return the sampling parameters that a checkpoint recommends, under their names in a request.

    Invalid values are left out, with a warning in the log.
    """
    found: dict[str, float] = {}
    for name in _SAMPLING:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except (TypeError, ValueError) as error:
            logger.warning("generation_config.json: %s is ignored: %s", name, error)
        else:
            found[name] = value
    return found
