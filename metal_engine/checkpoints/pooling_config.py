"""Reads a checkpoint's settings for embeddings and scores: sentence-transformers' files, and the Qwen3-Reranker card.

``modules.json`` lists the modules after the model (``1_Pooling``, ``2_Normalize``). The folder of a module has its
``config.json``.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from metal_engine.checkpoints.file_checks import MAX_SETTINGS_BYTES, check_readable, read_json
from metal_engine.checkpoints.gguf.header import GgufHeader
from metal_engine.errors import ModelLoadError, UnsupportedModelError, one_line, short
from metal_engine.settings.config import PoolerConfig, RerankerConfig

logger = logging.getLogger(__name__)

# sentence-transformers' name of a pooling mode -> pooling type.
_POOLING_TYPES = {"lasttoken": "LAST", "mean": "MEAN", "cls": "CLS"}
# Flag in files of older versions -> name of the pooling mode.
_FLAGS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULE_FOLDER = re.compile(r"[\w.-]{0,100}")
_MAX_MODULES = 64

# Architectures whose tokens attend to all other tokens, regardless of their configuration.
_ENCODERS = frozenset(
    {
        "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "modernbert", "mpnet",
        "new", "nomic_bert", "roberta", "t5", "xlm-roberta",
    }
)  # fmt: skip

_CARD = "README.md"
_MAX_CARD = 1 << 16
_RERANKER_NAME = re.compile("qwen3-reranker", re.IGNORECASE)
_RERANKING = re.compile(r"^pipeline_tag:\s*text-ranking\s*$", re.MULTILINE)
# Texts of the model card, unchanged.
_QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


# GGUF's number of a pooling type -> pooling type. 0 means no pooling; 4 is for rerankers.
_GGUF_POOLING = {1: "MEAN", 2: "CLS", 3: "LAST"}


def check_causal(config: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint whose tokens attend to later tokens: its outputs would be wrong without an error.

    Raises:
        UnsupportedModelError: the model is bidirectional.
    """
    for section in (config, config.get("text_config") or {}):
        # "vision" is Gemma 4's value for bidirectional attention among image tokens only.
        is_declared = section.get("is_causal") is False or section.get("use_bidirectional_attention") in (True, "all")
        if is_declared or section.get("model_type") in _ENCODERS:
            raise _bidirectional(name)


def _bidirectional(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} is a bidirectional model, whose tokens attend to later tokens; only decoders are supported: use an "
        "embedding model such as Qwen3-Embedding"
    )


def gguf_pooler(header: GgufHeader) -> PoolerConfig:
    """Return the pooling of a GGUF file. Vectors are normalized, as in llama.cpp's server.

    A file without a pooling type has the default pooling, and is not an embedder. An unsupported type becomes the
    ``problem`` of the result.

    Raises:
        UnsupportedModelError: the model is bidirectional.
    """
    if header.metadata.get(f"{header.architecture}.attention.causal") is False:
        raise _bidirectional(header.path.name)
    kind = header.metadata.get(f"{header.architecture}.pooling_type", 0)
    if kind == 0:
        return PoolerConfig()
    if kind not in _GGUF_POOLING:
        return PoolerConfig(is_embedder=True, problem=f"its pooling type (number {short(kind)}) is not supported")
    return PoolerConfig(pooling_type=_GGUF_POOLING[kind], is_embedder=True)


def read_pooler(folder: Path, config: dict[str, Any]) -> PoolerConfig:
    """Return the pooling that ``modules.json`` declares, or the default pooling if the checkpoint declares none.

    An unsupported pooling becomes the ``problem`` of the result.

    Raises:
        ModelLoadError: a file is invalid.
    """
    modules = _read_modules(folder / "modules.json")
    pooling = modules.get("Pooling")
    if pooling is None:
        return PoolerConfig()
    settings = read_json(folder / pooling / "config.json")
    pooling_type, problem = _pooling_type(settings)
    others = [kind for kind in modules if kind not in ("Transformer", "Pooling", "Normalize")]
    if others:
        problem = f"a module {others[0]} follows the pooling, which is not supported"
    return PoolerConfig(
        pooling_type=pooling_type or "LAST",
        normalize="Normalize" in modules,
        is_embedder=True,
        matryoshka_dimensions=_dimensions(config),
        problem=problem,
    )


