"""Measures quality and speed of quantized KV on the demo model, compared with mlx-lm's own quantized cache.

    python -m tools.benchmarks.quantized_kv                  # everything
    python -m tools.benchmarks.quantized_kv --only text      # or: answers, batch, speed

- *text*: perplexity of a text in windows, and the share of positions with the same most likely token as with float KV.
- *answers*: greedy outputs for 100 prompts from the text, compared with the outputs for float KV.
- *batch*: changes of the results with other rows in the batch: outputs of requests together and alone, and a text in
  chunks of 256 and of 37 tokens.
- *speed*: engines that differ only in the type of KV compute the same requests in rotation.

The text is Python's language reference from ``pydoc_data.topics``. mlx-lm's cache is quantized from the first token on
(``--kv-bits`` with ``--quantized-kv-start 0``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from metal_engine.device.blas.load import load_optimized_blas

load_optimized_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_lm.models.cache import KVCache, QuantizedKVCache  # noqa: E402

from metal_engine.attention.choice import choose_backend  # noqa: E402
from metal_engine.checkpoints.demo import fetch_demo_model  # noqa: E402
from metal_engine.checkpoints.gguf.model import load_gguf_model  # noqa: E402
from metal_engine.checkpoints.gguf.tokenizer import load_gguf_tokenizer  # noqa: E402
from metal_engine.engine.built_engine import BuiltEngine  # noqa: E402
from metal_engine.kv_cache.rows import step_rows  # noqa: E402
from metal_engine.loading.build import build_engine  # noqa: E402
from metal_engine.models.attention_kinds import attention_kinds  # noqa: E402
from metal_engine.models.paged_model import PagedModel  # noqa: E402
from metal_engine.sampling_params import SamplingParams  # noqa: E402
from metal_engine.settings.args import KV_CACHE_DTYPES, EngineArgs  # noqa: E402

_BLOCK_SIZE, _CHUNK, _ODD_CHUNK = 16, 256, 37
_EQUAL_GAP = 1e-3  # difference of two logits below which tokens count as equally likely
_PROMPT_LEN = 48
_BATCH = 20  # batch size for mlx-lm, whose quantized cache requires prompts of equal length
_SPEED_STEPS = 16


@dataclass(frozen=True)
class Scored:
    """Predictions of a model for the windows of a text, T in total. The first token of a window has no prediction.

    Attributes:
        logprobs: log probability of each token.
        likeliest: id of the most likely token in the place of each token.
    """

    logprobs: np.ndarray  # [T] float64
    likeliest: np.ndarray  # [T]

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprobs.mean()))


Windows = list[list[int]]


def make_engine(kv_cache_dtype: str) -> BuiltEngine:
    """Return an engine on the demo model, with a pool that is large enough for all measurements."""
    return build_engine(
        EngineArgs(
            model="demo",
            kv_cache_dtype=kv_cache_dtype,
            num_gpu_blocks_override=720,
            max_num_seqs=100,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        )
    )


Forward = Callable[[list[int], int], mx.array]
"""Takes a chunk of a window and the number of tokens before it; returns logits, [T, V]."""


def our_scores(kv_cache_dtype: str, windows: Windows, chunk: int = _CHUNK) -> Scored:
    """Predict the tokens of windows with metal-engine. Each window is computed as one request, in chunks."""
    return _score(our_forward(kv_cache_dtype, max(map(len, windows))), windows, chunk)


def our_forward(kv_cache_dtype: str, num_tokens: int) -> Forward:
    """Return metal-engine's forward for one request at a time, with at most ``num_tokens`` tokens."""
    paged = PagedModel(load_demo_model(), kv_cache_dtype=kv_cache_dtype)
    backend = choose_backend("auto", _BLOCK_SIZE).for_layers(attention_kinds(paged), _BLOCK_SIZE).backend
    block_table = np.arange(-(-num_tokens // _BLOCK_SIZE), dtype=np.int32)[None]
    paged.pool.allocate(block_table.size, _BLOCK_SIZE)

    def forward(chunk: list[int], start: int) -> mx.array:
        first, count = np.array([start], np.int32), [len(chunk)]
        rows = step_rows(block_table, first, count, _BLOCK_SIZE, num_samples=np.array(count, np.int32))
        return paged(mx.array(chunk), rows, backend.for_step(rows))

    return forward


def mlx_lm_scores(bits: int | None, windows: Windows, chunk: int = _CHUNK) -> Scored:
    """Predict the tokens of windows with mlx-lm's forward and its caches of ``bits`` bits (None: float)."""
    model = load_demo_model()
    caches: list[Any] = []

    def forward(chunk: list[int], start: int) -> mx.array:
        if start == 0:
            caches[:] = mlx_lm_caches(model, bits)
        return model(mx.array([chunk]), cache=caches)[0]

    return _score(forward, windows, chunk)


def _score(forward: Forward, windows: Windows, chunk: int) -> Scored:
    logprobs: list[np.ndarray] = []
    likeliest: list[np.ndarray] = []
    for window in windows:
        for start in range(0, len(window) - 1, chunk):
            targets = window[start + 1 : start + chunk + 1]
            logits = forward(window[start : start + chunk], start)[: len(targets)].astype(mx.float32)
            each = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            found = mx.take_along_axis(each, mx.array(targets)[:, None], axis=-1)[:, 0]
            logprobs.append(np.array(found))
            likeliest.append(np.array(mx.argmax(logits, axis=-1)))
    return Scored(np.concatenate(logprobs).astype(np.float64), np.concatenate(likeliest))


def our_answers(engine: BuiltEngine, prompts: Windows, num_tokens: int) -> Windows:
    """Return greedy outputs for all prompts, computed together."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    answers: Windows = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.core.add_request(str(i), engine.preparer.prepare(prompt, params))
    while engine.core.has_requests:
        for output in engine.core.step():
            answers[int(output.request_id)] += output.token_ids
    return answers


def mlx_lm_answers(bits: int, prompts: Windows, num_tokens: int) -> Windows:
    """Return greedy outputs of mlx-lm's forward with a cache of ``bits`` bits. All prompts must have equal lengths."""
    model = load_demo_model()
    answers: Windows = []
    for start in range(0, len(prompts), _BATCH):
        batch = mx.array(prompts[start : start + _BATCH])
        caches = mlx_lm_caches(model, bits)
        tokens: list[np.ndarray] = []
        for _ in range(num_tokens):
            batch = mx.argmax(model(batch, cache=caches)[:, -1], axis=-1)[:, None]
            tokens.append(np.array(batch[:, 0]))
        answers += np.stack(tokens, axis=1).tolist()
    return answers


def load_demo_model() -> nn.Module:
    """Return a new copy of the demo model in float32."""
    return load_gguf_model(fetch_demo_model(), dtype=mx.float32, dequantize=True)[0]


def mlx_lm_caches(model: Any, bits: int | None) -> list[Any]:
    return [QuantizedKVCache(64, bits) if bits else KVCache() for _ in model.layers]


def compare_text(tokens: list[int], num_tokens: int, window: int) -> None:
    """Print the perplexity of the text for each kind of KV, and the agreement with float KV."""
    windows = _spread(tokens, max(1, num_tokens // window), window)
    print(f"\n{len(windows)} x {window:,} tokens of text\n")
    print("| KV | perplexity | against float | same next token |\n| --- | --- | --- | --- |")
    full = our_scores("auto", windows)
    _report_text("float", full, full)
    for dtype, bits in (("int8", 8), ("int4", 4)):
        _report_text(f"ours, {dtype}", our_scores(dtype, windows), full)
        _report_text(f"mlx-lm, --kv-bits {bits}", mlx_lm_scores(bits, windows), full)


def _report_text(name: str, found: Scored, full: Scored) -> None:
    change = found.perplexity / full.perplexity - 1
    agree = (found.likeliest == full.likeliest).mean()
    print(f"| {name} | {found.perplexity:.4f} | {change:+.3%} | {agree:.2%} |", flush=True)


def compare_answers(tokens: list[int], num_answers: int, num_tokens: int) -> None:
    """Print for each kind of KV how many greedy outputs equal the outputs with float KV."""
    prompts = _spread(tokens, num_answers, _PROMPT_LEN)
    print(f"\n{num_answers} greedy answers of {num_tokens} tokens to prompts of {_PROMPT_LEN}\n")
    print("| KV | the same as with float KV | first difference, median |\n| --- | --- | --- |")
    full: Windows = []
    for dtype in KV_CACHE_DTYPES:
        engine = make_engine(dtype)
        found = our_answers(engine, prompts, num_tokens)
        engine.close()
        if dtype == "auto":
            full = found
        else:
            _report_answers(f"ours, {dtype}", found, full)
    for bits in (8, 4):
        _report_answers(f"mlx-lm, --kv-bits {bits}", mlx_lm_answers(bits, prompts, num_tokens), full)


def _spread(tokens: list[int], count: int, length: int) -> Windows:
    """Return ``count`` passages of ``length`` tokens, spread evenly over a text."""
    return [tokens[start : start + length] for start in np.linspace(0, len(tokens) - length, count).astype(int)]


def _report_answers(name: str, found: Windows, full: Windows) -> None:
    firsts = [_first_difference(a, b) for a, b in zip(full, found, strict=True) if a != b]
    median = f"{statistics.median(firsts):.0f}" if firsts else "-"
    print(f"| {name} | {len(full) - len(firsts)} of {len(full)} | {median} |", flush=True)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def compare_batches(tokens: list[int], num_answers: int, answer_len: int, num_tokens: int, window: int) -> None:
    """Print how products, outputs and log probabilities change with other rows in the batch."""
    _compare_products(_BATCH)
    _compare_alone(tokens, num_answers, answer_len)
    _compare_chunks(tokens, num_tokens, window)


def _compare_products(num_rows: int) -> None:
    """Print the difference between products of several rows and products of the same rows one by one."""
    weights = load_demo_model().layers[0].self_attn.q_proj.weight  # [D, D]
    rows = mx.random.normal((num_rows, weights.shape[1]), key=mx.random.key(0))
    together = np.array(rows @ weights.T)
    alone = np.concatenate([np.array(rows[i : i + 1] @ weights.T) for i in range(num_rows)])
    differ, most = (together != alone).mean(), np.abs(together - alone).max() / np.abs(together).max()
    print(
        f"\nProducts of {num_rows} rows with a projection, together and one by one: {differ:.0%} of the numbers differ,"
    )
    print(f"by at most {most:.1g} of the largest number")


def _compare_alone(tokens: list[int], num_answers: int, answer_len: int) -> None:
    """Print for each kind of KV how many greedy outputs are equal in a batch and alone."""
    prompts = _spread(tokens, num_answers, _PROMPT_LEN)
    print(f"\n{num_answers} greedy answers of {answer_len} tokens, together and alone\n")
    print(f"| KV | the same | first difference, median | gap of the logits there | above {_EQUAL_GAP:g} |")
    print("| --- | --- | --- | --- | --- |")
    for dtype in KV_CACHE_DTYPES:
        engine = make_engine(dtype)
        together = our_answers(engine, prompts, answer_len)
        alone = [our_answers(engine, [prompt], answer_len)[0] for prompt in prompts]
        engine.close()
        forward = our_forward(dtype, _PROMPT_LEN + answer_len)
        differing = [each for each in zip(prompts, together, alone, strict=True) if each[1] != each[2]]
        gaps = [_gap_where_they_part(forward, *each) for each in differing]
        firsts = [_first_difference(a, b) for _, a, b in differing]
        shown = f"{statistics.median(firsts):.0f} | {min(gaps):.1g} to {max(gaps):.1g}" if gaps else "- | -"
        num_wide = sum(gap >= _EQUAL_GAP for gap in gaps)
        print(f"| {_name(dtype)} | {len(prompts) - len(gaps)} of {len(prompts)} | {shown} | {num_wide} |", flush=True)


def _compare_chunks(tokens: list[int], num_tokens: int, window: int) -> None:
    """Print for each kind of KV, in metal-engine and in mlx-lm, how results differ between two chunk sizes."""
    windows = _spread(tokens, max(1, num_tokens // window), window)
    print(f"\n{len(windows)} x {window:,} tokens of text in chunks of {_CHUNK} and of {_ODD_CHUNK}\n")
    print("| KV | log probability differs, mean | most | same next token |\n| --- | --- | --- | --- |")
    for dtype, bits in (("auto", None), ("int8", 8), ("int4", 4)):
        _report_chunks(f"ours, {_name(dtype)}", *(our_scores(dtype, windows, n) for n in (_CHUNK, _ODD_CHUNK)))
        _report_chunks(f"mlx-lm, {_name(dtype)}", *(mlx_lm_scores(bits, windows, n) for n in (_CHUNK, _ODD_CHUNK)))


def _gap_where_they_part(forward: Forward, prompt: list[int], a: list[int], b: list[int]) -> float:
    """Return the difference between the logits of the first two tokens in which outputs ``a`` and ``b`` differ.

    The logits are computed from the prompt and the outputs' common prefix.
    """
    first = _first_difference(a, b)
    logits = np.array(forward(prompt + a[:first], 0)[-1])
    return float(abs(logits[a[first]] - logits[b[first]]))


def _report_chunks(name: str, one: Scored, other: Scored) -> None:
    apart, agree = np.abs(one.logprobs - other.logprobs), (one.likeliest == other.likeliest).mean()
    print(f"| {name} | {apart.mean():.1g} | {apart.max():.1g} | {agree:.2%} |", flush=True)


def compare_speed(tokens: list[int], num_requests: int, prompt_len: int, rounds: int) -> None:
    """Print prefill and decode speeds for each kind of KV, relative to float KV: ratios of medians over the rounds."""
    prompts = _spread(tokens, num_requests, prompt_len)
    engines = {dtype: make_engine(dtype) for dtype in KV_CACHE_DTYPES}
    prefill: dict[str, list[float]] = {dtype: [] for dtype in engines}
    decode: dict[str, list[float]] = {dtype: [] for dtype in engines}
    for _ in range(rounds):
        for dtype, engine in engines.items():
            params = SamplingParams(temperature=0.0, max_tokens=_SPEED_STEPS, ignore_eos=True)
            for i, prompt in enumerate(prompts):
                engine.core.add_request(str(i), engine.preparer.prepare(prompt, params))
            num_chosen, start = 0, time.perf_counter()
            while num_chosen < len(prompts):
                num_chosen += sum(len(output.token_ids) for output in engine.core.step())
            prefill[dtype].append(time.perf_counter() - start)
            while engine.core.has_requests:
                start = time.perf_counter()
                engine.core.step()
                decode[dtype].append(time.perf_counter() - start)
    print(f"\n{num_requests} requests of {prompt_len:,} tokens, in turns, {rounds} rounds\n")
    print("| KV | bytes of a token | prefill, of float's speed | decode, of float's speed |\n| --- | --- | --- | --- |")
    for dtype, engine in engines.items():
        ratios = [statistics.median(all_of["auto"]) / statistics.median(all_of[dtype]) for all_of in (prefill, decode)]
        size = engine.core.config.model.kv_bytes_per_token
        print(f"| {_name(dtype)} | {size:,} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)
        engine.close()


def _name(kv_cache_dtype: str) -> str:
    return "float" if kv_cache_dtype == "auto" else kv_cache_dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("text", "answers", "batch", "speed"))
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--num-answers", type=int, default=100)
    parser.add_argument("--answer-len", type=int, default=64)
    parser.add_argument("--num-requests", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = load_gguf_tokenizer(fetch_demo_model())
    tokens = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    print(f"Python {sys.version.split()[0]}'s language reference: {len(tokens):,} tokens")
    if args.only in (None, "text"):
        compare_text(tokens, args.num_tokens, args.window)
    if args.only in (None, "answers"):
        compare_answers(tokens, args.num_answers, args.answer_len)
    if args.only in (None, "batch"):
        compare_batches(tokens, args.num_answers, args.answer_len, args.num_tokens, args.window)
    if args.only in (None, "speed"):
        compare_speed(tokens, args.num_requests, args.prompt_len, args.rounds)


if __name__ == "__main__":
    main()
