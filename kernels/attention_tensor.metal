// The staged way through paged_attention.metal on a GPU's matrix units (attention_products.metal). Stages and softmax
// work as in attention_staged.metal, with two differences:
//
//   1. A SIMD group has 16 rows and 32 of a stage's keys. SIMD groups for which a stage has no keys only copy K and V.
//   2. The lanes that hold an element of the scores differ between GPUs. Scores, weights and results therefore pass
//      through threadgroup memory of the SIMD group, from which a lane reads the rows `lane_row` and `lane_row` + 8.
//
//     64 rows of 4 groups, 64 keys of 2 slots        16 rows: groups 2 to 7 only copy
//
//              keys 0-31    keys 32-63                        keys 0-31    keys 32-63
//     rows  0  group 0      group 4                  rows  0  group 0      group 1
//     rows 48  group 3      group 7

constexpr int ROW_STRIPS = PRODUCT_ROWS / 8;
constexpr int KEY_STRIPS = PRODUCT_COLUMNS / 8;
constexpr int DK_PRODUCTS = DK / PRODUCT_INNER;
constexpr int DV_PRODUCTS = DV / PRODUCT_COLUMNS;
constexpr int WEIGHT_PRODUCTS = PRODUCT_COLUMNS / PRODUCT_INNER;
static_assert(DK % PRODUCT_INNER == 0 && DV % PRODUCT_COLUMNS == 0, "products have no columns that a head has not");
static_assert(BK % PRODUCT_COLUMNS == 0 && BK <= GROUPS / 4 * PRODUCT_COLUMNS, "each key has a SIMD group");

const int row_groups = num_rows <= 16 ? 1 : num_rows <= 32 ? 2 : 4;
const int slots = GROUPS / row_groups;
const int row_group = group % row_groups;
const int slot = group / row_groups;
const bool has_keys = slot * PRODUCT_COLUMNS < BK;
const int first_of_group = row_group * PRODUCT_ROWS;

int sees[ROW_STRIPS], sees_end[ROW_STRIPS];  // first key that each of this lane's rows sees, and the end
float sink[ROW_STRIPS];
float peak[ROW_STRIPS];   // largest score of each of this lane's rows, over the keys of this slot
float total[ROW_STRIPS];  // sum of each row's weights; over this lane's keys only, until the end
#pragma clang loop unroll(full)
for (int strip = 0; strip < ROW_STRIPS; ++strip) {
  const int row_of_tile = first_of_group + strip * 8 + lane_row;
  const int row = first_row + row_of_tile;
  const int position = first_position + row / G - first_token;
  sees[strip] = HAS_WINDOW ? max(key_begin, position - window + 1) : key_begin;
  sees_end[strip] = min(key_end, HAS_IMAGES ? max(position + 1, image_end) : position + 1);
  sink[strip] = LOWEST;
  if (HAS_SINKS && row_of_tile < num_rows && partial_row < 0) {
    sink[strip] = float(sinks[kv_head * G + row % G]) * LOG2E;
  }
  peak[strip] = LOWEST;
  total[strip] = 0.0f;
}
T queries[DK_PRODUCTS * LEFT_ELEMENTS];
#pragma clang loop unroll(full)
for (int i = 0; i < LEFT_ELEMENTS; ++i) {
  const int2 place = place_in_left<T, true>(i);
  const int row_of_tile = first_of_group + place.y;
  const int row = first_row + row_of_tile;
  const ulong at = (ulong(row / G) * (num_kv_heads * G) + kv_head * G + row % G) * DK + place.x;
  #pragma clang loop unroll(full)
  for (int d = 0; d < DK_PRODUCTS; ++d) {
    queries[d * LEFT_ELEMENTS + i] = T(0.0f);
    if (row_of_tile < num_rows) {
      queries[d * LEFT_ELEMENTS + i] = q[at + d * PRODUCT_INNER];
    }
  }
}
float output[DV_PRODUCTS * SUM_ELEMENTS];
#pragma clang loop unroll(full)
for (int i = 0; i < DV_PRODUCTS * SUM_ELEMENTS; ++i) {
  output[i] = 0.0f;
}

