"""Loads a tokenizer from a checkpoint directory, and corrects frequent errors of published tokenizers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from metal_engine.checkpoints.file_checks import read_json
from metal_engine.checkpoints.gguf.tokenizer import load_gguf_tokenizer
from metal_engine.checkpoints.model_names import is_gguf
from metal_engine.checkpoints.tokenizer_file import check_tokenizer_file, check_vocabulary_files
from metal_engine.errors import ModelLoadError, one_line

logger = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer of a checkpoint directory or a GGUF file, with its chat template if there is one.

    If ``transformers`` cannot create the tokenizer, the engine creates it from ``tokenizer.json``. Usual reasons are a
    class that ``transformers`` lacks, or a class that needs code from the checkpoint.

    Args:
        folder: checkpoint directory, or path of a GGUF file.
        trust_remote_code: True to run code of the checkpoint.

    Raises:
        ModelLoadError: there is no tokenizer, or it cannot be read or used.
    """
    if is_gguf(folder) and folder.is_file():
        return load_gguf_tokenizer(folder)
    if not any((folder / name).is_file() for name in _FILES) and not list(folder.glob("*.tiktoken")):
        raise ModelLoadError(f"{folder} has no tokenizer (no tokenizer.json): name another with --tokenizer")
    if (own := folder / "tokenizer.json").is_file():
        check_tokenizer_file(own)
    check_vocabulary_files(folder)
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        tokenizer = _from_tokenizer_json(folder, config, error)
        if tokenizer is None:
            hint = ""
            if "auto_map" in config and not trust_remote_code:
                hint = "; it has its own code: --trust-remote-code runs it, if you trust it"
            raise ModelLoadError(f"cannot load the tokenizer of {folder}: {one_line(error)}{hint}") from error
    if not tokenizer.is_fast:
        raise ModelLoadError(f"the tokenizer of {folder} has no fast version: name another with --tokenizer")
    _set_chat_template(tokenizer, folder)
    return tokenizer


def _from_tokenizer_json(folder: Path, config: dict[str, Any], error: Exception) -> PreTrainedTokenizerFast | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    special = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), **special)
    except Exception:  # noqa: BLE001  (tokenizers raises a bare Exception; the first error says more)
        return None
    template = config.get("chat_template")
    own = folder / "chat_template.jinja"
    if own.is_file():
        template = own.read_text(encoding="utf-8")
    tokenizer.chat_template = template
    logger.info("tokenizer.json is used as it is: %s", one_line(error))
    return tokenizer


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _set_chat_template(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Set the chat template of a tokenizer, so that a chat can be rendered without the name of a template.

    A tokenizer without a template gets the template in ``chat_template.json``. If there are several named templates and
    none is named ``default``, the first template is used. With a ``default``, all templates are kept, and
    ``transformers`` chooses among them.
    """
    template = tokenizer.chat_template
    own = folder / "chat_template.json"
    if not template and own.is_file():  # processors of multimodal models store the template here
        template = read_json(own).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict) and "default" not in template and template:
        name, template = next(iter(template.items()))
        logger.warning("the chat templates of %s have no default: using %r", folder.name, name)
    tokenizer.chat_template = template
