"""Compares the prefill of recurrent layers on a CPU: mlx-lm's own recurrences and metal-engine's chunked versions.

    OPENBLAS_NUM_THREADS=2 python -m tools.benchmarks.recurrence [--repeats 7]

Uses random weights and inputs of real sizes in float32. Times the recurrence of one layer alone, and mlx-lm's forward
of a few layers on a fresh prompt, with mlx-lm's function and with metal-engine's. Prints medians, measured in rotation.
"""

from __future__ import annotations

import argparse
from functools import partial
from types import ModuleType
from typing import Any

from metal_engine.device.blas.load import load_optimized_blas

load_optimized_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_lm.models import gated_delta, granitemoehybrid, qwen3_5, ssm  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from metal_engine.doctor.sections.recurrences import gated_delta_layer, mamba2_layer  # noqa: E402
from metal_engine.doctor.timing import Call, in_turns  # noqa: E402
from metal_engine.recurrence.gated_delta import gated_delta_update  # noqa: E402
from metal_engine.recurrence.mamba2 import ssm_update  # noqa: E402


def report(what: str, tokens: int, ways: dict[str, Call], repeats: int) -> None:
    theirs, ours = (1e3 * seconds for seconds in in_turns(ways, repeats).values())
    print(f"| {what} | {tokens:,} | {theirs:.1f} ms | {ours:.1f} ms | {theirs / ours:.1f} |", flush=True)


def layers(repeats: int) -> None:
    """Print the times of the recurrence of one layer."""
    for what, k_heads, v_heads, each_key in (
        ("gated delta, 16 heads of 128 (Qwen3.5-0.8B)", 16, 16, False),
        ("the same, 16 / 48 heads (Qwen3.5-27B)", 16, 48, False),
        ("a gate for each key, 32 heads of 128 (Kimi Linear)", 32, 32, True),
    ):
        for tokens in (64, 256, 1024) if v_heads == 16 else (256,):
            args = gated_delta_layer((1, tokens), k_heads, v_heads, 128, each_key=each_key)
            ways = {
                "theirs": partial(gated_delta.gated_delta_update, *args),
                "ours": partial(gated_delta_update, *args),
            }
            report(what, tokens, ways, repeats)
    for tokens in (64, 512, 2048):
        args = mamba2_layer((1, tokens))
        ways = {"theirs": partial(ssm.ssm_update, *args), "ours": partial(ssm_update, *args)}
        report("Mamba2, 48 heads of 64, state 128 (Granite 4)", tokens, ways, repeats)


def qwen3_5_model() -> nn.Module:
    """Return a model with four layers of Qwen3.5-0.8B's sizes, three of them recurrent, and a small vocabulary."""
    args = qwen3_5.TextModelArgs(
        model_type="qwen3_5_text",
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        vocab_size=1024,
        linear_num_value_heads=16,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
    )
    return qwen3_5.TextModel(args)


def granite_model() -> nn.Module:
    """Return a model with four layers of Granite-4.0-H-1B's sizes, three of them recurrent, and a small vocabulary."""
    args = granitemoehybrid.ModelArgs(
        model_type="granitemoehybrid",
        vocab_size=1024,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=4,
        max_position_embeddings=131_072,
        num_attention_heads=12,
        num_key_value_heads=4,
        attention_bias=False,
        embedding_multiplier=12.0,
        attention_multiplier=0.0078125,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        rms_norm_eps=1e-5,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_proj_bias=False,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_conv_bias=True,
        position_embedding_type="nope",
    )
    return granitemoehybrid.Model(args)


def forwards(what: str, model: nn.Module, module: ModuleType, original: Any, ours: Any, repeats: int) -> None:
    """Print the times of mlx-lm's forward of fresh prompts, with the recurrence ``original`` and with ``ours``.

    Temporarily replaces the function in ``module``, because the model's layers look it up there.
    """
    model.eval()
    mx.eval(model.parameters())

    def forward(function: Any, prompt: mx.array) -> mx.array:
        setattr(module, original.__name__, function)
        return model(prompt, cache=make_prompt_cache(model))

    for tokens in (64, 256, 1024):
        prompt = mx.random.randint(0, 1024, (1, tokens))
        ways = {"theirs": partial(forward, original, prompt), "ours": partial(forward, ours, prompt)}
        report(what, tokens, ways, repeats)
    setattr(module, original.__name__, original)


def models(repeats: int) -> None:
    """Print the times of whole forwards of both models."""
    what, original = "model: 4 layers of Qwen3.5-0.8B, 3 recurrent", gated_delta.gated_delta_update
    forwards(what, qwen3_5_model(), qwen3_5, original, gated_delta_update, repeats)
    what, original = "model: 4 layers of Granite-4.0-H-1B, 3 recurrent", ssm.ssm_update
    forwards(what, granite_model(), granitemoehybrid, original, ssm_update, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7, help="number of rounds for the medians")
    repeats = parser.parse_args().repeats
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    print("| what | tokens | mlx-lm's own | ours | times as fast |\n| --- | --- | --- | --- | --- |")
    layers(repeats)
    models(repeats)


if __name__ == "__main__":
    main()
