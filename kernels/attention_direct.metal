// The direct way through paged_attention.metal: each SIMD group loads its keys and values itself.
//
// A SIMD group holds HELD key fragments at a time, with the columns of its part, as [keys x columns], and multiplies
// them with the transposed queries. It writes the transposed scores to `exchange`, and reads the sums of the parts'
// scores from there as [rows x keys]. For a latent, the registers with keys can therefore be multiplied as values. With
// one part, a SIMD group reads only its own scores, and the loop has no threadgroup barrier. With more parts, it has
// one barrier for each HELD key fragments.
//
// Each SIMD group has all STRIPS row fragments, so that every key is loaded by one slot only.

constexpr int SLOTS = GROUPS / PARTS;
// Columns of K before SPLIT_AT are loaded in pieces of K_COLUMNS columns, and the other columns (a latent's position
// part) in pieces of REST_COLUMNS.
constexpr int SPLIT_AT = LATENT ? DV : DK;
constexpr int K_CHUNKS = divided_up(SPLIT_AT, K_COLUMNS * 4 * PARTS);
constexpr int REST_CHUNKS = divided_up(DK - SPLIT_AT, REST_COLUMNS * 4 * PARTS);
constexpr int V_CHUNKS = divided_up(DV, V_COLUMNS * 4 * PARTS);
constexpr int REST = K_CHUNKS * (K_COLUMNS / 2);             // first fragment of the position part
constexpr int DK_PART = REST + REST_CHUNKS * (REST_COLUMNS / 2);
constexpr int DV_PART = V_CHUNKS * (V_COLUMNS / 2);
const int part = SLOTS == 1 ? group : group % PARTS;
const int slot = SLOTS == 1 ? 0 : group / PARTS;

