"""Write docs/models-table.md: the architectures that run or are refused, from tools/fixtures/architectures.py.

python -m tools.docs.models            # writes docs/models-table.md
python -m tools.docs.models --check    # fails if it is not up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metal_engine.models.paged_model import PagedModel

DOC = Path(__file__).parents[2] / "docs" / "models-table.md"

_HEAD = """\
<!-- Written by tools/docs/models.py from tools/fixtures/architectures.py. Do not edit. -->
# Architectures

Look up here if an architecture runs, and if the kernel computes its attention on a Mac. `model_type` in a checkpoint's
`config.json`, or `general.architecture` in a GGUF file, names the architecture. [models.md](models.md) explains how to
use models, and the check at load that decides.

"""

_SUPPORTED = """\
## Verified

Tests run each of these {count} architectures with small random weights. Three requests are packed, chunked and
interleaved over shuffled blocks and state slots, and they are longer than the sliding windows. The relative error of
the logits against mlx-lm's own forward pass is below 1e-4.

- **heads**: those of one published model, as query heads / KV heads x head dimension. Latent attention has the
  dimensions of the latent vector and of its position part, as (512 + 64).
- **on Metal**: `--attention-backend auto` computes such layers with our [kernel](dev/kernels.md), or with MLX's slower
  operations. Tests run the kernel with these heads in a simulator.

Other models of an architecture can have other heads. The start-up lines, `/health` and `metal-engine doctor MODEL` show
what computes the layers of your model.

| `model_type` | attention | layers | heads | on Metal |
| --- | --- | --- | --- | --- |
"""

_OTHERS = """
## Verified in other ways

- **one request after another**: packed steps do not support the architecture's caches. Its requests
  [run one after another](models.md#one-request-after-another) over mlx-lm's own caches. Tests compare the logits with
  mlx-lm's logits in the same chunks.
- **only on a Mac**: mlx-lm computes parts of the architecture in its own Metal kernels. Requests are packed as in the
  table above. Tests run mlx-lm's kernels in the simulator.

| `model_type` | runs |
| --- | --- |
"""

_UNSUPPORTED = """
## Refused

| `model_type` | property that a packed step does not support | reason given at load |
| --- | --- | --- |
"""

_TAIL = """
Architectures that newer versions of mlx-lm add may run. Packed steps need layers that store keys and values of every
token, latent vectors of them, or a recurrent state.

## GGUF files

These architectures run, in files as llama.cpp's converter writes them:

| architecture | models | `model_type` | notes |
| --- | --- | --- | --- |
{gguf}
Tests convert tiny Hugging Face checkpoints. They compare the logits with llama.cpp's, and the output with mlx-lm's
output for the original checkpoint.

- **Refused**, before any weight is read: other architectures (`mistral3`, `gemma4`, `llama4`), files that lack a value
  or a tensor, tensors whose shape contradicts the metadata, single parts of split files, and variants that mlx-lm does
  not compute (Olmo 3, RoPE scaling of models with experts).
- **Windows**: gemma3 and gpt-oss have sliding windows. gemma2, phi3 and the first Mistral attend to everything, as in
  mlx-lm.
- **Weights** that do not stay quantized become float16, or bfloat16 for gemma2, gemma3 and gpt-oss, whose activations
  can exceed float16's range. `--dtype` overrides this. Q5 and Q6 types then take three times their size.
- **Tokenizer**: SentencePiece (`llama`), or byte-level BPE (`gpt2`) with one of the splits {splits}. Other splits are
  refused because they would give other tokens. `--tokenizer` loads a tokenizer from elsewhere.
- **End of output**: the tokens that the file names, and the usual end-of-turn tokens among its control tokens.
"""
_REFUSED = {
    "olmo": "multiplies queries and keys in its own code, which fails even with `ai2-olmo`; OLMo 2 and 3 run",
    "phi3small": "attends to blocks in a pattern of its own; in mlx-lm, a prompt's token also sees later tokens",
}
# GGUF architecture -> (models as users name them, remarks). The rest of the table comes from the engine's own data.
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
    """Return the text of docs/models-table.md."""
    from metal_engine.checkpoints.gguf.tokenizer import PRE_TOKENIZERS
    from tools.fixtures.architectures import METAL_ONLY, OWN_CACHES, SUPPORTED, UNSUPPORTED

    rows = [supported_row(name) for name in sorted(SUPPORTED, key=str.lower)]
    refused = [f"| `{name}` | {_REFUSED[name]} | {_refusal(name)} |" for name in sorted(UNSUPPORTED)]
    supported = _SUPPORTED.format(count=len(SUPPORTED))
    tail = _TAIL.format(gguf=_gguf_table(), splits=", ".join(f"`{name}`" for name in PRE_TOKENIZERS))
    ways = {**dict.fromkeys(OWN_CACHES, "one request after another"), **dict.fromkeys(METAL_ONLY, "only on a Mac")}
    others = "".join(f"| `{name}` | {way} |\n" for name, way in sorted(ways.items()))
    return (
        _HEAD + supported + "\n".join(rows) + "\n" + _OTHERS + others + _UNSUPPORTED + "\n".join(refused) + "\n" + tail
    )


def _gguf_table() -> str:
    from metal_engine.checkpoints.gguf.architectures import ARCHITECTURES

    rows = []
    for name, architecture in ARCHITECTURES.items():
        models, notes = _GGUF_MODELS[name]
        rows.append(f"| `{name}` | {models} | `{architecture.model_type}` | {notes} |\n")
    return "".join(rows)


def supported_row(model_type: str) -> str:
    """Return an architecture's row in the table of verified architectures."""
    from metal_engine.models.paged_model import PagedModel
    from tools.fixtures.architectures import configuration
    from tools.fixtures.tiny_models import random_model

    paged = PagedModel(random_model(configuration(model_type)))
    columns = _attention(paged), _layers(paged), _heads(model_type), _served_by(model_type)
    return f"| `{model_type}` | {' | '.join(columns)} |"


def _attention(paged: PagedModel) -> str:
    from metal_engine.kv_cache.spec import KVSpec, LatentSpec, RecurrentSpec
    from metal_engine.models.layer_cache import ChunkedLayerCache

    model = paged.model
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
    if any(isinstance(cache, ChunkedLayerCache) for cache in paged.layer_caches):
        found.append("chunks of the context")
    if paged.pool.has_index:
        found.append("keys that an index selects")
    if any("sink" in name for name in names):
        found.append("sinks")
    return ", ".join(found) or "full"


def _layers(paged: PagedModel) -> str:
    from mlx_lm.models import switch_layers

    experts = (switch_layers.SwitchLinear, switch_layers.QuantizedSwitchLinear)
    return "mixture of experts" if any(isinstance(m, experts) for m in paged.model.modules()) else "dense"


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
    from metal_engine.errors import UnsupportedModelError
    from tools.fixtures.architectures import configuration
    from tools.fixtures.tiny_models import open_model

    try:
        open_model(configuration(model_type))
    except UnsupportedModelError as error:
        return str(error).removeprefix(f"{model_type}: ")
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
