"""Which attention shapes the kernel does, and how it shares out the work of one.

A shape is what a layer's kind of attention is made of; a variant is one compilation of the kernel for it: the template
arguments of ``paged_attention.metal`` that say who does what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from metal_engine.attention.metal.cuts import DEFAULT_CUT, Cut
from metal_engine.device.metal_kernels import DTYPES

HEAD_DIMS = range(8, 513, 4)  # of K and of V
MAX_LATENT = 640  # of a latent with its position part
BLOCK_SIZES = (8, 16, 32)
QUANTIZED_BITS = (8, 4)
QUANTIZED_GROUPS = (64, 32)
GROUPS = 8  # SIMD groups of a threadgroup, as in attention_rows.metal
THREADS = GROUPS * 32
STAGE_BYTES = 26 << 10  # most threadgroup memory for staged keys and their sums, of Metal's 32 KiB
# Most fragments of the output in a SIMD group, and of the queries: each is two registers of every lane in float32.
MANY_FRAGMENTS = 20
# As many, where more SIMD groups could share them: so head dims from 148 on are shared out.
SHARED_FRAGMENTS = 18
# As many, in 16 bits and with the head shared out as far as it goes, for heads that would be read twice otherwise.
MANY_FRAGMENTS_OF_16_BITS = 27
TOO_WIDE_TO_STAGE = 256
QUANTIZED_COLUMNS = (8, 4)  # that a lane may load at a time
MAX_STRIPS = 3  # row fragments of a direct item: all of them leave through threadgroup memory together
# A lane has 128 registers. Two threadgroups run on a core if it takes at most 104. Addresses and the like take 35 of
# them, as compiled for M1 (docs/dev/kernels.md), and more for each key fragment and for each row fragment.
MOST_REGISTERS = 104 - 35
REGISTERS_OF_HELD = 5
REGISTERS_OF_STRIP = 12
ROWS_REGISTERS = 78  # most for queries and output where SIMD groups are to have whole groups of quantized columns
HELD_FRAGMENTS = 6  # key fragments times row fragments, which the exchange between parts has room for


class UnsupportedAttentionError(ValueError):
    """An attention shape that the kernel cannot compute; the message names it."""


@dataclass(frozen=True)
class AttentionShape:
    """What one kind of attention layer computes.

    Attributes:
        dtype: of queries, K, V and the output.
        head_dim: of queries and K, a latent's position part included.
        v_head_dim: of V and the output. With ``is_latent``, V is so many first columns of K.
        bits: of the integers that K and V are kept as; 0: they are kept as they are. ``group_size`` columns of a row
            share a scale and a bias.
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
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def template(self) -> list[tuple[str, mx.Dtype | int]]:
        """The kernel's template arguments that say what it computes."""
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
    """How the kernel shares out the work of a shape; the names are those of its template arguments, in lower case.

    Attributes:
        strips: most row fragments (8 rows) of an item that goes the direct way.
        parts: SIMD groups among which the columns of such an item are shared out.
        held: key fragments that a SIMD group loads together.
        k_columns: elements that a lane loads at a time of a key; ``rest_columns`` of a latent's position part;
            ``v_columns`` of a value.
        staged_parts: as ``parts``, for items that go the staged way; 0: the variant has none.
        bk: splits of a context begin at multiples of this number of keys. A stage has :func:`stage_keys` of them.
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
        """Most rows of an item."""
        return GROUPS * 8 // self.staged_parts if self.staged_parts else self.strips * 8

    @property
    def template(self) -> list[tuple[str, int]]:
        """The template arguments."""
        return [(name.upper(), value) for name, value in vars(self).items()]


def check_supported(shape: AttentionShape) -> None:
    """Raise UnsupportedAttentionError, naming the shape, unless the kernel covers it."""

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
    """Groups must not begin or end within what lanes load together (attention_quantized.metal)."""
    if shape.bits not in QUANTIZED_BITS or shape.group_size not in QUANTIZED_GROUPS:
        refuse(f"integers must have {' or '.join(map(str, QUANTIZED_BITS))} bits, in groups of 64 or 32")
    if shape.head_dim % shape.group_size or (not shape.is_latent and shape.v_head_dim % shape.group_size):
        refuse("a row must be whole groups")
    if shape.is_latent and shape.v_head_dim % (4 * QUANTIZED_COLUMNS[-1]):
        refuse(f"columns of a quantized latent must be a multiple of {4 * QUANTIZED_COLUMNS[-1]}")


@cache
def variant_of(shape: AttentionShape, cut: Cut = DEFAULT_CUT) -> KernelVariant:
    """How the kernel computes a shape that :func:`check_supported` lets pass."""
    widest = max(shape.head_dim, shape.v_head_dim)
    can_stage = cut.staged_parts and not shape.is_latent and widest <= TOO_WIDE_TO_STAGE
    staged_parts = max(_parts(widest, 1), cut.staged_parts) if can_stage else 0
    strips = _strips(shape, widest, min(MAX_STRIPS, cut.most_strips), is_staged=staged_parts > 0)
    parts = _parts(widest, strips)  # a SIMD group has all row fragments of a direct item: more of them, fewer columns
    if shape.bits and shape.dtype.size == 2:
        parts = _parts_of_groups(shape, strips, parts)
    rest = shape.head_dim - shape.v_head_dim if shape.is_latent else 0
    if shape.is_latent:
        v_columns = k_columns = _columns_of_load(shape.v_head_dim, shape, parts)
        rest_columns = _columns_of_load(rest, shape, parts)
    else:
        k_columns = rest_columns = _columns_of_load(shape.head_dim, shape, parts)
        v_columns = _columns_of_load(shape.v_head_dim, shape, parts)
    fragments = _fragments(shape.head_dim - rest, k_columns, parts) + _fragments(rest, rest_columns, parts)
    registers = fragments * shape.dtype.size // 2  # of the queries or keys; a fragment of the output has two
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
    """Whether a SIMD group has room for ``n`` fragments of keys that it loads together.

    Args:
        registers: of a lane for a fragment's columns, unpacked.
        rows_registers: for the queries and the output.
    """
    loaded = held = n * registers
    if shape.bits:
        # With a scale and a bias, and those of a latent's position part.
        one = -(-registers * shape.bits // (8 * shape.dtype.size)) + (4 if shape.is_latent else 2)
        loaded = n * one
        # One is unpacked at a time, but where they are multiplied again.
        held = one + n * registers if shape.is_latent or strips > 1 else loaded + registers
    beside = n * REGISTERS_OF_HELD + (strips - 1) * REGISTERS_OF_STRIP
    return n * strips <= HELD_FRAGMENTS and rows_registers + held + beside <= MOST_REGISTERS


@cache
def fits_tensor_ops(shape: AttentionShape, cut: Cut = DEFAULT_CUT) -> bool:
    """Whether the staged way can compute a shape on matrix units (attention_tensor.metal): in products of 16 columns of
    K and 32 of V, by SIMD groups that have all of them.
    """
    is_half = shape.dtype in (mx.float16, mx.bfloat16)
    has_whole_products = shape.head_dim % 16 == 0 and shape.v_head_dim % 32 == 0
    return cut.tensor_ops and is_half and has_whole_products and variant_of(shape, cut).staged_parts == 1


def _strips(shape: AttentionShape, widest: int, most_strips: int, *, is_staged: bool) -> int:
    """Row fragments of a direct item: all query heads of a KV head, so that a decode reads each key once.

    As far as registers reach. More heads go the staged way, where there is one, and else as several items.
    """
    wanted = -(-shape.group // 8)
    if is_staged:
        return wanted if wanted <= most_strips else 1
    most = MANY_FRAGMENTS_OF_16_BITS if shape.dtype.size == 2 else MANY_FRAGMENTS
    fits = most_strips * -(-widest // (8 * GROUPS)) <= most and not (shape.bits and shape.is_latent)
    fitting = most_strips if fits else 2
    return max(2, min(wanted, fitting))


def _parts(dim: int, strips: int) -> int:
    """SIMD groups among which ``dim`` columns of so many row fragments are shared out."""
    few_enough = (parts for parts in (1, 2, 4) if strips * -(-dim // (8 * parts)) <= SHARED_FRAGMENTS)
    return next(few_enough, GROUPS)


def _parts_of_groups(shape: AttentionShape, strips: int, parts: int) -> int:
    """Fewer SIMD groups, where several would have columns of one group and read its scale, if registers allow it."""

    def registers(parts: int) -> int:  # of the queries and the output
        return strips * (-(-shape.head_dim // (8 * parts)) + 2 * -(-shape.v_head_dim // (8 * parts)))

    while parts > 1 and shape.v_head_dim % (parts * shape.group_size) and registers(parts // 2) <= ROWS_REGISTERS:
        parts //= 2
    return parts


def _fragments(dim: int, columns: int, parts: int) -> int:
    """Fragments of ``dim`` columns in each part, if lanes load so many columns at a time."""
    return -(-dim // (4 * columns * parts)) * columns // 2


def _columns_of_load(dim: int, shape: AttentionShape, parts: int) -> int:
    """Elements of a lane's loads from ``dim`` columns of a row.

    As many as every row of the cache can be cut into, at most 16 bytes, unless that means many more fragments, for a
    SIMD group has whole chunks of four loads.
    """
    rows = (dim, shape.head_dim, shape.v_head_dim) if shape.is_latent else (dim,)
    if shape.bits:
        # A chunk of four loads lies in one group, the first one of a latent's position part, too.
        choices = [n for n in QUANTIZED_COLUMNS if not (shape.is_latent and shape.v_head_dim % (4 * n))]
    else:
        choices = [n for n in (8, 4, 2) if n * shape.dtype.size <= 16 and not any(row % n for row in rows)]
    fewest = min(_fragments(dim, n, parts) for n in choices)
    return next(n for n in choices if _fragments(dim, n, parts) <= fewest * 1.1)


def stage_keys(shape: AttentionShape, variant: KernelVariant) -> int:
    """Keys that are staged at a time, without tensor operations: STAGE_KEYS in paged_attention.metal."""
    is_wide = variant.staged_parts > 1 or (shape.bits > 0 and shape.head_dim > 64)
    return min(variant.bk, 16 if is_wide else 32)


def _keys_that_fit(shape: AttentionShape, staged_parts: int) -> int:
    """Keys that threadgroup memory has room for in one stage, at most 64."""
    row_bytes = -(-max(shape.head_dim, shape.v_head_dim) // 8) * 8 * shape.dtype.size + 16
    if staged_parts > 1:
        row_bytes += GROUPS * 32  # the parts' scores
    return next(keys for keys in (64, 32, 16, 8) if keys * row_bytes <= STAGE_BYTES)
