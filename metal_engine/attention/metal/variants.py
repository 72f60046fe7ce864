"""Attention shapes that the kernel supports, and the variant of the kernel that computes each shape.

A shape has the dimensions and types of a layer's attention. A variant is one compilation of the kernel for a shape: the
template arguments of ``paged_attention.metal`` that divide the work among SIMD groups and lanes.

A work item takes one of two ways through the kernel (docs/dev/kernels.md). A *direct* item has few rows, and each SIMD
group loads its keys into registers. A *staged* item has more rows, and its threadgroup loads keys into threadgroup
memory. SIMD groups multiply 8x8 matrices, called *fragments*. A row fragment is 8 rows, and a key fragment is 8 keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from metal_engine.attention.metal.cuts import DEFAULT_CUT, Cut
from metal_engine.device.metal_kernels import DTYPES

HEAD_DIMS = range(8, 513, 4)  # supported columns of K and of V
MAX_LATENT = 640  # maximum columns of a latent with its position part
BLOCK_SIZES = (8, 16, 32)
QUANTIZED_BITS = (8, 4)
QUANTIZED_GROUPS = (64, 32)
GROUPS = 8  # SIMD groups of a threadgroup, as in attention_rows.metal
THREADS = GROUPS * 32
STAGE_BYTES = 26 << 10  # maximum threadgroup memory for staged keys and the parts' scores, of Metal's 32 KiB
# Maximum fragments of the output in a SIMD group, and also of the queries, if all SIMD groups share the columns. In
# float32, a fragment takes two registers of every lane.
MANY_FRAGMENTS = 20
# The same maximum while the columns can be divided among more SIMD groups. Head dims from 148 on are therefore divided.
SHARED_FRAGMENTS = 18
# MANY_FRAGMENTS for 16-bit types. The limit is larger, so that items of wide heads can have more rows. With fewer rows,
# the keys would be read twice.
MANY_FRAGMENTS_OF_16_BITS = 27
TOO_WIDE_TO_STAGE = 256
QUANTIZED_COLUMNS = (8, 4)  # possible numbers of quantized columns that a lane loads at a time
# Maximum row fragments of a direct item. The results of all of them are in threadgroup memory together.
MAX_STRIPS = 3
# A lane has 128 registers. Two threadgroups run on a core if a lane takes at most 104. Addresses and similar values
# take 35 of them, as compiled for M1 (docs/dev/kernels.md). They take REGISTERS_OF_HELD more for each key fragment, and
# REGISTERS_OF_STRIP more for each row fragment after the first.
MOST_REGISTERS = 104 - 35
REGISTERS_OF_HELD = 5
REGISTERS_OF_STRIP = 12
# Maximum registers for queries and output if SIMD groups get more columns to have whole groups of quantized columns.
ROWS_REGISTERS = 78
HELD_FRAGMENTS = 6  # maximum of key fragments times row fragments: the size of the exchange of scores between parts


class UnsupportedAttentionError(ValueError):
    """The kernel does not support an attention shape. The message names the shape."""


@dataclass(frozen=True)
class AttentionShape:
    """Dimensions and types of one kind of attention layer.

    Attributes:
        dtype: type of queries, K, V and the output.
        head_dim: columns of queries and K, including a latent's position part.
        v_head_dim: columns of V and the output. With ``is_latent``, V is the first ``v_head_dim`` columns of K.
        bits: bits of the integers in which K and V are stored; 0 if they are not quantized.
        group_size: number of columns of a row that share a scale and a bias.
    """

    dtype: mx.Dtype
    head_dim: int
    v_head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    is_latent: bool = False
    bits: int = 0
    group_size: int = 0

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def template(self) -> list[tuple[str, mx.Dtype | int]]:
        """Template arguments of the kernel that describe the shape."""
        quantized = [("BITS", self.bits), ("GROUP_SIZE", self.group_size)] if self.bits else []
        return [
            ("T", self.dtype),
            ("DK", self.head_dim),
            ("DV", self.v_head_dim),
            ("LATENT", self.is_latent),
            ("G", self.group),
            ("BLOCK_SIZE", self.block_size),
            *quantized,
        ]

    def __str__(self) -> str:
        dims = f"head_dim {self.head_dim}, V head_dim {self.v_head_dim}"
        latent = ", latent" if self.is_latent else ""
        quantized = f", int{self.bits} in groups of {self.group_size}" if self.bits else ""
        return (
            f"{self.num_heads} query heads, {self.num_kv_heads} KV heads, {dims}{latent}{quantized}, "
            f"block size {self.block_size}, {self.dtype}"
        )


@dataclass(frozen=True)
class KernelVariant:
    """Division of a shape's work in the kernel. The fields are template arguments, in lower case.

    A work item with few row fragments is *direct*: its SIMD groups load keys from the cache themselves. Other items are
    *staged*: their SIMD groups share keys in threadgroup memory.

    Attributes:
        strips: maximum number of row fragments of a direct item.
        parts: number of SIMD groups that share the columns of a direct item.
        held: number of key fragments that a SIMD group loads together.
        k_columns: number of columns of a key that a lane loads at a time.
        rest_columns: number of columns of the rotary part of a latent's key that a lane loads at a time.
        v_columns: number of columns of a value that a lane loads at a time.
        staged_parts: number of SIMD groups that share the columns of a staged item; 0 if no item is staged.
        bk: unit in which the keys of a tile are split: a split starts a multiple of ``bk`` keys after the first key of
            its tile. Without tensor operations, a stage has :func:`stage_keys` keys, which may be fewer.
    """

    strips: int
    parts: int
    held: int
    k_columns: int
    rest_columns: int
    v_columns: int
    staged_parts: int
    bk: int

    @property
    def tile_rows(self) -> int:
        """Maximum rows of an item."""
        return GROUPS * 8 // self.staged_parts if self.staged_parts else self.strips * 8

    @property
    def template(self) -> list[tuple[str, int]]:
        """Template arguments of the kernel for this variant."""
        return [(name.upper(), value) for name, value in vars(self).items()]


def check_supported(shape: AttentionShape) -> None:
    """Raise UnsupportedAttentionError if the kernel does not support a shape. The message names the shape."""

    def refuse(why: str) -> None:
        raise UnsupportedAttentionError(
            f"the metal attention backend does not support {shape}: {why}. Choose --attention-backend mlx."
        )

    most = MAX_LATENT if shape.is_latent else HEAD_DIMS[-1]
    for dim in (shape.head_dim, shape.v_head_dim):
        if dim % HEAD_DIMS.step or not HEAD_DIMS[0] <= dim <= most:
            refuse(f"head_dim must be a multiple of {HEAD_DIMS.step} from {HEAD_DIMS[0]} to {most}")
    if shape.is_latent and not (shape.v_head_dim <= shape.head_dim and shape.v_head_dim <= HEAD_DIMS[-1]):
        refuse(f"a latent has at most {HEAD_DIMS[-1]} columns, all of them of the key")
    if shape.block_size not in BLOCK_SIZES:
        refuse(f"block size must be one of {BLOCK_SIZES}")
    if shape.dtype not in DTYPES:
        refuse("dtype must be float32, float16 or bfloat16")
    if shape.num_heads < 1 or shape.num_heads % shape.num_kv_heads:
        refuse("query heads must be a multiple of the KV heads")
    if shape.bits:
        _check_quantized(shape, refuse)


def _check_quantized(shape: AttentionShape, refuse: Callable[[str], None]) -> None:
    """Call ``refuse`` with the reason if the kernel does not support a quantized shape.

    A group of columns that share a scale must not end within a chunk of four loads (attention_quantized.metal).
    """
    if shape.bits not in QUANTIZED_BITS or shape.group_size not in QUANTIZED_GROUPS:
        refuse(f"integers must have {' or '.join(map(str, QUANTIZED_BITS))} bits, in groups of 64 or 32")
    if shape.head_dim % shape.group_size or (not shape.is_latent and shape.v_head_dim % shape.group_size):
        refuse("a row must be whole groups")
    if shape.is_latent and shape.v_head_dim % (4 * QUANTIZED_COLUMNS[-1]):
        refuse(f"columns of a quantized latent must be a multiple of {4 * QUANTIZED_COLUMNS[-1]}")


@cache
def variant_of(shape: AttentionShape, cut: Cut = DEFAULT_CUT) -> KernelVariant:
    """Return the kernel variant for a shape that :func:`check_supported` accepts."""
    widest = max(shape.head_dim, shape.v_head_dim)
    can_stage = cut.staged_parts and not shape.is_latent and widest <= TOO_WIDE_TO_STAGE
    staged_parts = max(_parts(widest, 1), cut.staged_parts) if can_stage else 0
    strips = _strips(shape, widest, min(MAX_STRIPS, cut.most_strips), is_staged=staged_parts > 0)
    # A SIMD group has all row fragments of a direct item. With more row fragments, it has fewer columns.
    parts = _parts(widest, strips)
    if shape.bits and shape.dtype.size == 2:
        parts = _parts_of_groups(shape, strips, parts)
    k_columns, rest_columns, fragments = columns_of_loads(shape, parts)
    v_columns = k_columns if shape.is_latent else _columns_of_load(shape.v_head_dim, shape, parts)
    # Registers of a lane for one row fragment of queries, or for one key fragment. A fragment of the output takes two.
    registers = fragments * shape.dtype.size // 2
    rows_registers = strips * (registers + 2 * _fragments(shape.v_head_dim, v_columns, parts))
    counts = (n for n in (2, 1) if n <= cut.most_held)
    held = next(n for n in counts if n == 1 or _can_hold(n, shape, strips, registers, rows_registers))
    return KernelVariant(
        strips=strips,
        parts=parts,
        held=held,
        k_columns=k_columns,
        rest_columns=rest_columns,
        v_columns=v_columns,
        staged_parts=staged_parts,
        bk=_keys_that_fit(shape, staged_parts) if staged_parts else 8,
    )


def _can_hold(n: int, shape: AttentionShape, strips: int, registers: int, rows_registers: int) -> bool:
    """Return True if a SIMD group has enough registers to load ``n`` key fragments together.

    Args:
        registers: registers of a lane for an unpacked key fragment.
        rows_registers: registers of a lane for the queries and the output.
    """
    loaded = held = n * registers
    if shape.bits:
        # A packed key fragment with a scale and a bias. A latent's position part has its own scale and bias.
        one = -(-registers * shape.bits // (8 * shape.dtype.size)) + (4 if shape.is_latent else 2)
        loaded = n * one
        # Key fragments are unpacked one by one. Latents, and keys for several row fragments, are multiplied more than
        # once, so all unpacked fragments stay in registers.
        held = one + n * registers if shape.is_latent or strips > 1 else loaded + registers
    beside = n * REGISTERS_OF_HELD + (strips - 1) * REGISTERS_OF_STRIP
    return n * strips <= HELD_FRAGMENTS and rows_registers + held + beside <= MOST_REGISTERS


@cache
def fits_tensor_ops(shape: AttentionShape, cut: Cut = DEFAULT_CUT) -> bool:
    """Return True if staged items of a shape can be computed on matrix units (attention_tensor.metal).

    A product has 16 columns of K, or 32 columns of V. The kernel requires 16-bit types, and that one SIMD group has all
    columns of its rows.
    """
    is_half = shape.dtype in (mx.float16, mx.bfloat16)
    has_whole_products = shape.head_dim % 16 == 0 and shape.v_head_dim % 32 == 0
    return cut.tensor_ops and is_half and has_whole_products and variant_of(shape, cut).staged_parts == 1


def _strips(shape: AttentionShape, widest: int, most_strips: int, *, is_staged: bool) -> int:
    """Return the maximum number of row fragments of a direct item.

    If possible, a direct item has all query heads of a KV head, so that a decode reads each key once. Otherwise, such
    rows are computed by staged items. If the shape cannot be staged, the heads are divided among several direct items.

    Args:
        widest: larger number of columns of K and V.
        most_strips: maximum of the cut.
        is_staged: True if the shape has staged items.
    """
    wanted = -(-shape.group // 8)
    if is_staged:
        return wanted if wanted <= most_strips else 1
    most = MANY_FRAGMENTS_OF_16_BITS if shape.dtype.size == 2 else MANY_FRAGMENTS
    fits = most_strips * -(-widest // (8 * GROUPS)) <= most and not (shape.bits and shape.is_latent)
    fitting = most_strips if fits else 2
    return max(2, min(wanted, fitting))


def _parts(dim: int, strips: int) -> int:
    """Return the number of SIMD groups that divide ``dim`` columns of ``strips`` row fragments among them.

    This is the smallest number with which a group has at most ``SHARED_FRAGMENTS`` fragments.
    """
    few_enough = (parts for parts in (1, 2, 4) if strips * -(-dim // (8 * parts)) <= SHARED_FRAGMENTS)
    return next(few_enough, GROUPS)


def _parts_of_groups(shape: AttentionShape, strips: int, parts: int) -> int:
    """Return ``parts``, halved until no two SIMD groups share a quantization group of V's columns.

    SIMD groups that share a quantization group would each read its scale. Halving stops earlier if a lane would need
    more than ``ROWS_REGISTERS`` registers for the queries and the output.
    """

    def registers(parts: int) -> int:  # registers of a lane for the queries and the output
        return strips * (-(-shape.head_dim // (8 * parts)) + 2 * -(-shape.v_head_dim // (8 * parts)))

    while parts > 1 and shape.v_head_dim % (parts * shape.group_size) and registers(parts // 2) <= ROWS_REGISTERS:
        parts //= 2
    return parts


def _fragments(dim: int, columns: int, parts: int) -> int:
    """Return the number of fragments of ``dim`` columns in each part, if a lane loads ``columns`` at a time."""
    return -(-dim // (4 * columns * parts)) * columns // 2


def columns_of_loads(shape: AttentionShape, parts: int) -> tuple[int, int, int]:
    """Return the division of a key in direct items.

    Returns:
        Three numbers: columns of a key that a lane loads at a time, columns of a latent's position part that a lane
        loads at a time, and fragments of a key in each part.
    """
    if not shape.is_latent:
        columns = _columns_of_load(shape.head_dim, shape, parts)
        return columns, columns, _fragments(shape.head_dim, columns, parts)
    rest = shape.head_dim - shape.v_head_dim
    k_columns, rest_columns = (_columns_of_load(dim, shape, parts) for dim in (shape.v_head_dim, rest))
    fragments = _fragments(shape.v_head_dim, k_columns, parts) + _fragments(rest, rest_columns, parts)
    return k_columns, rest_columns, fragments


def _columns_of_load(dim: int, shape: AttentionShape, parts: int) -> int:
    """Return the number of columns that a lane loads at a time from ``dim`` columns of a row.

    A load has at most 16 bytes, and its size divides the size of every row of the cache. The result is the largest such
    load that takes at most 10% more fragments than necessary. A SIMD group has whole chunks of four loads, so a large
    load can take more fragments.
    """
    rows = (dim, shape.head_dim, shape.v_head_dim) if shape.is_latent else (dim,)
    if shape.bits:
        # A chunk of four loads must lie in one group. A latent's position part must therefore begin with a new chunk.
        choices = [n for n in QUANTIZED_COLUMNS if not (shape.is_latent and shape.v_head_dim % (4 * n))]
    else:
        choices = [n for n in (8, 4, 2) if n * shape.dtype.size <= 16 and not any(row % n for row in rows)]
    fewest = min(_fragments(dim, n, parts) for n in choices)
    return next(n for n in choices if _fragments(dim, n, parts) <= fewest * 1.1)


def stage_keys(shape: AttentionShape, variant: KernelVariant) -> int:
    """Return the number of keys of a stage without tensor operations: STAGE_KEYS in paged_attention.metal."""
    is_wide = variant.staged_parts > 1 or (shape.bits > 0 and shape.head_dim > 64)
    return min(variant.bk, 16 if is_wide else 32)


def _keys_that_fit(shape: AttentionShape, staged_parts: int) -> int:
    """Return the number of keys of a stage that fit into threadgroup memory, at most 64."""
    row_bytes = -(-max(shape.head_dim, shape.v_head_dim) // 8) * 8 * shape.dtype.size + 16
    if staged_parts > 1:
        row_bytes += GROUPS * 32  # the parts' scores
    return next(keys for keys in (64, 32, 16, 8) if keys * row_bytes <= STAGE_BYTES)
