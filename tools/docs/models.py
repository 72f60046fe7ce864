"""Write docs/models.md: what runs, from the table that the conformance test runs.

python -m tools.docs.models            # writes docs/models.md
python -m tools.docs.models --check    # fails if it is not up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """\
<!-- Written by tools/docs/models.py from tools/fixtures/architectures.py. Do not edit. -->
# Models

A model is `demo`, a repository on the Hugging Face hub, a local directory (Hugging Face or MLX safetensors, MLX
quantized weights included), or a `.gguf` file:

    metal-engine serve demo
    metal-engine serve Qwen/Qwen3-0.6B
    metal-engine serve bartowski/Qwen_Qwen3-0.6B-GGUF:Q4_K_M
    metal-engine serve ~/models/my-model
    metal-engine serve ~/models/my-model.Q4_K_M.gguf

## Files

- **From the hub**: `REPO`, `REPO@REVISION` (or `--revision`) for a branch, tag or commit, and `REPO:Q4_K_M` for a GGUF
  file: the one whose name has that quantization, in whatever case. A repository that has GGUF files only gives its
  `Q4_K_M`, or the only one there is. `--download-dir` takes another folder than the hub's cache. `HF_TOKEN`, `HF_HOME`,
  `HF_ENDPOINT` and `HF_HUB_OFFLINE` mean what they mean to `huggingface_hub`. A model in the cache needs no network; a
  hub that does not answer is given up after 3 seconds. A download that was interrupted goes on where it ended.
- **Before a download, and before loading**, the engine reads the configuration and the headers of the weight files:
  some hundred kilobytes. An architecture that cannot run here, weights or a KV cache that do not fit into memory, a
  missing or truncated shard, a broken JSON file are errors of one line, at once.
- **Weights**: safetensors in one file or several, from Hugging Face or mlx-lm, with tied or untied heads, and mlx-lm's
  quantized ones (4, 6, 8 bits, mixed). A CPU gets them dequantized to float32; on Metal they stay as they are
  (`--dtype` converts).
