// Attention of decodes with many query heads to selected latents: the body of a kernel. MLX writes the signature
// (mx.fast.metal_kernel), so the names of inputs and template arguments are those of
// metal_engine/attention/metal/selected_latents.py.
//
// metal_sim: never small: q, k_cache, block_table, items, selected, list_rows
//
// A threadgroup holds 64 latents of one row's list in registers, and computes its heads one after another, 8 at a time.
// Each latent is therefore read once for all heads. SIMD group slot * PARTS + part holds the columns of its part of
// HELD fragments of 8 latents, as [keys x columns]. For 8 heads,
//
//   1. each SIMD group multiplies its latents with the queries of its columns;
//   2. each thread adds the parts of one score, and the threadgroup finds the peak of each head;
//   3. the weights go through threadgroup memory to all SIMD groups of a slot, which multiply their latents with them;
//   4. a slot gets the other slot's sums for its half of the columns, adds its own, and writes them.
//
// Each range of a list is a split, even if the list has only one: merge_splits writes the output. The output of a range
// has the type of the queries instead of float32, because there are many ranges. Their rounding errors differ, so the
// weighted mean of many ranges has a smaller error.
//
//     items         (list, first key of the range, end of the keys, first partial row) of each range
//     selected      positions of the keys of each list
//     list_rows     (packed row, request) of each list
//     numbers       scale of the scores
//
// Grid: (items * NUM_THREADS, groups of heads). More groups use more cores, and each group reads the latents.
// Template: T (2 bytes), H (heads), DK, DV, BLOCK_SIZE, K_COLUMNS and REST_COLUMNS (columns of a load, as in
// paged_attention.metal).

constexpr int PARTS = 8;
constexpr int SLOTS = 2;
constexpr int SIMD_GROUPS = PARTS * SLOTS;
constexpr int NUM_THREADS = SIMD_GROUPS * 32;
constexpr int HELD = 4;  // with more latents or heads, a thread needs more than the 104 registers of 512 threads
static_assert(SLOTS * HELD * 64 == NUM_THREADS, "a thread has one score of each head");
constexpr int K_CHUNKS = divided_up(DV, K_COLUMNS * 4 * PARTS);
constexpr int REST_CHUNKS = divided_up(DK - DV, REST_COLUMNS * 4 * PARTS);
constexpr int DV_PART = K_CHUNKS * (K_COLUMNS / 2);
constexpr int DK_PART = DV_PART + REST_CHUNKS * (REST_COLUMNS / 2);
constexpr int K_PAIRS = DV_PART * PARTS * 4;  // pairs of columns, including padding
constexpr int PAIRS = DK_PART * PARTS * 4;
constexpr int OWN = divided_up(K_CHUNKS, SLOTS) * (K_COLUMNS / 2);  // fragments of the output that a slot writes
constexpr float WEIGHT_SHIFT = is_same_v<T, half> ? 14.0f : 0.0f;

constexpr int SCORES_ROOM = SIMD_GROUPS * HELD * 64;
constexpr int SUMS_ROOM = SIMD_GROUPS * OWN * 64;
// Queries of 8 heads, [PARTS, DK_PART, 8 columns, 8 heads], with the columns in the order of load_row.
threadgroup T queries[PAIRS * 2 * 8];
threadgroup float exchange[SCORES_ROOM > SUMS_ROOM ? SCORES_ROOM : SUMS_ROOM];
threadgroup T weights[SLOTS * HELD * 64];       // [SLOTS, HELD, 8 heads, 8 keys]
threadgroup float peaks[SIMD_GROUPS * 8];       // largest score of each head over the keys of a SIMD group's threads
threadgroup float totals[SIMD_GROUPS * 8];      // sum of each head's weights over the same keys

const int tid = int(thread_index_in_threadgroup);
const int group = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int lane_row = ((lane >> 2) & 4) + ((lane >> 1) & 3);
const int lane_column = ((lane >> 2) & 2) * 2 + (lane & 1) * 2;
const int part = group % PARTS;
const int slot = group / PARTS;

const int item = int(threadgroup_position_in_grid.x) * 4;
const int list_row = items[item];
const int key_begin = items[item + 1];
const int key_end = items[item + 2];
const int partial_row = items[item + 3];
const uint packed = uint(list_rows[list_row * 2]);
const int table_row = list_rows[list_row * 2 + 1] * int(block_table_shape[1]);
const device int* list = selected + list_row * int(selected_shape[1]);
const float scale = numbers[0] * LOG2E;
constexpr int STRIPS = divided_up(H, 8);
const int strips = divided_up(STRIPS, int(threadgroups_per_grid.y));
const int first_strip = int(threadgroup_position_in_grid.y) * strips;
const int end_strip = min(first_strip + strips, STRIPS);

