"""Changes how the attention kernel reads quantized K and V, as kernel_mutants.py changes the kernels."""

from __future__ import annotations

import sys

import mlx.core as mx

from .kernel_mutants import DIRECT, ITEM, MutantCase, check_with
from .mutants import Mutant, run_mutants

QUANTIZED = "attention_quantized"
_NAN = "as_type<float>(0x7fc00000u)"
MUTANTS = (
    # An element.
    Mutant(QUANTIZED, "fma(float(integer), scale, bias)", "float(integer) * scale"),
    Mutant(QUANTIZED, "fma(float(integer), scale, bias)", "fma(float(integer), bias, scale)"),
    Mutant(QUANTIZED, "fma(float(integer), scale, bias)", "fma(float(integer), float(T(scale * 1.02f)), bias)"),
    Mutant(QUANTIZED, "word(piece, i * BITS / 32)", "word(piece, 0)"),
    Mutant(QUANTIZED, "i * BITS % 32", "i * BITS % 16"),
    Mutant(QUANTIZED, "(1u << BITS) - 1", "(1u << BITS) - 2"),
    # Addresses of rows, and tensors that they belong to.
    Mutant(QUANTIZED, "row * (WIDTH / GROUP_SIZE)", "row * (WIDTH / GROUP_SIZE + 1)"),
    Mutant(QUANTIZED, "row * (WIDTH / GROUP_SIZE)", "row"),
    Mutant(QUANTIZED, "row * (WIDTH / COLUMNS)", "row * (WIDTH / (COLUMNS * 2))"),
    Mutant(QUANTIZED, "rows.biases[groups + round * 4]", "rows.scales[groups + round * 4]"),
    Mutant(QUANTIZED, "rows.biases[groups + round * 4]", "rows.biases[0]"),
    Mutant(QUANTIZED, "row * (WIDTH / GROUP_SIZE) + column / GROUP_SIZE;",
           "row * (WIDTH / GROUP_SIZE) + column / GROUP_SIZE + 1;"),
    Mutant(ITEM, "v_rows = {v_cache, v_scales", "v_rows = {v_cache, k_scales"),
    Mutant(ITEM, "v_rows = {v_cache, v_scales, v_biases", "v_rows = {v_cache, v_scales, k_biases"),
    Mutant(ITEM, "k_rows = {k_cache, k_scales", "k_rows = {k_cache, v_scales"),
    Mutant(ITEM, "v_rows = {v_cache, v_scales", "v_rows = {k_cache, v_scales"),
    # Direct method: loads of a lane.
    Mutant(QUANTIZED, "+ column / COLUMNS);", "+ column / COLUMNS / 2);"),
    Mutant(QUANTIZED, "WHOLE || column + chunk * Loaded::CHUNK < end", "true"),
    Mutant(QUANTIZED, "Loaded::CHUNK * PARTS == END - BEGIN", "Loaded::CHUNK >= END - BEGIN",
           equivalent="no shape has a part that is wider than its columns, so this only adds checks"),
    Mutant(QUANTIZED, "if (exists) {", "{"),
    Mutant(QUANTIZED, "loaded.pieces[chunk] = Piece(0);", "", equivalent="the scale and the bias are zero"),
    Mutant(QUANTIZED, "loaded.scales[round] = 0.0f;", f"loaded.scales[round] = {_NAN};"),
    Mutant(QUANTIZED, "loaded.biases[round] = 0.0f;", f"loaded.biases[round] = {_NAN};"),
    Mutant(QUANTIZED, "(first_column / GROUP_SIZE + group) * GROUP_SIZE", "group * GROUP_SIZE"),
    Mutant(QUANTIZED, "round * 4 + lane_column / 2;", "lane_column / 2;"),
    Mutant(QUANTIZED, "if (has) {", "if (true) {"),
    Mutant(QUANTIZED, "* GROUP_SIZE < end", "* GROUP_SIZE < end - GROUP_SIZE"),
    Mutant(QUANTIZED, "min(END, first_column + CHUNKS * Loaded::CHUNK)", "END"),
    Mutant(QUANTIZED, "rows.scales[groups + round * 4]", "rows.scales[0]"),
    Mutant(QUANTIZED, "rows.group(row, first_column) + uint(lane_column / 2)", "rows.group(row, first_column)"),
    Mutant(QUANTIZED, "BEGIN + first * Loaded::CHUNK;", "first * Loaded::CHUNK;"),
    # Direct method: values from other lanes.
    Mutant(QUANTIZED, "Loaded::ALIGNED ? 0 : (BEGIN", "true ? 0 : (BEGIN"),
    Mutant(QUANTIZED, "(BEGIN + first * Loaded::CHUNK) % GROUP_SIZE", "BEGIN % GROUP_SIZE"),
    Mutant(QUANTIZED, "!Loaded::ALIGNED || ", ""),
    Mutant(QUANTIZED, "!Loaded::ALIGNED || chunk * Loaded::CHUNK % GROUP_SIZE == 0", "true",
           equivalent="asks again for what it has"),
    Mutant(QUANTIZED, "!Loaded::ALIGNED || chunk * Loaded::CHUNK % GROUP_SIZE == 0", "chunk == 0"),
    Mutant(QUANTIZED, "(offset + chunk * Loaded::CHUNK) / GROUP_SIZE", "chunk"),
    Mutant(QUANTIZED, "aligned ? 0 : group_size - chunk", "0",
           equivalent="no head has parts where one group more is one round more"),
    Mutant(QUANTIZED, "group / 4 == round ? loaded.scales[round]", "false ? loaded.scales[round]"),
    Mutant(QUANTIZED, "group / 4 == round ? loaded.biases[round]", "false ? loaded.biases[round]"),
    Mutant(QUANTIZED, "bit == 0 ? 1 : 8", "bit == 0 ? 1 : 2"),
    Mutant(QUANTIZED, "bit < 2; ++bit", "bit < 1; ++bit"),
    Mutant(QUANTIZED, "!= ((group >> bit & 1) != 0)", ""),
    Mutant(QUANTIZED, "group >> bit & 1", "group & 1"),
    Mutant(QUANTIZED, "scale = other ? scale_there : scale;", ""),
    Mutant(QUANTIZED, "bias = other ? bias_there : bias;", ""),
    Mutant(QUANTIZED, "bias = other ? bias_there", "bias = other ? scale_there"),
    Mutant(DIRECT, "part * K_CHUNKS, lane,", "0, lane,"),
    Mutant(DIRECT, "part * REST_CHUNKS, lane,", "0, lane,"),
    Mutant(DIRECT, "part * V_CHUNKS, lane,", "0, lane,"),
    Mutant(DIRECT, "d / (K_COLUMNS / 2), part", "0, part"),
    Mutant(DIRECT, "(d - REST) / (REST_COLUMNS / 2), part", "0, part"),
    Mutant(DIRECT, "d / (V_COLUMNS / 2), part", "0, part"),
    # Staged.
    Mutant(QUANTIZED, "min(place.end, num_keys)", "place.end"),
    Mutant(QUANTIZED, "staged[i].piece = Piece(0);", "", equivalent="the scale and the bias are zero"),
    Mutant(QUANTIZED, "staged[i].number = 0.0f;", f"staged[i].number = {_NAN};"),
    Mutant(QUANTIZED, "uint(num_kv_heads) + uint(kv_head);", "uint(num_kv_heads);"),
    Mutant(QUANTIZED, "column % GROUP_SIZE / COLUMNS", "column / COLUMNS"),
    Mutant(QUANTIZED, "number < 2", "number < 3"),
    Mutant(QUANTIZED, "number == 0 ? rows.scales", "number == 1 ? rows.scales"),
    Mutant(QUANTIZED, "numbers[rows.group(row, column)]", "numbers[0]"),
    Mutant(QUANTIZED, "numbers[rows.group(row, column)]", "numbers[rows.group(row, column) + 1]"),
    Mutant(QUANTIZED, "tid % 32 / LANES * LANES", "0"),
    Mutant(QUANTIZED, "tid % 32 / LANES * LANES", "tid % 32 / (LANES * 2) * LANES * 2"),
    Mutant(QUANTIZED, "ushort(from + 1)", "from"),
    Mutant(QUANTIZED, "i * IN_WORD + IN_WORD - 1", "i * IN_WORD"),
    Mutant(QUANTIZED, "i * IN_WORD, scale", "i, scale"),
    Mutant(QUANTIZED, "uint(as_type<ushort>(next)) << 16", "uint(as_type<ushort>(next))"),
    # Direct: the groups of a part that has whole groups, and queries in threadgroup memory.
    Mutant(QUANTIZED, "group < CHUNKS * Loaded::CHUNK / GROUP_SIZE", "group + 1 < CHUNKS * Loaded::CHUNK / GROUP_SIZE"),
    Mutant(QUANTIZED, "WHOLE && Loaded::ALIGNED ?", "WHOLE ?"),
    Mutant(DIRECT, "(shared + EXCHANGE_BYTES / 16)", "shared"),
    Mutant(DIRECT, "uint(part * (STRIPS * DK_PART * 64)", "uint(0"),
    Mutant(DIRECT, "if (slot == 0) {", "{"),
    Mutant(DIRECT, "DK_PART + d) * 64 + 1]", "DK_PART + d) * 64]"),
    Mutant(DIRECT, "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    Mutant(DIRECT, "queries_of_lane[(strip * DK_PART + d) * 64];", "queries_of_lane[d * 64];"),
    Mutant(ITEM, "EXCHANGE_BYTES = 2 *", "EXCHANGE_BYTES ="),
)  # fmt: skip

CASES = (
    # Direct and staged items, several heads, and an incomplete fragment and stage.
    MutantCase([(1, 70), (5, 40), (20, 90)], 4, 2, mx.float16, head_dim=128, quantized=(8, 64), scale=0.09,
         tolerance=7e-4),
    # Two parts with half of a group of K each.
    MutantCase([(1, 77), (9, 40)], 2, 2, mx.bfloat16, head_dim=192, v_head_dim=128, quantized=(4, 64), window=30,
         scale=0.07,
         tolerance=8e-3),
    # Five groups of four lanes, and parts that begin inside a group.
    MutantCase([(1, 50), (2, 20)], 1, 1, mx.float16, head_dim=160, quantized=(4, 32), scale=0.08, tolerance=1e-3),
    MutantCase([(1, 50), (2, 20)], 1, 1, head_dim=288, quantized=(8, 32)),
    # Queries of two parts in threadgroup memory, with three row fragments.
    MutantCase([(1, 50), (2, 70)], 24, 1, mx.bfloat16, head_dim=128, quantized=(8, 64), scale=0.09, tolerance=8e-3),
    # Two row fragments; float32 in the stage.
    MutantCase([(1, 50), (3, 20)], 12, 1, head_dim=64, quantized=(4, 32)),
    # Latents: with a position part that begins inside a group, and with the usual sizes.
    MutantCase([(1, 300), (2, 33)], 12, 1, head_dim=128, v_head_dim=48, is_latent=True, quantized=(8, 32)),
    MutantCase([(1, 50)], 16, 1, mx.float16, head_dim=576, v_head_dim=512, is_latent=True, quantized=(4, 64),
         scale=0.05,
         tolerance=1e-3),
)  # fmt: skip


caught = check_with(CASES)


if __name__ == "__main__":
    sys.exit(run_mutants(MUTANTS, caught))
