"""Tests the Metal kernel on this device when a model is loaded, for each kind of layer in the model.

A Mac compiles a kernel at its first use. That may fail with an error of the compiler, a pipeline with too few threads,
or too much threadgroup memory. Therefore all variants that serving uses run here on random numbers:

- a step with only one decode
- a step with a chunk and two decodes, in which the context of one decode is split and merged
- with tensor operations or a measured cut, a step with a longer chunk
- for a model with images whose tokens attend to each other, a step with such images

The results are compared with the results of the portable backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, AttentionKind
from metal_engine.attention.indexed import KeySelection
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.sample_steps import attend_kind, forget_errors, random_array, random_queries, random_sinks
from metal_engine.kv_cache.pool import make_state
from metal_engine.kv_cache.rows import ImageSpans, StepRows, step_rows
from metal_engine.kv_cache.spec import QuantizedKVSpec
from metal_engine.kv_cache.state import KVState, StateSnapshot

# (tokens, context tokens) of each request. The long context is split even with the window.
_SINGLE_DECODE = [(1, 20)]
_MIXED_BATCH = [(1, 1087), (11, 9), (1, 29)]
_CHUNK = [(70, 130)]  # more than one tile of rows, and several stages of keys
# Images in the second request: with few rows, and with several tiles.
_BATCH_WITH_IMAGES = [(1, 1087), (200, 30)]
_SPANS = [(3, 6), (20, 180)]
# Largest norm of the error of one head's output row, relative to the row's norm. One missing key in the longest
# context causes 3e-2.
_TOLERANCE = {mx.float32: 5e-3, mx.float16: 5e-3, mx.bfloat16: 2e-2}


class KernelFailedError(Exception):
    """The kernel does not work for a kind of layer on this device.

    Attributes:
        report: full description with Metal's own text; may have many lines.
    """

    def __init__(self, summary: str, report: str) -> None:
        super().__init__(summary)
        self.report = report


def try_kernel(metal: MetalBackend, kind: AttentionKind, block_size: int) -> None:
    """Compute small steps of a kind of layer, and compare them with the portable backend.

    Args:
        metal: backend of the kernel.
        kind: kind of layer.
        block_size: block size of the server.

    Raises:
        UnsupportedAttentionError: the kernel does not support the shape.
        KernelFailedError: the kernel does not build or run here, or its results are wrong.
    """
    if kind.dtype != kind.spec.dtype:
        raise UnsupportedAttentionError(
            f"the metal attention backend does not support {kind}, over keys of {kind.spec.dtype}. "
            "Choose --attention-backend auto or mlx."
        )
    for segments, backend in selftest_steps(metal):
        _compare(backend, kind, shuffled_rows(segments, block_size), f"queries and contexts of {segments}")


def try_images(metal: MetalBackend, kind: AttentionKind, block_size: int) -> None:
    """Compute a step with images whose tokens attend to each other, and compare it with the portable backend.

    Takes the arguments of :func:`try_kernel`.

    Raises:
        UnsupportedAttentionError: the kernel does not support the shape.
        KernelFailedError: the kernel does not build or run here, or its results are wrong.
    """
    spans = ImageSpans(np.array(_SPANS, np.int32), "every layer")
    rows = replace(shuffled_rows(_BATCH_WITH_IMAGES, block_size), image_spans=spans)
    _compare(metal.splitting(), kind, rows, f"images of {_SPANS}")


def _compare(backend: MetalBackend, kind: AttentionKind, rows: StepRows, step: str) -> None:
    """Raise KernelFailedError if the kernel and the portable backend differ. The error names the rows by ``step``."""
    state = random_state(kind, rows)
    with running():
        out = attend_random(backend, kind, rows, state)
    check_rows(out, attend_random(PortableBackend(), kind, rows, state), kind, step)


@contextmanager
def running() -> Iterator[None]:
    """Convert errors of kernels within a ``with`` block to KernelFailedError. Discard the errors that streams store.

    UnsupportedAttentionError is not converted.
    """
    try:
        yield
    except UnsupportedAttentionError:
        raise
    # ValueError: MLX raises it for a threadgroup larger than the pipeline's maxTotalThreadsPerThreadgroup.
    except (RuntimeError, ValueError) as error:
        forget_errors()
        raise KernelFailedError("does not run on this device", f"{type(error).__name__}: {error}") from error


def check_rows(out: np.ndarray, expected: np.ndarray, kind: AttentionKind, step: str) -> None:
    """Raise KernelFailedError if outputs, [N, Hq, Dv], differ by more than rounding.

    The error names the rows by ``step``.
    """
    gaps = np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)  # [N, Hq]
    if not gaps.max() <= _TOLERANCE[kind.dtype]:  # NaN too
        summary = f"gives wrong results on this device, off by {gaps.max():.1g} of their size"
        raise KernelFailedError(summary, f"{step}: {summary}")


def selftest_steps(metal: MetalBackend) -> list[tuple[list[tuple[int, int]], MetalBackend]]:
    """Return the steps that together run all variants that serving uses, and the backend for each step.

    A step is a list of (tokens, context tokens) of its requests.
    """
    steps = [(_SINGLE_DECODE, metal), (_MIXED_BATCH, metal.splitting())]
    return [*steps, (_CHUNK, metal)] if metal.has_tensor_ops or metal.cuts else steps


def shuffled_rows(segments: list[tuple[int, int]], block_size: int) -> StepRows:
    """Return rows of requests whose blocks are shuffled."""
    query_lens, context_lens = np.array(segments, np.int32).T
    num_blocks = -(-(query_lens + context_lens) // block_size)
    block_table = np.zeros((len(segments), num_blocks.max()), np.int32)
    used = np.arange(num_blocks.max()) < num_blocks[:, None]
    block_table[used] = np.random.default_rng(0).permutation(num_blocks.sum())
    return step_rows(block_table, context_lens, query_lens, block_size)


def random_state(kind: AttentionKind, rows: StepRows) -> KVState:
    """Return a layer's state with random K and V for all blocks of a step."""
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


def attend_random(
    backend: AttentionBackend,
    kind: AttentionKind,
    rows: StepRows,
    state: KVState,
    selection: KeySelection | None = None,
) -> np.ndarray:
    """Compute attention of random queries, [N, Hq, Dv] float32. For latents, return only the value's columns.

    Raises MLX's errors of building and running the operations.
    """
    queries, sinks = random_queries(kind, rows.num_tokens), random_sinks(kind)
    out = attend_kind(backend.for_step(rows), kind, queries, state, sinks, selection)
    if kind.spec.latent_dim is not None:
        out = out[..., : kind.spec.latent_dim]
    mx.eval(out)  # raises errors of operations; the conversion to NumPy would not
    return np.array(out.astype(mx.float32))