threadgroup T* staged = (threadgroup T*)shared;
// Memory of each SIMD group, in the place of the stage: scores or results, [PRODUCT_ROWS, CARRIED_STRIDE] float32; or
// weights, [PRODUCT_ROWS, CARRIED_STRIDE] of type T.
threadgroup float* crossing = (threadgroup float*)shared + group * PRODUCT_ROWS * CARRIED_STRIDE;
threadgroup T* crossing_weights = (threadgroup T*)crossing;
threadgroup float* shrinks = row_state + group * PRODUCT_ROWS;
if (tid < BK && key_begin + tid < key_end) {
  key_slots[tid] = slot_of<BLOCK_SIZE>(block_table, table_row, key_begin + tid);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int tile = key_begin; tile < key_end; tile += BK) {
  typename KRows::template Staged<K_PIECE> k_pieces[K_LOADS];
  load_stage<K_PIECE, K_ROW, K_LOADS, BK>(k_rows, key_slots, key_end - tile, num_kv_heads, kv_head, tid, k_pieces);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last stage's V has been read
  store_stage<K_PIECE, K_ROW, K_LOADS, BK, STRIDE>(k_rows, k_pieces, tid, staged);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float scores[SUM_ELEMENTS];
  #pragma clang loop unroll(full)
  for (int i = 0; i < SUM_ELEMENTS; ++i) {
    scores[i] = 0.0f;
  }
  if (has_keys) {
    #pragma clang loop unroll(full)
    for (int d = 0; d < DK_PRODUCTS; ++d) {
      add_product<T, true>(
          scores, queries + d * LEFT_ELEMENTS, staged + slot * PRODUCT_COLUMNS * STRIDE + d * PRODUCT_INNER, STRIDE);
    }
  }
  typename VRows::template Staged<V_PIECE> v_pieces[V_LOADS];
  load_stage<V_PIECE, V_ROW, V_LOADS, BK>(v_rows, key_slots, key_end - tile, num_kv_heads, kv_head, tid, v_pieces);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // K has been read

  T weights[WEIGHT_PRODUCTS * LEFT_ELEMENTS];
  #pragma clang loop unroll(full)
  for (int i = 0; i < WEIGHT_PRODUCTS * LEFT_ELEMENTS; ++i) {
    weights[i] = T(0.0f);  // on every path, so that the last stage's weights do not stay in registers
  }
  if (has_keys) {
    #pragma clang loop unroll(full)
    for (int i = 0; i < SUM_ELEMENTS; ++i) {
      const int2 place = place_in_sum<T, true>(i);
      crossing[place.y * CARRIED_STRIDE + place.x] = scores[i];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    // Every row of the tile sees every key of this stage: no mask arithmetic.
    const bool all_visible = tile >= all_see && tile + BK <= all_see_end;
    float mine[ROW_STRIPS * KEY_STRIPS * 2];  // scores of this lane's rows
    #pragma clang loop unroll(full)
    for (int strip = 0; strip < ROW_STRIPS; ++strip) {
      float tile_peak = LOWEST;
      #pragma clang loop unroll(full)
      for (int i = 0; i < KEY_STRIPS * 2; ++i) {
        const int column = i / 2 * 8 + lane_column + i % 2;
        float s = crossing[(strip * 8 + lane_row) * CARRIED_STRIDE + column] * scale;
        if (HAS_SOFTCAP) {
          s = precise::tanh(s) * softcap;
        }
        if (!all_visible) {
          const int key = tile + slot * PRODUCT_COLUMNS + column;
          s = key >= sees[strip] && key < sees_end[strip] ? s : LOWEST;
        }
        mine[strip * KEY_STRIPS * 2 + i] = s;
        tile_peak = max(tile_peak, s);
      }
      tile_peak = max(tile_peak, simd_shuffle_xor(tile_peak, ushort(1)));
      tile_peak = max(tile_peak, simd_shuffle_xor(tile_peak, ushort(8)));
      const float new_peak = max(peak[strip], tile_peak);
      const float shrink = fast::exp2(peak[strip] - new_peak);
      peak[strip] = new_peak;
      total[strip] *= shrink;
      if (lane_column == 0) {
        shrinks[strip * 8 + lane_row] = shrink;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the scores have been read
    #pragma clang loop unroll(full)
    for (int strip = 0; strip < ROW_STRIPS; ++strip) {
      #pragma clang loop unroll(full)
      for (int i = 0; i < KEY_STRIPS * 2; ++i) {
        const T w = T(fast::exp2(mine[strip * KEY_STRIPS * 2 + i] - peak[strip] + WEIGHT_SHIFT));
        total[strip] += float(w);
        crossing_weights[(strip * 8 + lane_row) * CARRIED_STRIDE + i / 2 * 8 + lane_column + i % 2] = w;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    #pragma clang loop unroll(full)
    for (int i = 0; i < LEFT_ELEMENTS; ++i) {
      const int2 place = place_in_left<T, false>(i);
      #pragma clang loop unroll(full)
      for (int k = 0; k < WEIGHT_PRODUCTS; ++k) {
        weights[k * LEFT_ELEMENTS + i] = crossing_weights[place.y * CARRIED_STRIDE + k * PRODUCT_INNER + place.x];
      }
    }
    #pragma clang loop unroll(full)
    for (int i = 0; i < SUM_ELEMENTS; ++i) {
      const float shrink = shrinks[place_in_sum<T, false>(i).y];
      #pragma clang loop unroll(full)
      for (int d = 0; d < DV_PRODUCTS; ++d) {
        output[d * SUM_ELEMENTS + i] *= shrink;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the weights have been read
  store_stage<V_PIECE, V_ROW, V_LOADS, BK, STRIDE>(v_rows, v_pieces, tid, staged);
  if (tid < BK && tile + BK + tid < key_end) {  // slots of the next stage's keys
    key_slots[tid] = slot_of<BLOCK_SIZE>(block_table, table_row, tile + BK + tid);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (has_keys) {
    #pragma clang loop unroll(full)
    for (int d = 0; d < DV_PRODUCTS; ++d) {
      #pragma clang loop unroll(full)
      for (int k = 0; k < WEIGHT_PRODUCTS; ++k) {
        const int first_key = slot * PRODUCT_COLUMNS + k * PRODUCT_INNER;
        add_product<T, false>(
            output + d * SUM_ELEMENTS, weights + k * LEFT_ELEMENTS, staged + first_key * STRIDE + d * PRODUCT_COLUMNS,
            STRIDE);
      }
    }
  }
}

threadgroup_barrier(mem_flags::mem_threadgroup);  // the last stage's V has been read
simdgroup_matrix<float, 8, 8> results[ROW_STRIPS * V_FRAGMENTS];
#pragma clang loop unroll(full)
for (int d = 0; d < DV_PRODUCTS; ++d) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < SUM_ELEMENTS; ++i) {
    const int2 place = place_in_sum<T, false>(i);
    crossing[place.y * CARRIED_STRIDE + place.x] = output[d * SUM_ELEMENTS + i];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  #pragma clang loop unroll(full)
  for (int i = 0; i < ROW_STRIPS * KEY_STRIPS * 2; ++i) {
    const int strip = i / (KEY_STRIPS * 2);
    const int fragment = i / 2 % KEY_STRIPS;
    results[strip * V_FRAGMENTS + d * KEY_STRIPS + fragment].thread_elements()[i % 2] =
        crossing[(strip * 8 + lane_row) * CARRIED_STRIDE + fragment * 8 + lane_column + i % 2];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
const Share share = {1, row_groups, slots, 0, row_group, slot};
write_rows<T, G, DV, ROW_STRIPS, V_FRAGMENTS, 2, HAS_SINKS>(
    rows_of_tile, share, results, peak, total, sink, WEIGHT_SHIFT, tid, group, lane_row, lane_column,
    (threadgroup float*)shared, row_state, out, partial_out, partial_lse);
