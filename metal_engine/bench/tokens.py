"""The client's tokenizer: counts prompt tokens, and makes prompts of an exact length. Loads no MLX."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as BackendTokenizer

from metal_engine.checkpoints.tokenizer_file import check_tokenizer_file
from metal_engine.errors import ConfigError


class PromptTokenizer:
    """Turns text into token ids, without the tokens that a server puts around a prompt.

    Attributes:
        words: texts of tokens that are a space and then only ASCII letters.
    """

    def __init__(self, backend: BackendTokenizer) -> None:
        self._backend = backend
        # Byte-level vocabularies and sentencepiece's spell a space in these ways.
        self.words = sorted(
            " " + token[1:]
            for token in backend.get_vocab(with_added_tokens=False)
            if token[0] in "\u0120\u2581" and token[1:].isascii() and token[1:].isalpha()
        )

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids


def load_prompt_tokenizer(name: str) -> PromptTokenizer:
    """The tokenizer of a directory, a ``.gguf`` file, ``demo``, or a repository on the hub.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name).expanduser()
    if name == "demo" or path.suffix == ".gguf":
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
        raise ConfigError("--tokenizer", f"no tokenizer for {name!r}; name one with --tokenizer: {reason}") from error
