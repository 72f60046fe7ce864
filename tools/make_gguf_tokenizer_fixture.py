"""What llama.cpp makes of texts with each kind of tokenizer that a GGUF file may name, over one small vocabulary.

    python tools/make_gguf_tokenizer_fixture.py tests/fixtures/llama_cpp_tokenizers.json

Needs ``llama-cpp-python``, ``gguf`` and ``tokenizers``, nothing of metal-engine. The vocabulary is trained here on the
texts of ``tests/fixtures/llama_cpp_smollm2.json``, without any split, so that its tokens run across words, digits and
line breaks: then each way to split a text first gives other ids. It is kept in the fixture with the answers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from gguf import GGUFWriter, TokenType
from llama_cpp import Llama
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

KINDS = ["gpt-2", "smollm", "starcoder", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen"]
TEXTS = Path(__file__).parent.parent / "tests" / "fixtures" / "llama_cpp_smollm2.json"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train(texts: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE whose tokens may be any run of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens + SPECIAL, [" ".join(merge) for merge in model["merges"]]


def write(path: Path, kind: str, tokens: list[str], merges: list[str]) -> None:
    """A GGUF file with a tokenizer and just enough of a llama for llama.cpp to read it."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL for t in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    texts = [case["text"] for case in json.loads(TEXTS.read_text())["texts"]]
    tokens, merges = train([text for text in texts if "<|" not in text])
    ids = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            path = Path(folder) / "tokenizer.gguf"
            write(path, kind, tokens, merges)
            llama = Llama(str(path), vocab_only=True, verbose=False)
            ids[kind] = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    out = {"tokens": tokens, "merges": merges, "texts": texts, "ids": ids}
    Path(sys.argv[1]).write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
