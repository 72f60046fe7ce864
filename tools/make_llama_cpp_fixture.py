"""What llama.cpp says about the demo model: token ids of many texts, first-token logits of some prompts.

    python tools/make_llama_cpp_fixture.py MODEL.gguf tests/fixtures/llama_cpp_smollm2.json

Needs ``llama-cpp-python`` and ``gguf`` (pip builds the former from source: minutes), nothing of metal-engine:
the answers are independent of it.

llama.cpp multiplies quantized weights with activations that it quantizes to 8 bits, and keeps K and V in half
precision, which moves logits by some 0.1. So the weights are first dequantized (``gguf.quants``) into a
float32 file, and K and V are kept in float32: then the logits differ from another float32 engine's by
rounding alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

TOP = 20
_COMPUTED = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")

TEXTS = [
    "",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    " leading space",
    "trailing space ",
    "two  spaces   three    four     five",
    "tab\tand\t\ttabs",
    "line\nbreak\n\nparagraph\n\n\nthree\r\nwindows\r\n",
    "   \n   \n\t\n  mixed whitespace \n",
    "I'm, you're, he'd, we'll, they've, it's, DON'T, I'LL",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 2024-02-07T07:02:33Z",
    "١٢٣ ४५६ ⅷ ² ½ 四五",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # slow\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }\n\treturn sum;",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2, 3]}}',
    '<div class="a b">&nbsp;<!-- comment --></div>',
    "SELECT * FROM users WHERE id = 42 AND name LIKE '%o''brien%';",
    "Grüße aus Köln, naïve café, Ærøskøbing, Łódź, İstanbul",
    "cafe\u0301 decomposed, ﬁ ligature, Å Å",
    "日本語のテキストと中文文本，以及한국어.",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم.",
    "สวัสดีชาวโลก नमस्ते दुनिया",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ emoji",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\ufeffbom",
    "𝒜𝓁𝓅𝒽𝒶 \U00010348 \U0010fffd \ufffd",
    "!!!???...---___***###$$$%%%^^^&&&~~~```",
    "a" * 70 + "B" * 9 + "_" * 17,
    "http://user:pass@example.org:8080/path/to?x=1&y=%20#frag",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<|endoftext|>text<|endoftext|><|im_end|><repo_name>a/b<file_sep>x.py\n<|im_start|>",
    "not special: <|im_start| > < |im_end|> <|im_startx|> <|unknown|>",
    "ends with special <|im_end|>  \n <|im_start|> spaces around",
]

_CHAT = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
_DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPTS = [
    "The capital of France is",
    "<|im_start|>",
    "Once upon a time, in a small village by the sea, there lived",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot =",
    _CHAT.format(system=_DEFAULT_SYSTEM, user="What is the capital of Germany?"),
    _CHAT.format(system="Answer in one word.", user="Which color is the sky on a clear day?"),
    _CHAT.format(system=_DEFAULT_SYSTEM, user="Écris un poème sur l'été 🌞, s'il te plaît."),
    # Far positions: some 700 tokens.
    " ".join(f"Line {i}: the value of item {i} is {i * i % 97}." for i in range(40)) + " Line 40: the value",
]


def write_float32_copy(source: Path, target: Path) -> None:
    """Write a GGUF file with the same metadata and every tensor dequantized to float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name not in _COMPUTED:
            kind = field.types[0]
            sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type)
    for tensor in reader.tensors:
        array = quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, array.astype(np.float32), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp in float32 throughout."""

    def __init__(self, gguf: Path) -> None:
        import llama_cpp

        self._api = llama_cpp
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "float32.gguf"
            write_float32_copy(gguf, copy)
            self._llama = llama_cpp.Llama(
                str(copy),
                n_ctx=1024,
                n_batch=1024,
                n_gpu_layers=0,
                use_mmap=False,
                type_k=llama_cpp.GGML_TYPE_F32,
                type_v=llama_cpp.GGML_TYPE_F32,
                flash_attn=False,
                verbose=False,
            )

    def tokenize(self, text: str) -> list[int]:
        """Token ids; control tokens in the text are recognized, nothing is added."""
        return self._llama.tokenize(text.encode(), add_bos=False, special=True)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """float32 [vocab]: logits of the token after a prompt."""
        self._llama.reset()
        self._llama.eval(token_ids)
        pointer = self._api.llama_get_logits_ith(self._llama.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),)).copy()


def make_fixture(gguf: Path) -> dict[str, Any]:
    """Everything the JSON file holds."""
    import llama_cpp

    llama = LlamaCpp(gguf)
    prompts = []
    for prompt in PROMPTS:
        token_ids = llama.tokenize(prompt)
        logits = llama.logits(token_ids)
        top = np.argsort(-logits, kind="stable")[:TOP]
        prompts.append(
            {
                "text": prompt,
                "token_ids": token_ids,
                "top_ids": top.tolist(),
                "top_logits": [round(float(logits[i]), 6) for i in top],
            }
        )
    return {
        "model": gguf.name,
        "model_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "made_with": f"llama-cpp-python {llama_cpp.__version__}",
        "texts": [{"text": text, "token_ids": llama.tokenize(text)} for text in TEXTS],
        "prompts": prompts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    fixture = make_fixture(arguments.gguf)
    arguments.output.write_text(json.dumps(fixture, ensure_ascii=True, indent=1) + "\n")


if __name__ == "__main__":
    main()
