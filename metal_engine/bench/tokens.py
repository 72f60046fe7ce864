"""Tokenizer of the benchmark client, which counts prompt tokens and has words for random prompts. Does not load MLX."""

from __future__ import annotations

from tokenizers import Tokenizer as BackendTokenizer

from metal_engine.checkpoints.model_names import is_gguf
from metal_engine.checkpoints.tokenizer_file import check_tokenizer_file
from metal_engine.errors import ConfigError
from metal_engine.local_paths import local_path


class PromptTokenizer:
    """Converts text to token ids, without the special tokens that a server adds to a prompt.

    Attributes:
        words: texts of tokens that consist of a space and ASCII letters.
    """

    def __init__(self, backend: BackendTokenizer) -> None:
        self._backend = backend
        # Spellings of a space in byte-level vocabularies and in those of sentencepiece.
        self.words = sorted(
            " " + token[1:]
            for token in backend.get_vocab(with_added_tokens=False)
            if token[0] in "\u0120\u2581" and token[1:].isascii() and token[1:].isalpha()
        )

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids


def load_prompt_tokenizer(name: str) -> PromptTokenizer:
    """Load the tokenizer of a directory, a ``.gguf`` file, ``demo``, or a repository on the hub.

    Raises:
        ConfigError: there is no tokenizer.
    """
    path = local_path(name)
    if name == "demo" or is_gguf(path):
        from metal_engine.checkpoints.demo import fetch_demo_model
        from metal_engine.checkpoints.gguf.tokenizer import load_gguf_tokenizer

        if name != "demo" and not path.is_file():
            raise ConfigError("--tokenizer", f"{name}: no such file")
        gguf = fetch_demo_model() if name == "demo" else path
        return PromptTokenizer(load_gguf_tokenizer(gguf).backend_tokenizer)
    try:
        if path.is_dir():
            check_tokenizer_file(path / "tokenizer.json")
            return PromptTokenizer(BackendTokenizer.from_file(str(path / "tokenizer.json")))
        return PromptTokenizer(BackendTokenizer.from_pretrained(name))
    except Exception as error:  # tokenizers raises nothing more specific
        reason = " ".join(str(error).split())
        raise ConfigError("--tokenizer", f"no tokenizer for {name!r}; set one with --tokenizer: {reason}") from error
