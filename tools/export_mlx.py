"""Write a model as an MLX directory (float32 safetensors, config, tokenizer) that mlx-lm and its relatives load.

    python tools/export_mlx.py OUT [--model demo] [--never-stops]

So that servers can be compared on the very same weights. With ``--never-stops`` the end-of-sequence token is one that
no answer contains, so that every server generates exactly as many tokens as it is asked for, whether or not it knows
``ignore_eos``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metal_engine.platform.blas import load_optimized_blas


def export(out: Path, model: str = "demo", *, never_stops: bool = False) -> None:
    """Write ``model`` to the directory ``out``, which is made, or whose files are replaced.

    Raises:
        ModelLoadError: the model cannot be loaded.
    """
    blas = load_optimized_blas()
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from metal_engine.args import EngineArgs
    from metal_engine.models import loader
    from metal_engine.platform.device import device_info

    loaded = loader.load(EngineArgs(model=model, dtype="float32"), device_info(blas))
    out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {k: v for k, v in loaded.config.items() if k not in ("quantization", "quantization_config")}
    config["torch_dtype"] = "float32"
    eos = sorted(loaded.eos_token_ids)
    if never_stops:
        eos = [_unused_token(loaded)]
        loaded.tokenizer.eos_token = loaded.tokenizer.convert_ids_to_tokens(eos[0])
    config["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    loaded.tokenizer.save_pretrained(str(out))
    # Last: a directory that has it is complete.
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _unused_token(loaded: object) -> int:
    """A special token that the chat template does not use, and that a model for conversation has no reason to say."""
    tokenizer = loaded.tokenizer  # type: ignore[attr-defined]
    taken = loaded.eos_token_ids | {tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}  # type: ignore[attr-defined]
    template = tokenizer.chat_template or ""
    special = sorted(tokenizer.added_tokens_decoder)
    for token_id in reversed(special):
        if token_id not in taken and str(tokenizer.added_tokens_decoder[token_id]) not in template:
            return int(token_id)
    raise SystemExit("the vocabulary has no special token to spare for --never-stops")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--never-stops", action="store_true")
    args = parser.parse_args()
    export(args.out, args.model, never_stops=args.never_stops)
    print(f"{args.model} written to {args.out}")


if __name__ == "__main__":
    main()