- **GGUF**: the [architectures below](#gguf-files) in F32, F16, BF16 and the quantized types that `gguf` can dequantize.
  On Metal Q4_0, Q4_1, Q4_K, Q8_0 and MXFP4 stay quantized; other types take the memory of 16-bit weights.
- **Tokenizer**: the checkpoint's own, or the one in the directory or repository that `--tokenizer` names. It must be a
  fast one. The chat template is `chat_template.jinja`, the one in `tokenizer_config.json` (of several named ones
  `default`), or `chat_template.json`.
- **`generation_config.json`** gives all end-of-sequence ids, and `temperature`, `top_p`, `top_k` and `min_p` for
  requests that do not set them. `--generation-config vllm` leaves these four out; a folder's name takes them from
  there. The demo model has a temperature of 0.2 and a `top_p` of 0.5.
- **Code of a checkpoint** runs only with `--trust-remote-code`. What else of its files is trusted and what is bounded:
  [security.md](security.md).

## Why was my model refused?

- `no repository … on the Hugging Face hub`: It is misspelt, or private: set `HF_TOKEN` to a token that may read it.
- `… is gated`: Its owner wants its terms accepted: do so on its page on the hub, and set `HF_TOKEN` to a token of
  that account.
- `the Hugging Face hub cannot be reached`: Nobody answered within 3 seconds. Behind a proxy, set `HTTPS_PROXY`; with
  a mirror, `HF_ENDPOINT`. What is in the cache needs no hub.
- `mlx-lm has no architecture …`: The installed mlx-lm has no code for it. A newer mlx-lm may.
- `(architecture …) cannot run here: …`: It keeps state of a kind that is not known here, or computes attention
  in a way of its own: see the table below.
- `not enough memory for …`: The weights alone are larger than the memory for a model. The message says which version
  would fit; `metal-engine show REPO` says the same of others without a download.
- `no memory for the KV cache`: The weights fit, and nothing is left beside them: lower `--max-num-batched-tokens`,
  raise `--gpu-memory-utilization`, or take a smaller version.
- `… has no weights`: The repository has them in another form (PyTorch, ONNX, adapters): look for a version in
  safetensors, MLX or GGUF.
- `… GGUF file …; there are …`: Name one of those that are listed: `REPO:Q8_0`. A GGUF in parts is not read.
- `… is quantized with …`: mlx-lm does not know that method: take an MLX version, or plain weights.
- `brings code of its own`: The architecture is a Python file of the repository: read it, and `--trust-remote-code`
  runs it.
- `is half-downloaded`: `metal-engine pull` gets the rest.

## Architectures

The architectures are mlx-lm's; `model_type` in a checkpoint's `config.json` names its own. No list decides what runs:
at every load the engine sends two short requests through its packed, paged forward and compares their logits with
mlx-lm's own forward of the same weights. It refuses a model that differs, with the reason, and never serves it wrong.

"""

_SUPPORTED = """\
### Verified

Tests run each of these {count} with small random weights: three requests that are packed, chunked, interleaved over
shuffled blocks and slots of states, and longer than the sliding windows. The relative logit error against mlx-lm's own
forward is below 1e-4.

*Heads* are those of one published model: query heads / KV heads x head dimension; of latent attention, the latent and
its position part. *On Metal* says what `--attention-backend auto` computes such layers with: our kernel
([kernels.md](kernels.md)), or, slower, MLX's operations. Tests run each architecture with such heads through the
kernel, simulated. Other models of an architecture may have other heads: the start-up block, `/health` and
`metal-engine doctor MODEL` say what a model's layers get.

| `model_type` | attention | layers | heads | on Metal |
| --- | --- | --- | --- | --- |
"""

_UNSUPPORTED = """
### Refused

| `model_type` | what it does that a packed step cannot | reason given at load |
| --- | --- | --- |
"""

_TAIL = """
Other architectures of mlx-lm may run too: the check at load decides. What a layer keeps must be keys and values of
every token, latents of them, or a recurrent state.

## GGUF files

What a GGUF file says in `general.architecture` decides. These run, each in files as llama.cpp's converter writes them:

| architecture | models | as mlx-lm's | notes |
| --- | --- | --- | --- |
{gguf}
Tests compare the logits of tiny files of each with llama.cpp's own, and what the engine generates with mlx-lm on the
Hugging Face checkpoint that they were converted from.

- **Refused**, in one line and before any weight is read: other architectures (`mistral3`, `gemma4`, `llama4`), a file
  that lacks a value or a tensor, tensors of other shapes than the metadata say, a variant that mlx-lm does not compute
  (RoPE scaling of the kinds with experts, Olmo 3), one part of a split file.
- **Windows**: of gemma3 and gpt-oss. gemma2, phi3 and the first Mistral attend to everything, as with mlx-lm.
- **Weights** that do not stay quantized become float16, those of gemma2, gemma3 and gpt-oss bfloat16: their activations
  can leave float16's range. `--dtype` says otherwise. Q5 and Q6 types take three times their size then.
- **Tokenizer**: SentencePiece (`llama`), or byte-level BPE (`gpt2`) with one of the splits {splits}. Another split is
  refused: it would give other tokens. `--tokenizer` takes one from elsewhere.
- **Ends** of an answer are the tokens that the file names, and the usual ends of a turn among its control tokens.
"""
_REFUSED = {
    "afm7": "several layers attend over the keys and values of one",
    "baichuan_m1": "convolves keys and values with those of the token before",
    "deepseek_v32": "each row attends only to the keys that an index of its own picks",
    "gpt_bigcode": "reads its position out of mlx-lm's cache as a Python number",
    "iquestloopcoder": "runs its layers twice, and attends over the first run's keys in the second",
    "llama4": "attends in chunks of the context",
    "longcat_flash_ngram": "looks up n-grams, for which it keeps the last tokens",
    "minimax_m3_vl": "each row attends only to the blocks that an index of its own picks",
    "phi3small": "attends to blocks in a pattern of its own",
    "plamo2": "calls MLX's attention itself, and passes mlx-lm's by",
}
# Names that users know; the rest of the table is the code's own.
_GGUF_MODELS = {
    "llama": ("Llama, Mistral, Mixtral, SmolLM2", "with experts as `mixtral`"),
    "qwen2": ("Qwen2, Qwen2.5", ""),
    "qwen3": ("Qwen3", ""),
    "qwen2moe": ("Qwen1.5-MoE, Qwen2-57B-A14B", "with the shared expert"),
    "qwen3moe": ("Qwen3-30B-A3B", ""),
    "gemma2": ("Gemma 2", ""),
    "gemma3": ("Gemma 3, the text model", "windows"),
    "phi3": ("Phi-3, Phi-3.5, Phi-4", "LongRoPE with the long factors at every length, as mlx-lm"),
    "gpt-oss": ("gpt-oss", "windows, sinks; MXFP4 stays as it is"),
    "granite": ("Granite 3", ""),
    "olmo2": ("OLMo 2", ""),
    "smollm3": ("SmolLM3", ""),
}


def models_doc() -> str:
    """The text of docs/models.md."""
    from metal_engine.checkpoints.gguf.tokenizer import PRE_TOKENIZERS
    from tools.fixtures.architectures import SUPPORTED, UNSUPPORTED

    rows = [
        f"| `{name}` | {_attention(name)} | {_layers(name)} | {_heads(name)} | {_served_by(name)} |"
        for name in sorted(SUPPORTED, key=str.lower)
    ]
    refused = [f"| `{name}` | {_REFUSED[name]} | {_refusal(name)} |" for name in sorted(UNSUPPORTED)]
    supported = _SUPPORTED.format(count=len(SUPPORTED))
    tail = _TAIL.format(gguf=_gguf_table(), splits=", ".join(f"`{name}`" for name in PRE_TOKENIZERS))
    return _HEAD + supported + "\n".join(rows) + "\n" + _UNSUPPORTED + "\n".join(refused) + "\n" + tail


def _gguf_table() -> str:
    from metal_engine.checkpoints.gguf.architectures import ARCHITECTURES

    rows = []
    for name, architecture in ARCHITECTURES.items():
        models, notes = _GGUF_MODELS[name]
        rows.append(f"| `{name}` | {models} | `{architecture.model_type}` | {notes} |\n")
    return "".join(rows)


def _attention(model_type: str) -> str:
    from metal_engine.kv_cache.spec import KVSpec, LatentSpec, RecurrentSpec
    from metal_engine.models.paged_model import PagedModel
    from tools.fixtures.architectures import configuration
    from tools.fixtures.tiny_models import random_model

    model = random_model(configuration(model_type))
    paged = PagedModel(model)
    names = {name.rsplit(".", 1)[-1] for name, _ in _parameters(model)}
    found = []
    recurrent = [state.spec for state in paged.pool.states if isinstance(state.spec, RecurrentSpec)]
    if len(recurrent) == len(paged.pool.states):
        return "none: recurrent state"
    if recurrent:
        found.append("recurrent state beside attention")
    specs = [state.spec for state in paged.pool.states]
    if any(isinstance(spec, LatentSpec) for spec in specs):
        found.append("latent (MLA, one vector per token cached)")
    elif any(isinstance(spec, KVSpec) and spec.head_dim != spec.v_head_dim for spec in specs):
        found.append("K and V of different sizes")
    if len(specs) < len(model.layers) and not recurrent:
        found.append("layers that share KV")
    if any(hasattr(m, "attn_logit_softcapping") and m.attn_logit_softcapping for m in model.modules()):
        found.append("softcap")
    if paged.windows:
        found.append("sliding window")
    if any("sink" in name for name in names):
        found.append("sinks")
    return ", ".join(found) or "full"


def _layers(model_type: str) -> str:
    from mlx_lm.models import switch_layers

    from tools.fixtures.architectures import configuration
    from tools.fixtures.tiny_models import random_model

    model = random_model(configuration(model_type))
    experts = (switch_layers.SwitchLinear, switch_layers.QuantizedSwitchLinear)
    return "mixture of experts" if any(isinstance(m, experts) for m in model.modules()) else "dense"


def _heads(model_type: str) -> str:
    from tools.fixtures.published_heads import PUBLISHED

    published = PUBLISHED[model_type]
    if published is None:
        return "no published model is known here"
    heads = "; ".join(map(str, published.heads))
    return f"{heads} ({published.model})" if heads else "none"


def _served_by(model_type: str) -> str:
    from tools.fixtures.published_heads import PUBLISHED, is_covered, published_kinds

    if PUBLISHED[model_type] is None:
        return "see `doctor`"
    kinds = published_kinds(model_type)
    if not kinds:
        return "-"
    dims = list(dict.fromkeys(kind.head_dims for kind in kinds if not is_covered(kind)))
    if not dims:
        return "kernel"
    if not any(map(is_covered, kinds)):
        return "MLX's operations"
    return f"kernel; MLX's operations for {', '.join(dims)}"


def _parameters(model: object) -> list[tuple[str, object]]:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())  # type: ignore[attr-defined, return-value]


def _refusal(model_type: str) -> str:
    from metal_engine.attention.portable.backend import PortableBackend
    from metal_engine.errors import UnsupportedModelError
    from metal_engine.models.check import check_paged_model
    from metal_engine.models.paged_model import PagedModel
    from tools.fixtures.architectures import VOCAB_SIZE, configuration
    from tools.fixtures.tiny_models import random_model

    try:
        check_paged_model(PagedModel(random_model(configuration(model_type))), PortableBackend(), VOCAB_SIZE)
    except UnsupportedModelError as error:
        return str(error)
    raise AssertionError(f"{model_type} is not refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare, and fail if it differs")
    args = parser.parse_args()
    from metal_engine.device.blas.load import load_optimized_blas

    load_optimized_blas()
    text = models_doc()
    if not args.check:
        DOC.write_text(text)
    elif DOC.read_text() != text:
        sys.exit(f"{DOC} is not up to date: run python -m tools.docs.models")


if __name__ == "__main__":
    main()
