"""Loading: whatever names a model becomes an mlx-lm model, a tokenizer and the facts about both.

A model is named by ``demo``, a ``.gguf`` file, a local directory (MLX or Hugging Face safetensors), or a
repository on the Hugging Face hub.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import dequantize_model, get_total_parameters, load_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from metal_engine.config import DeviceInfo, EngineArgs, ModelInfo
from metal_engine.models.demo import fetch_demo_model
from metal_engine.models.errors import ModelLoadError, UnsupportedModelError
from metal_engine.models.gguf import gguf_eos_token_ids, load_gguf_model, read_gguf_header
from metal_engine.models.gguf_tokenizer import load_gguf_tokenizer

logger = logging.getLogger(__name__)

DEMO_MODEL = "demo"
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# What a checkpoint's weights and tokenizer are made of; the rest of a repository is not fetched.
_HUB_PATTERNS = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
# Context length assumed where a checkpoint does not state one.
_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with its tokenizer.

    Attributes:
        model: an mlx-lm model; not yet wrapped for paging.
        config: the checkpoint's configuration, as mlx-lm reads it.
        tokenizer: a fast ``transformers`` tokenizer.
        eos_token_ids: all ids that end generation.
        name: what to call it.
    """

    model: nn.Module
    config: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: frozenset[int]
    name: str


def load(args: EngineArgs, device: DeviceInfo) -> LoadedModel:
    """Load the model that ``args.model`` names.

    On a CPU everything becomes float32 and quantized weights are dequantized: half precision and quantized
    products run there at a fraction of the speed. On Metal weights stay as they are unless ``--dtype`` says
    otherwise.

    Raises:
        ModelLoadError: it cannot be found, read or run; the message says why.
    """
    on_cpu = device.kind == "cpu"
    dtype = _DTYPES.get(args.dtype, mx.float32 if on_cpu else None)
    if args.model == DEMO_MODEL:
        return _load_gguf(fetch_demo_model(), args, dtype, dequantize=on_cpu, name=DEMO_MODEL)
    path = Path(args.model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"no such file: {path}")
        return _load_gguf(path, args, dtype, dequantize=on_cpu, name=path.stem)
    if not path.is_dir():
        if path.exists() or args.model.startswith((".", "/", "~")):
            raise ModelLoadError(f"{args.model} is neither a directory nor a .gguf file")
        path = _fetch_from_hub(args.model, args.revision)
    return _load_directory(path, args, dtype, dequantize=on_cpu)


def _load_gguf(
    path: Path, args: EngineArgs, dtype: mx.Dtype | None, *, dequantize: bool, name: str
) -> LoadedModel:
    header = read_gguf_header(path)
    model, config = load_gguf_model(path, dtype=dtype or mx.float16, dequantize=dequantize)
    tokenizer = (
        _load_tokenizer(args.tokenizer, args.revision) if args.tokenizer else load_gguf_tokenizer(path)
    )
    return LoadedModel(model, config, tokenizer, frozenset(gguf_eos_token_ids(header)), name)


def _fetch_from_hub(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    local = "give a local directory or a .gguf file instead, or `demo` for the demo model"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_PATTERNS))
    except GatedRepoError as error:
        raise ModelLoadError(f"{repo} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo} has no revision {revision!r} (--revision)") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no repository {repo} on the Hugging Face hub (or no access); {local}"
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"{repo!r} names no model: not a path, and no repository id; {local}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"cannot fetch {repo}: the Hugging Face hub cannot be reached; {local}"
        ) from error


def _load_directory(path: Path, args: EngineArgs, dtype: mx.Dtype | None, *, dequantize: bool) -> LoadedModel:
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json: not a model directory")
    try:
        model, config = load_model(path, lazy=True)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} has no weights (model*.safetensors)") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{path.name}: {str(error).splitlines()[0]}") from error
    if dequantize and config.get("quantization"):
        model = dequantize_model(model)
    if dtype is not None:
        model.update(tree_map(lambda a: _cast(a, dtype), model.parameters()))
    mx.eval(model.parameters())
    tokenizer = _load_tokenizer(args.tokenizer or str(path), args.revision)
    eos = config.get("eos_token_id")
    eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return LoadedModel(model, config, tokenizer, eos_token_ids, args.model)


def _cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _load_tokenizer(path: str, revision: str | None) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of {path}: {str(error).splitlines()[0]}") from error
    if not tokenizer.is_fast:
        raise ModelLoadError(f"the tokenizer of {path} has no fast version; name another with --tokenizer")
    return tokenizer


def model_info(loaded: LoadedModel, kv_bytes_per_token: int, num_layers: int) -> ModelInfo:
    """The facts about a loaded model that the control plane needs."""
    config = loaded.config
    text_config = config.get("text_config", config)
    flat = cast(list[tuple[str, mx.array]], tree_flatten(loaded.model.parameters()))
    parameters = [array for _, array in flat]
    dtypes = {array.dtype for array in parameters if mx.issubdtype(array.dtype, mx.floating)}
    num_heads = text_config.get("num_attention_heads") or 1
    return ModelInfo(
        name=loaded.name,
        model_type=config["model_type"],
        dtype=", ".join(sorted(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)),
        vocab_size=text_config["vocab_size"],
        num_layers=num_layers,
        num_params=get_total_parameters(loaded.model),
        weight_bytes=sum(array.nbytes for array in parameters),
        kv_bytes_per_token=kv_bytes_per_token,
        max_position_embeddings=text_config.get("max_position_embeddings") or _DEFAULT_CONTEXT,
        num_heads=num_heads,
        head_dim=text_config.get("head_dim") or text_config.get("hidden_size", 0) // num_heads or 1,
    )