def _read_modules(path: Path) -> dict[str, str]:
    """Return the modules in a ``modules.json`` in order, e.g. ``{"Transformer": "", "Pooling": "1_Pooling"}``.

    The keys are the last parts of the modules' types, and the values are the names of the modules' folders. Returns an
    empty dict if there is no such file. Raises ModelLoadError if the file is invalid.
    """
    if not path.exists():
        return {}
    check_readable(path, MAX_SETTINGS_BYTES)
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({one_line(error)}): download it again") from error
    if not isinstance(listed, list) or len(listed) > _MAX_MODULES or not all(isinstance(m, dict) for m in listed):
        raise ModelLoadError(f"{path} is not a list of modules: download it again")
    modules = {}
    for module in listed:
        kind, place = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(place, str) or not _MODULE_FOLDER.fullmatch(place):
            raise ModelLoadError(f"{path} lists {short(module)}, which is not a module in a folder beside it")
        modules[kind.rpartition(".")[2]] = place
    return modules


def _pooling_type(settings: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the pooling type and None, or None and the reason why the type is not supported."""
    mode = settings.get("pooling_mode")
    if mode is None:
        prefix = "pooling_mode_"
        modes = [
            _FLAGS.get(k, k.removeprefix(prefix)) for k, v in settings.items() if k.startswith(prefix) and v is True
        ]
    else:
        modes = mode if isinstance(mode, list) else [mode]
    if len(modes) == 1 and modes[0] in _POOLING_TYPES:
        return _POOLING_TYPES[modes[0]], None
    return (
        None,
        f"its pooling is {short(' and '.join(map(str, modes)) or 'none')}; lasttoken, mean and cls are supported",
    )


def _dimensions(config: dict[str, Any]) -> tuple[int, ...]:
    listed = config.get("matryoshka_dimensions")
    if not isinstance(listed, list):
        return ()
    return tuple(size for size in listed if isinstance(size, int) and not isinstance(size, bool) and size > 0)


def find_reranker(
    folder: Path, config: dict[str, Any], name: str, tokenizer: PreTrainedTokenizerFast
) -> RerankerConfig | None:
    """Return the template and the tokens for scoring documents; None if the checkpoint is not a Qwen3-Reranker.

    A Qwen3-Reranker is recognized by its name or by its model card. It answers a prompt with yes or no. If its
    tokenizer lacks the tokens ``yes`` and ``no``, a warning is logged, and the result is None.
    """
    if config.get("model_type") != "qwen3" or not (
        _RERANKER_NAME.search(name) or _model_card_declares_reranker(folder)
    ):
        return None
    vocabulary = tokenizer.get_vocab()
    if "yes" not in vocabulary or "no" not in vocabulary:
        logger.warning("%s is not used as a Qwen3-Reranker: its tokenizer lacks the tokens yes and no", name)
        return None
    return RerankerConfig(
        true_token_id=vocabulary["yes"],
        false_token_id=vocabulary["no"],
        prefix=_QWEN3_PREFIX,
        pair=_QWEN3_PAIR,
        suffix=_QWEN3_SUFFIX,
        instruction=_QWEN3_INSTRUCTION,
    )


def _model_card_declares_reranker(folder: Path) -> bool:
    path = folder / _CARD
    if not path.is_file():
        return False
    with path.open("rb") as file:
        card = file.read(_MAX_CARD).decode("utf-8", "replace")
    return _RERANKING.search(card) is not None and _RERANKER_NAME.search(card) is not None
