// The staged way through paged_attention.metal: K, and then V in the same place, are copied to threadgroup memory by
// all threads, STAGE_KEYS keys at a time. Each SIMD group has one row fragment, and one of STAGED_PARTS parts of the
// columns.

constexpr int PARTS_OF_STAGED = STAGED_PARTS > 0 ? STAGED_PARTS : 1;
constexpr int DK_PART = divided_up(K_FRAGMENTS, PARTS_OF_STAGED);
constexpr int DV_PART = divided_up(V_FRAGMENTS, PARTS_OF_STAGED);

const int row_fragments = row_fragments_of(num_rows, GROUPS / PARTS_OF_STAGED);
const int slots = GROUPS / PARTS_OF_STAGED / row_fragments;
const int part = group % PARTS_OF_STAGED;
const int row_fragment = group / PARTS_OF_STAGED % row_fragments;
const int slot = group / PARTS_OF_STAGED / row_fragments;

const int row_of_tile = row_fragment * 8 + lane_row;
const bool row_exists = row_of_tile < num_rows;
const int row = first_row + row_of_tile;
const int head = kv_head * G + row % G;
const int position = first_position + row / G - first_token;
// First key that this lane's row sees, and the end.
const int sees = HAS_WINDOW ? max(key_begin, position - window + 1) : key_begin;
const int sees_end = min(key_end, HAS_IMAGES ? max(position + 1, image_end) : position + 1);