simdgroup_matrix<T, 8, 8> keys[HELD][DK_PART];
{
  const Rows<T, DK> k_rows = {k_cache};
  typename Rows<T, DK>::template Loaded<K_COLUMNS, K_CHUNKS, 0> k_loaded;
  typename Rows<T, DK>::template Loaded<REST_COLUMNS, REST_CHUNKS, DV> rest_loaded;
  #pragma clang loop unroll(full)
  for (int h = 0; h < HELD; ++h) {
    const int key = key_begin + (slot * HELD + h) * 8 + lane_row;
    const uint at = uint(slot_in_list<BLOCK_SIZE>(block_table, table_row, list, key, key_begin, key_end));
    load_row<K_COLUMNS, K_CHUNKS, PARTS, 0, DV>(
        k_rows, at, part * K_CHUNKS, lane_column, key < key_end, k_loaded, keys[h]);
    load_row<REST_COLUMNS, REST_CHUNKS, PARTS, DV, DK>(
        k_rows, at, part * REST_CHUNKS, lane_column, key < key_end, rest_loaded, keys[h] + DV_PART);
  }
}

// This lane's elements in the exchange of scores, [SLOTS, HELD, PARTS, 8 keys, 8 heads].
threadgroup float* own_scores = exchange + uint((slot * HELD * PARTS + part) * 64 + lane_row * 8 + lane_column);
// This thread adds the parts of one score: key `own_key` of fragment `group` / 2, and head `lane` % 8.
const int own_key = group % 2 * 4 + lane / 8;
threadgroup const float* own_parts = exchange + uint(group / 2 * PARTS * 64 + own_key * 8 + lane % 8);
threadgroup T* own_weights = weights + uint(group / 2 * 64 + lane % 8 * 8 + own_key);
threadgroup const T* queries_of_lane = queries + uint(part * (DK_PART * 64) + lane_row * 8 + lane_column);
threadgroup const T* weights_of_slot = weights + uint(slot * (HELD * 64) + lane_row * 8 + lane_column);