simdgroup_matrix<T, 8, 8> queries[STRIPS][DK_PART];          // [columns x rows]
simdgroup_matrix<float, 8, 8> output[STRIPS * DV_PART];      // [rows x columns]
float peak[STRIPS], total[STRIPS], sink[STRIPS];
int sees[STRIPS], sees_end[STRIPS];                          // first key that this lane's row sees, and the end
#pragma clang loop unroll(full)
for (int strip = 0; strip < STRIPS; ++strip) {
  const int row = first_row + strip * 8 + lane_row;
  const int position = first_position + row / G - first_token;
  sees[strip] = HAS_WINDOW ? max(key_begin, position - window + 1) : key_begin;
#ifdef SELECTED
  sees_end[strip] = key_end;  // a list has only keys that its token sees
#else
  sees_end[strip] = min(key_end, HAS_IMAGES ? max(position + 1, image_end) : position + 1);
#endif
  peak[strip] = LOWEST;   // largest score of the row over the keys of this slot
  total[strip] = 0.0f;    // sum of weights; over this lane's keys only, until the end
  sink[strip] = LOWEST;
  if (HAS_SINKS && strip * 8 + lane_row < num_rows && partial_row < 0) {
    sink[strip] = float(sinks[kv_head * G + row % G]) * LOG2E;
  }
  uint at[2];  // rows of q
  #pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
#ifdef SELECTED
    const int column_row = first_row + strip * 8 + lane_column + e + to_queries;
#else
    const int column_row = first_row + strip * 8 + lane_column + e;
#endif
    at[e] = (uint(column_row) / G * uint(num_kv_heads) + uint(kv_head)) * G + uint(column_row) % G;
  }
  const int left = num_rows - strip * 8 - lane_column;
  load_queries<T, K_COLUMNS, K_CHUNKS, SPLIT_AT, DK>(
      q, at[0], at[1], left > 0, left > 1, part * K_CHUNKS, lane_row, queries[strip]);
  load_queries<T, REST_COLUMNS, REST_CHUNKS, DK - SPLIT_AT, DK>(
      q + SPLIT_AT, at[0], at[1], left > 0, left > 1, part * REST_CHUNKS, lane_row, queries[strip] + REST);
  #pragma clang loop unroll(full)
  for (int d = 0; d < DV_PART; ++d) {
    output[strip * DV_PART + d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}

// Queries of this part and lane in [PARTS, STRIPS, DK_PART, 8 columns, 8 rows]. All slots use the same queries.
threadgroup T* queries_of_lane =
    (threadgroup T*)(shared + EXCHANGE_BYTES / 16) + uint(part * (STRIPS * DK_PART * 64) + lane_row * 8 + lane_column);
if (SHARES_QUERIES) {
  if (slot == 0) {
    #pragma clang loop unroll(full)
    for (int i = 0; i < STRIPS * DK_PART; ++i) {
      #pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        queries_of_lane[i * 64 + e] = queries[i / DK_PART][i % DK_PART].thread_elements()[e];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

threadgroup float* exchange = (threadgroup float*)shared;  // [2, SLOTS, PARTS, HELD, STRIPS, 8 rows, 8 keys]
constexpr int EXCHANGED = HELD * STRIPS * 64;
constexpr int STEP = SLOTS * 8;
const int exchange_to = group * EXCHANGED + lane_column * 8 + lane_row;
const int exchange_from = slot * PARTS * EXCHANGED + lane_row * 8 + lane_column;
int parity = 0;  // offset of the half of `exchange` that has the scores of these keys
// Fragments begin at multiples of 8, so each lies in one block, unless keys are selected.
const int first_key = key_begin / 8 * 8;
// Slot of each fragment's first key, or of this lane's own key if keys are selected. It is read one iteration early, so
// that loads of keys need not wait for it.
int cache_slot[HELD];
#pragma clang loop unroll(full)
for (int h = 0; h < HELD; ++h) {
  const int begin = first_key + h * STEP + slot * 8;
#ifdef SELECTED
  cache_slot[h] = slot_in_list<BLOCK_SIZE>(block_table, table_row, list, begin + lane_row, key_begin, key_end);
#else
  cache_slot[h] = begin < key_end ? slot_of<BLOCK_SIZE>(block_table, table_row, uint(begin)) : 0;
#endif
}
for (int tile = first_key; tile < key_end; tile += HELD * STEP) {
  simdgroup_matrix<T, 8, 8> keys[HELD][DK_PART];  // [keys x columns]
  typename KRows::template Loaded<K_COLUMNS, K_CHUNKS, 0> k_loaded[HELD];
  typename KRows::template Loaded<REST_COLUMNS, REST_CHUNKS, SPLIT_AT> rest_loaded[HELD];
  uint at[HELD];                                  // row of the cache with this lane's key of each fragment
  bool exists[HELD];
  #pragma clang loop unroll(full)
  for (int h = 0; h < HELD; ++h) {
    const int begin = tile + h * STEP + slot * 8;
#ifdef SELECTED
    at[h] = uint(cache_slot[h]) * uint(num_kv_heads) + uint(kv_head);
#else
    at[h] = uint(cache_slot[h] + lane_row) * uint(num_kv_heads) + uint(kv_head);
#endif
    exists[h] = begin + lane_row >= key_begin && begin + lane_row < key_end;
    load_row<K_COLUMNS, K_CHUNKS, PARTS, 0, SPLIT_AT>(
        k_rows, at[h], part * K_CHUNKS, lane_column, exists[h], k_loaded[h], keys[h]);
    load_row<REST_COLUMNS, REST_CHUNKS, PARTS, SPLIT_AT, DK>(
        k_rows, at[h], part * REST_CHUNKS, lane_column, exists[h], rest_loaded[h], keys[h] + REST);
    const int next = tile + (HELD + h) * STEP + slot * 8;
#ifdef SELECTED
    cache_slot[h] = slot_in_list<BLOCK_SIZE>(block_table, table_row, list, next + lane_row, key_begin, key_end);
#else
    cache_slot[h] = next < key_end ? slot_of<BLOCK_SIZE>(block_table, table_row, uint(next)) : 0;
#endif
  }
  threadgroup float* to_parts = exchange + uint(parity + exchange_to);
  threadgroup const float* from_parts = exchange + uint(parity + exchange_from);
  #pragma clang loop unroll(full)
  for (int h = 0; h < HELD; ++h) {
    // Transposed scores: the keys then have the layout that values need in the product with the weights.
    simdgroup_matrix<float, 8, 8> scores[STRIPS];
    #pragma clang loop unroll(full)
    for (int strip = 0; strip < STRIPS; ++strip) {
      scores[strip] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
#ifdef QUANTIZED
    float k_scale = 0.0f, k_bias = 0.0f, rest_scale = 0.0f, rest_bias = 0.0f;
#endif
    #pragma clang loop unroll(full)
    for (int d = 0; d < DK_PART; ++d) {
#ifdef QUANTIZED
      if (d < REST && d % (K_COLUMNS / 2) == 0) {
        unpack_chunk<K_COLUMNS, K_CHUNKS>(
            d / (K_COLUMNS / 2), part * K_CHUNKS, lane, k_loaded[h], k_scale, k_bias, keys[h]);
      }
      if (d >= REST && (d - REST) % (REST_COLUMNS / 2) == 0) {
        unpack_chunk<REST_COLUMNS, REST_CHUNKS>(
            (d - REST) / (REST_COLUMNS / 2), part * REST_CHUNKS, lane, rest_loaded[h], rest_scale, rest_bias,
            keys[h] + REST);
      }
#endif
      #pragma clang loop unroll(full)
      for (int strip = 0; strip < STRIPS; ++strip) {
        if (SHARES_QUERIES) {
          queries[strip][d].thread_elements()[0] = queries_of_lane[(strip * DK_PART + d) * 64];
          queries[strip][d].thread_elements()[1] = queries_of_lane[(strip * DK_PART + d) * 64 + 1];
        }
        simdgroup_multiply_accumulate(scores[strip], keys[h][d], queries[strip][d], scores[strip]);
      }
    }
    #pragma clang loop unroll(full)
    for (int strip = 0; strip < STRIPS; ++strip) {
      to_parts[(h * STRIPS + strip) * 64] = scores[strip].thread_elements()[0];
      to_parts[(h * STRIPS + strip) * 64 + 8] = scores[strip].thread_elements()[1];
    }
  }
  simdgroup_matrix<T, 8, 8> values[LATENT ? 1 : HELD][DV_PART];
  typename VRows::template Loaded<V_COLUMNS, V_CHUNKS, 0> v_loaded[LATENT ? 1 : HELD];
  if (!LATENT) {
    #pragma clang loop unroll(full)
    for (int h = 0; h < HELD; ++h) {
      load_row<V_COLUMNS, V_CHUNKS, PARTS, 0, DV>(
          v_rows, at[h], part * V_CHUNKS, lane_column, exists[h], v_loaded[LATENT ? 0 : h],
          values[LATENT ? 0 : h]);
    }
  }
  if (PARTS > 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the other half of `exchange` is for the next keys
  } else {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  parity = SLOTS * PARTS * EXCHANGED - parity;

  simdgroup_matrix<T, 8, 8> weights[HELD][STRIPS];
  #pragma clang loop unroll(full)
  for (int strip = 0; strip < STRIPS; ++strip) {
    float scores[HELD][2];
    float tile_peak = LOWEST;
    #pragma clang loop unroll(full)
    for (int h = 0; h < HELD; ++h) {
      float2 sums = float2(0.0f);
      #pragma clang loop unroll(full)
      for (int p = 0; p < PARTS; ++p) {
        sums += *(threadgroup const float2*)(from_parts + p * EXCHANGED + (h * STRIPS + strip) * 64);
      }
      #pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        float s = sums[e] * scale;
        if (HAS_SOFTCAP) {
          s = precise::tanh(s) * softcap;
        }
        const int key = tile + h * STEP + slot * 8 + lane_column + e;
        s = key >= sees[strip] && key < sees_end[strip] ? s : LOWEST;
        scores[h][e] = s;
        tile_peak = max(tile_peak, s);
      }
    }
    // The four lanes of a row differ in bits 0 and 3.
    tile_peak = max(tile_peak, simd_shuffle_xor(tile_peak, ushort(1)));
    tile_peak = max(tile_peak, simd_shuffle_xor(tile_peak, ushort(8)));
    const float new_peak = max(peak[strip], tile_peak);
    // Until a row has seen a key, its weights are 2^0. When it sees one, `shrink` multiplies the sums by 0. If it sees
    // no key in this slot or split, the merge multiplies the result of the slot or split by 2^LOWEST = 0.
    const float shrink = fast::exp2(peak[strip] - new_peak);
    peak[strip] = new_peak;
    total[strip] *= shrink;
    #pragma clang loop unroll(full)
    for (int d = 0; d < DV_PART; ++d) {
      output[strip * DV_PART + d].thread_elements()[0] *= shrink;
      output[strip * DV_PART + d].thread_elements()[1] *= shrink;
    }
    #pragma clang loop unroll(full)
    for (int h = 0; h < HELD; ++h) {
      #pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        const T w = T(fast::exp2(scores[h][e] - new_peak + WEIGHT_SHIFT));
        weights[h][strip].thread_elements()[e] = w;
        total[strip] += float(w);  // the rounded weight, which the product below uses
      }
    }
  }
  #pragma clang loop unroll(full)
  for (int h = 0; h < HELD; ++h) {
#ifdef QUANTIZED
    float v_scale = 0.0f, v_bias = 0.0f;
#endif
    #pragma clang loop unroll(full)
    for (int d = 0; d < DV_PART; ++d) {
#ifdef QUANTIZED
      if (!LATENT && d % (V_COLUMNS / 2) == 0) {
        unpack_chunk<V_COLUMNS, V_CHUNKS>(
            d / (V_COLUMNS / 2), part * V_CHUNKS, lane, v_loaded[LATENT ? 0 : h], v_scale, v_bias,
            values[LATENT ? 0 : h]);
      }
#endif
      #pragma clang loop unroll(full)
      for (int strip = 0; strip < STRIPS; ++strip) {
        simdgroup_multiply_accumulate(
            output[strip * DV_PART + d], weights[h][strip], LATENT ? keys[h][d] : values[LATENT ? 0 : h][d],
            output[strip * DV_PART + d]);
      }
    }
  }
}
const Share share = {PARTS, 1, SLOTS, part, 0, slot};
write_rows<T, G, DV, STRIPS, DV_PART, V_COLUMNS, HAS_SINKS>(
    rows_of_tile, share, output, peak, total, sink, WEIGHT_SHIFT, tid, group, lane_row, lane_column,
    (threadgroup float*)shared, row_state, out, partial_out, partial_lse);
