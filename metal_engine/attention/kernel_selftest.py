"""Tries the kernel on this device, at load, for each kind of layer that a model has.

A Mac compiles a kernel at the first use. That may fail: an error of the compiler, a pipeline with too few threads,
too much threadgroup memory. All variants that serving uses run here on random numbers:

- a decode of one row alone
- a step with a decode whose context is split and merged, a chunk, and another decode
- with tensor operations or a measured cut: a longer chunk

The portable backend has the right answers.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, AttentionKind
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.sample_steps import attend_kind, forget_errors, random_array, random_queries, random_sinks
from metal_engine.kv_cache.pool import make_state
from metal_engine.kv_cache.rows import StepRows, step_rows
from metal_engine.kv_cache.spec import QuantizedKVSpec
from metal_engine.kv_cache.state import KVState, StateSnapshot

# (tokens, tokens before them) of each request: long enough to be split, and the window, too.
_ALONE = [(1, 20)]
_IN_COMPANY = [(1, 1087), (11, 9), (1, 29)]
_CHUNK = [(70, 130)]  # more than a tile of rows, over several stages of keys
# Of a row of one head, relative to its length. One key of the longest context more or less makes 3e-2.
_TOLERANCE = {mx.float32: 5e-3, mx.float16: 5e-3, mx.bfloat16: 2e-2}


class KernelFailedError(Exception):
    """The kernel does not work for a kind of layer on this device.

    Attributes:
        report: all that is known, Metal's own text included; may have many lines.
    """

    def __init__(self, summary: str, report: str) -> None:
        super().__init__(summary)
        self.report = report


def try_kernel(metal: MetalBackend, kind: AttentionKind, block_size: int) -> None:
    """Compute small steps of a kind of layer, and compare.

    Args:
        block_size: the server's.

    Raises:
        UnsupportedAttentionError: the kernel does not do the shape.
        KernelFailedError: it does not build or run here, or its results are wrong.
    """
    if kind.dtype != kind.spec.dtype:
        raise UnsupportedAttentionError(
            f"the metal attention backend does not support {kind}, over keys of {kind.spec.dtype}. "
            "Choose --attention-backend auto or mlx."
        )
    steps = [(_ALONE, metal), (_IN_COMPANY, metal.splitting())]
    if metal.has_tensor_ops or metal.cuts:
        steps.append((_CHUNK, metal))
    for segments, backend in steps:
        rows = _rows(segments, block_size)
        state = _random_state(kind, rows)
        try:
            out = _attend(backend, kind, rows, state)
        except UnsupportedAttentionError:
            raise
        # ValueError: MLX raises it for a threadgroup larger than the pipeline's maxTotalThreadsPerThreadgroup.
        except (RuntimeError, ValueError) as error:
            forget_errors()
            raise KernelFailedError("does not run on this device", f"{type(error).__name__}: {error}") from error
        expected = _attend(PortableBackend(), kind, rows, state)
        gaps = np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)  # [N, Hq]
        if not gaps.max() <= _TOLERANCE[kind.dtype]:  # NaN too
            summary = f"gives wrong results on this device, off by {gaps.max():.1g} of their size"
            raise KernelFailedError(summary, f"queries and contexts of {segments}: {summary}")


def _rows(segments: list[tuple[int, int]], block_size: int) -> StepRows:
    """Requests whose blocks are shuffled."""
    query_lens, context_lens = np.array(segments, np.int32).T
    num_blocks = -(-(query_lens + context_lens) // block_size)
    block_table = np.zeros((len(segments), num_blocks.max()), np.int32)
    used = np.arange(num_blocks.max()) < num_blocks[:, None]
    block_table[used] = np.random.default_rng(0).permutation(num_blocks.sum())
    return step_rows(block_table, context_lens, query_lens, block_size)


def _random_state(kind: AttentionKind, rows: StepRows) -> KVState:
    state = make_state(kind.spec)
    assert isinstance(state, KVState)
    state.allocate(int(rows.block_table.max()) + 1, rows.block_size)
    kept = kind.spec.full if isinstance(kind.spec, QuantizedKVSpec) else kind.spec
    num_slots = len(state.keys)
    arrays = {
        name: random_array((num_slots, *array.shape), array.dtype, seed)
        for seed, (name, array) in enumerate(kept.token_arrays.items())
    }
    state.restore(StateSnapshot(state.encode(arrays)))
    return state


def _attend(backend: AttentionBackend, kind: AttentionKind, rows: StepRows, state: KVState) -> np.ndarray:
    """[N, Hq, Dv] float32; of latents what their reader takes."""
    out = attend_kind(backend.for_step(rows), kind, random_queries(kind, rows.num_tokens), state, random_sinks(kind))
    if kind.spec.latent_dim is not None:
        out = out[..., : kind.spec.latent_dim]
    mx.eval(out)  # which raises what an operation raised, as the conversion would not
    return np.array(out.astype(mx.float32))