for (int strip = first_strip - 1; strip < end_strip; ++strip) {
  float peak = LOWEST;  // largest score of this thread's head
  if (strip >= first_strip) {
    simdgroup_matrix<float, 8, 8> products[HELD];  // [keys x heads]
    #pragma clang loop unroll(full)
    for (int h = 0; h < HELD; ++h) {
      products[h] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    #pragma clang loop unroll(full)
    for (int d = 0; d < DK_PART; ++d) {
      simdgroup_matrix<T, 8, 8> of_heads;  // [columns x heads]
      of_heads.thread_elements()[0] = queries_of_lane[d * 64];
      of_heads.thread_elements()[1] = queries_of_lane[d * 64 + 1];
      #pragma clang loop unroll(full)
      for (int h = 0; h < HELD; ++h) {
        simdgroup_multiply_accumulate(products[h], keys[h][d], of_heads, products[h]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums of the heads before have been read from `exchange`
    #pragma clang loop unroll(full)
    for (int h = 0; h < HELD; ++h) {
      own_scores[h * PARTS * 64] = products[h].thread_elements()[0];
      own_scores[h * PARTS * 64 + 1] = products[h].thread_elements()[1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float score = 0.0f;
    #pragma clang loop unroll(full)
    for (int p = 0; p < PARTS; ++p) {
      score += own_parts[p * 64];
    }
    score = key_begin + group / 2 * 8 + own_key < key_end ? score * scale : LOWEST;
    // The numbers of the four lanes of a head differ in bits 3 and 4.
    peak = max(score, simd_shuffle_xor(score, ushort(8)));
    peak = max(peak, simd_shuffle_xor(peak, ushort(16)));
    if (lane < 8) {
      peaks[group * 8 + lane] = peak;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma clang loop unroll(disable)  // unrolled, the loads would take a register each
    for (int g = 0; g < SIMD_GROUPS; ++g) {
      peak = max(peak, peaks[g * 8 + lane % 8]);
    }
    const T w = T(fast::exp2(score - peak + WEIGHT_SHIFT));
    *own_weights = w;
    float total = float(w);  // the rounded weight, which the product below uses
    total += simd_shuffle_xor(total, ushort(8));
    total += simd_shuffle_xor(total, ushort(16));
    if (lane < 8) {
      totals[group * 8 + lane] = total;
    }
  }
  // Load the queries of the next heads. The queries in memory are not needed any more: all scores are computed.
  if (strip + 1 < end_strip) {
    for (int i = tid; i < 8 * PAIRS; i += NUM_THREADS) {
      const int own = i / PAIRS, pair = i % PAIRS;
      const bool is_rest = pair >= K_PAIRS;
      const int columns = is_rest ? REST_COLUMNS : K_COLUMNS;
      const int column = (is_rest ? pair - K_PAIRS : pair) * 2;
      const int chunk = column / (columns * 4), in_chunk = column % (columns * 4);
      const int of_part = (is_rest ? REST_CHUNKS : K_CHUNKS);
      const int fragment =
          (is_rest ? DV_PART : 0) + chunk % of_part * (columns / 2) + in_chunk % columns / 2;
      const int to = ((chunk / of_part * DK_PART + fragment) * 8 + in_chunk / columns * 2) * 8 + own;
      const int head = (strip + 1) * 8 + own;
      const bool exists = head < H && column < (is_rest ? DK - DV : DV);
      const ulong from = (ulong(packed) * H + head) * DK + (is_rest ? DV : 0) + column;
      queries[to] = queries[to + 8] = T(0.0f);
      if (exists) {
        queries[to] = q[from];
        queries[to + 8] = q[from + 1];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (strip < first_strip) {
    continue;
  }

  simdgroup_matrix<float, 8, 8> own[OWN];  // [heads x columns], for the columns that this slot writes
  threadgroup float* of_other =
      exchange + uint(((1 - slot) * PARTS + part) * (OWN * 64) + lane_row * 8 + lane_column);
  #pragma clang loop unroll(full)
  for (int d = 0; d < OWN; ++d) {
    own[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  #pragma clang loop unroll(full)
  for (int d = 0; d < DV_PART; ++d) {
    simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    #pragma clang loop unroll(full)
    for (int h = 0; h < HELD; ++h) {
      simdgroup_matrix<T, 8, 8> of_keys;  // [heads x keys]
      of_keys.thread_elements()[0] = weights_of_slot[h * 64];
      of_keys.thread_elements()[1] = weights_of_slot[h * 64 + 1];
      simdgroup_multiply_accumulate(sums, of_keys, keys[h][d], sums);
    }
    if (d / OWN == slot) {
      own[d % OWN] = sums;
    } else {
      of_other[d % OWN * 64] = sums.thread_elements()[0];
      of_other[d % OWN * 64 + 1] = sums.thread_elements()[1];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int head = strip * 8 + lane_row;
  if (head < H) {
    float total = 0.0f;
    #pragma clang loop unroll(disable)
    for (int g = 0; g < SIMD_GROUPS; ++g) {
      total += totals[g * 8 + lane_row];
    }
    const float factor = 1.0f / total;
    threadgroup const float* of_this = exchange + uint(group * (OWN * 64) + lane_row * 8 + lane_column);
    const int column = (part * (K_CHUNKS * 4) + slot * (OWN / (K_COLUMNS / 2) * 4) + lane_column / 2) * K_COLUMNS;
    device T* to = partial_out + (ulong(partial_row + head) * DV + uint(column));
    const int left = slot == 0 || DV_PART == SLOTS * OWN ? OWN : DV_PART - OWN;
    #pragma clang loop unroll(full)
    for (int i = 0; i < OWN; ++i) {
      const int more = i / (K_COLUMNS / 2) * (K_COLUMNS * 4) + i % (K_COLUMNS / 2) * 2;
      if (i < left && column + more < DV) {
        to[more] = T((own[i].thread_elements()[0] + of_this[i * 64]) * factor);
        to[more + 1] = T((own[i].thread_elements()[1] + of_this[i * 64 + 1]) * factor);
      }
    }
  }
  // Thread i of the first 8 has the peak of head i.
  if (tid < 8 && strip * 8 + tid < H) {
    float sum = 0.0f;
    #pragma clang loop unroll(disable)
    for (int g = 0; g < SIMD_GROUPS; ++g) {
      sum += totals[g * 8 + tid];
    }
    partial_lse[partial_row + strip * 8 + tid] = peak + precise::log2(sum) - WEIGHT_SHIFT;
  }
}