simdgroup_matrix<T, 8, 8> queries[DK_PART];
simdgroup_matrix<float, 8, 8> output[DV_PART];
{
  const ulong at = (ulong(row / G) * (num_kv_heads * G) + head) * DK;
  #pragma clang loop unroll(full)
  for (int d = 0; d < DK_PART; ++d) {
    const int column = (part * DK_PART + d) * 8 + lane_column;
    queries[d] = make_filled_simdgroup_matrix<T, 8, 8>(T(0.0f));
    if (row_exists && column < DK) {  // the next column is also below DK, because head dims are even
      queries[d].thread_elements()[0] = q[at + column];
      queries[d].thread_elements()[1] = q[at + column + 1];
    }
  }
  #pragma clang loop unroll(full)
  for (int d = 0; d < DV_PART; ++d) {
    output[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}
float peak = LOWEST;   // largest score of this lane's row, over the keys of this slot
float total = 0.0f;    // sum of the row's weights; over this lane's keys only, until the end

threadgroup T* staged = (threadgroup T*)shared;
threadgroup const T* k_columns = staged + part * (DK_PART * 8);
threadgroup const T* v_columns = staged + part * (DV_PART * 8);
threadgroup float* sums = (threadgroup float*)(shared + STAGE_BYTES / 16);  // [GROUPS, KEY_FRAGMENTS, 64]
threadgroup float* own_sums = sums + group * (KEY_FRAGMENTS * 64) + lane_row * 8 + lane_column;
threadgroup const float* all_sums = own_sums - part * (KEY_FRAGMENTS * 64);  // the first part's sums
if (tid < STAGE_KEYS && key_begin + tid < key_end) {
  key_slots[tid] = slot_of<BLOCK_SIZE>(block_table, table_row, key_begin + tid);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int tile = key_begin; tile < key_end; tile += STAGE_KEYS) {
  // A thread loads all its pieces before it stores them, so that the loads run concurrently.
  typename KRows::template Staged<K_PIECE> k_pieces[K_LOADS];
  load_stage<K_PIECE, K_ROW, K_LOADS, STAGE_KEYS>(k_rows, key_slots, key_end - tile, num_kv_heads, kv_head, tid, k_pieces);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last stage's V has been read
  store_stage<K_PIECE, K_ROW, K_LOADS, STAGE_KEYS, STRIDE>(k_rows, k_pieces, tid, staged);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Scores of this group's rows against its key fragments.
  simdgroup_matrix<float, 8, 8> scores[KEY_FRAGMENTS];
  #pragma clang loop unroll(full)
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    scores[f] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    if (f % slots == slot) {
      #pragma clang loop unroll(full)
      for (int d = 0; d < DK_PART; ++d) {
        const int column = (part * DK_PART + d) * 8;
        if (K_FRAGMENTS % PARTS_OF_STAGED == 0 || column < K_FRAGMENTS * 8) {
          simdgroup_matrix<T, 8, 8> keys;
          simdgroup_load(keys, k_columns + (f * 8 * STRIDE + d * 8), STRIDE, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(scores[f], queries[d], keys, scores[f]);
        }
      }
      if (STAGED_PARTS > 1) {
        own_sums[f * 64] = scores[f].thread_elements()[0];
        own_sums[f * 64 + 1] = scores[f].thread_elements()[1];
      }
    }
  }
  typename VRows::template Staged<V_PIECE> v_pieces[V_LOADS];
  if (STAGED_PARTS > 1) {
    load_stage<V_PIECE, V_ROW, V_LOADS, STAGE_KEYS>(
        v_rows, key_slots, key_end - tile, num_kv_heads, kv_head, tid, v_pieces);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // `sums` are written
  }

  // Every row of the tile sees every key of this stage: no mask arithmetic.
  const bool all_visible = tile >= all_see && tile + STAGE_KEYS <= all_see_end;
  float tile_peak = LOWEST;
  #pragma clang loop unroll(full)
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    if (f % slots == slot) {
      #pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        float s = scores[f].thread_elements()[e];
        if (STAGED_PARTS > 1) {
          s = 0.0f;
          #pragma clang loop unroll(full)
          for (int p = 0; p < PARTS_OF_STAGED; ++p) {  // in one order, so that all parts get the same bits
            s += all_sums[(p * KEY_FRAGMENTS + f) * 64 + e];
          }
        }
        s *= scale;
        if (HAS_SOFTCAP) {
          s = precise::tanh(s) * softcap;
        }
        if (!all_visible) {
          const int key = tile + f * 8 + lane_column + e;
          s = key >= sees && key < sees_end ? s : LOWEST;
        }
        scores[f].thread_elements()[e] = s;
        tile_peak = max(tile_peak, s);
      }
    }
  }
  // The numbers of the four lanes of a row differ in bits 0 and 3.
  tile_peak = max(tile_peak, simd_shuffle_xor(tile_peak, ushort(1)));
  tile_peak = max(tile_peak, simd_shuffle_xor(tile_peak, ushort(8)));
  const float new_peak = max(peak, tile_peak);
  const float shrink = fast::exp2(peak - new_peak);
  peak = new_peak;
  total *= shrink;
  #pragma clang loop unroll(full)
  for (int d = 0; d < DV_PART; ++d) {
    output[d].thread_elements()[0] *= shrink;
    output[d].thread_elements()[1] *= shrink;
  }
  simdgroup_matrix<T, 8, 8> weights[KEY_FRAGMENTS];
  #pragma clang loop unroll(full)
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    weights[f] = make_filled_simdgroup_matrix<T, 8, 8>(T(0.0f));
    if (f % slots == slot) {
      #pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        const T w = T(fast::exp2(scores[f].thread_elements()[e] - peak + WEIGHT_SHIFT));
        weights[f].thread_elements()[e] = w;
        total += float(w);
      }
    }
  }

  if (STAGED_PARTS == 1) {
    // Not earlier: there are not enough registers for V and the scores together.
    load_stage<V_PIECE, V_ROW, V_LOADS, STAGE_KEYS>(
        v_rows, key_slots, key_end - tile, num_kv_heads, kv_head, tid, v_pieces);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // K has been read
  }
  store_stage<V_PIECE, V_ROW, V_LOADS, STAGE_KEYS, STRIDE>(v_rows, v_pieces, tid, staged);
  if (tid < STAGE_KEYS && tile + STAGE_KEYS + tid < key_end) {  // slots of the next stage's keys
    key_slots[tid] = slot_of<BLOCK_SIZE>(block_table, table_row, tile + STAGE_KEYS + tid);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  #pragma clang loop unroll(full)
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    if (f % slots == slot) {
      #pragma clang loop unroll(full)
      for (int d = 0; d < DV_PART; ++d) {
        const int column = (part * DV_PART + d) * 8;
        if (V_FRAGMENTS % PARTS_OF_STAGED == 0 || column < V_FRAGMENTS * 8) {
          simdgroup_matrix<T, 8, 8> values;
          simdgroup_load(values, v_columns + (f * 8 * STRIDE + d * 8), STRIDE);
          simdgroup_multiply_accumulate(output[d], weights[f], values, output[d]);
        }
      }
    }
  }
}
float sink = LOWEST;
if (HAS_SINKS && row_exists && partial_row < 0) {
  sink = float(sinks[head]) * LOG2E;
}
// Computed again from `tile_fields`: the values from before the loop would take registers during the loop.
const int row_groups = row_fragments_of(tile_fields[1], GROUPS / PARTS_OF_STAGED);
const int group_of_part = group / PARTS_OF_STAGED;
const Share share = {
    PARTS_OF_STAGED, row_groups, GROUPS / PARTS_OF_STAGED / row_groups, part, group_of_part % row_groups,
    group_of_part / row_groups};
write_rows<T, G, DV, 1, DV_PART, 2, HAS_SINKS>(
    rows_of_tile, share, output, &peak, &total, &sink, WEIGHT_SHIFT, tid, group, lane_row, lane_column,
    (threadgroup float*)shared, row_state, out, partial_out, partial_lse);
