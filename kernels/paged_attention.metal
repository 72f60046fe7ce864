// Variable-length paged attention: the body of a kernel. MLX writes the signature (mx.fast.metal_kernel), so the
// names of inputs and template arguments are those of metal_engine/attention/metal/backend.py.
//
// metal_sim: never small: q, k_cache, v_cache, block_table, items
//
// One threadgroup takes one work item of one KV head. An item is a tile of query rows and a range of keys:
//
//     rows of the tile        a row is (token, query head of the group), so that all heads of a group share the
//     r = token * G + head    K and V that the tile reads
//
//     row fragments           8 rows each; FRAGMENTS of them (1, 2, 4 or 8, from the tile's rows)
//     SIMD groups             GROUPS; group s owns row fragment s % FRAGMENTS and every key fragment f with
//                             f % slots == s / FRAGMENTS, where slots = GROUPS / FRAGMENTS
//
//     prefill, 64 rows: 8 row fragments, 1 slot    decode, 4 rows: 1 row fragment, 8 slots
//
//              keys ->                                      keys ->
//     group 0  ########                            rows 0-7 01234567     (a digit: the group that takes the
//     group 1  ########                                                   8 keys of this column)
//     group 7  ########
//
// K, and then V in the same place, are staged in threadgroup memory by all threads in 16-byte pieces: each element
// of the range is read from device memory once per tile. Keys outside the range are never read; zeros stand
// for them. The softmax is online and in base 2; its state is float32 and belongs to (row, slot). The slots of a
// row are merged at the end.
//
// Template: T, D (head_dim), G (query heads of a KV head), BLOCK_SIZE, BK (keys of a stage), HAS_WINDOW,
// HAS_SOFTCAP, HAS_SINKS.

constexpr int GROUPS = 8;                        // SIMD groups of a threadgroup
constexpr int THREADS = GROUPS * 32;
constexpr int VECTOR = 16 / sizeof(T);           // elements of a 16-byte load
constexpr int ROW_VECTORS = D / VECTOR;          // 16-byte pieces of a key's row
constexpr int STRIDE = D + VECTOR;               // a padded row of the stage: rows start in different banks
constexpr int KEY_FRAGMENTS = BK / 8;
constexpr int DIM_FRAGMENTS = D / 8;
constexpr int STAGE_VECTORS = BK * (ROW_VECTORS + 1);
// The stage also carries outputs at the end, so many columns of all rows at a time. What is left of it pads the rows.
constexpr int CARRIED_STRIDE = STAGE_VECTORS * 4 / (GROUPS * 8);
constexpr int COLUMNS_THAT_FIT = CARRIED_STRIDE / 8 * 8;
constexpr int COLUMNS = COLUMNS_THAT_FIT < D ? COLUMNS_THAT_FIT : D;
static_assert(D % COLUMNS == 0, "outputs leave in equal pieces");
static_assert(CARRIED_STRIDE % 8 != 0, "carried rows start in different banks");
constexpr float LOG2E = 1.4426950408889634f;
// Below every score, and finite: fast::exp2 promises nothing for infinities.
constexpr float LOWEST = -1e30f;

threadgroup uint4 stage[STAGE_VECTORS];
threadgroup float row_state[GROUPS * 8 * 2];     // (peak, total) of every (group, row)
threadgroup int key_slots[BK];                   // where the cache holds the keys of this stage

const int tid = int(thread_index_in_threadgroup);
const int group = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
// A lane's place in an 8x8 matrix: row `lane_row`, columns `lane_column` and the next.
const int lane_row = ((lane >> 2) & 4) + ((lane >> 1) & 3);
const int lane_column = ((lane >> 2) & 2) * 2 + (lane & 1) * 2;

const int kv_head = int(threadgroup_position_in_grid.y);
const int num_kv_heads = int(k_cache_shape[2]);
const int item = int(threadgroup_position_in_grid.x) * ITEM_FIELDS;
const int first_row = items[item + 0];      // packed row of the tile's first token
const int num_tokens = items[item + 1];
const int first_position = items[item + 2]; // absolute position of that token
const int key_begin = items[item + 3];
const int key_end = items[item + 4];
const int table_row = items[item + 5] * int(block_table_shape[1]);
const int partial_row = items[item + 6];    // where a split's result goes; -1: the item is whole
const int num_rows = num_tokens * G;
const int last_position = first_position + num_tokens - 1;

const int row_fragments = num_rows <= 8 ? 1 : num_rows <= 16 ? 2 : num_rows <= 32 ? 4 : 8;
const int slots = GROUPS / row_fragments;
const int row_fragment = group % row_fragments;
const int slot = group / row_fragments;

const int row = row_fragment * 8 + lane_row;
const bool row_exists = row < num_rows;
const int head = kv_head * G + row % G;
const int position = first_position + row / G;

simdgroup_matrix<T, 8, 8> queries[DIM_FRAGMENTS];
simdgroup_matrix<float, 8, 8> output[DIM_FRAGMENTS];
{
  const ulong at = (ulong(first_row + row / G) * (num_kv_heads * G) + head) * D + lane_column;
  #pragma clang loop unroll(full)
  for (int d = 0; d < DIM_FRAGMENTS; ++d) {
    queries[d] = make_filled_simdgroup_matrix<T, 8, 8>(T(0.0f));
    if (row_exists) {
      queries[d].thread_elements()[0] = q[at + d * 8];
      queries[d].thread_elements()[1] = q[at + d * 8 + 1];
    }
    output[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}
const float scale = HAS_SOFTCAP ? numbers[0] / numbers[1] : numbers[0] * LOG2E;
const float softcap = numbers[1] * LOG2E;
const int window = HAS_WINDOW ? window_size[0] : 0;

float peak = LOWEST;  // of this lane's row, over the keys of this slot
float total = 0.0f;      // of this lane's columns only, until the end

threadgroup T* staged = (threadgroup T*)stage;
const ulong key_stride = ulong(num_kv_heads) * D;  // elements from a slot of the cache to the next

if (tid < BK && key_begin + tid < key_end) {
  const int key = key_begin + tid;
  key_slots[tid] = block_table[table_row + key / BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE;
}
for (int tile = key_begin; tile < key_end; tile += BK) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile's V has been read, key_slots are written
  for (int i = tid; i < BK * ROW_VECTORS; i += THREADS) {
    const int key = i / ROW_VECTORS;
    uint4 piece = uint4(0);
    if (tile + key < key_end) {
      piece = ((const device uint4*)(k_cache + key_slots[key] * key_stride + kv_head * D))[i % ROW_VECTORS];
    }
    stage[key * (ROW_VECTORS + 1) + i % ROW_VECTORS] = piece;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Scores of this group's rows against its key fragments, and their largest.
  simdgroup_matrix<float, 8, 8> scores[KEY_FRAGMENTS];
  // Every row of the tile sees every key of this stage: no mask arithmetic. Nor need the mask ask for key_end: it
  // is either the tile's causal edge, or the end of a split, and splits are multiples of BK.
  const bool all_visible =
      tile + BK - 1 <= first_position && (!HAS_WINDOW || tile > last_position - window);
  float tile_peak = LOWEST;
  #pragma clang loop unroll(full)
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    if (f % slots == slot) {
      scores[f] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      #pragma clang loop unroll(full)
      for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        simdgroup_matrix<T, 8, 8> keys;
        simdgroup_load(keys, staged + f * 8 * STRIDE + d * 8, STRIDE, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(scores[f], queries[d], keys, scores[f]);
      }
      #pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        float s = scores[f].thread_elements()[e] * scale;
        if (HAS_SOFTCAP) {
          s = precise::tanh(s) * softcap;
        }
        if (!all_visible) {
          const int key = tile + f * 8 + lane_column + e;
          const bool visible = key <= position && (!HAS_WINDOW || key > position - window);
          s = visible ? s : LOWEST;
        }
        scores[f].thread_elements()[e] = s;
        tile_peak = max(tile_peak, s);
      }
    }
  }
  // The four lanes of a row differ in bits 0 and 3.
  tile_peak = max(tile_peak, simd_shuffle_xor(tile_peak, ushort(1)));
  tile_peak = max(tile_peak, simd_shuffle_xor(tile_peak, ushort(8)));
  const float new_peak = max(peak, tile_peak);
  // A row that has seen no key yet has weights 2^0; `shrink` makes them 0 when it sees one, and if it sees none
  // in this slot or split, the merge gives the whole 2^LOWEST = 0.
  const float shrink = fast::exp2(peak - new_peak);
  peak = new_peak;
  total *= shrink;
  #pragma clang loop unroll(full)
  for (int d = 0; d < DIM_FRAGMENTS; ++d) {
    output[d].thread_elements()[0] *= shrink;
    output[d].thread_elements()[1] *= shrink;
  }
  simdgroup_matrix<T, 8, 8> weights[KEY_FRAGMENTS];
  #pragma clang loop unroll(full)
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    if (f % slots == slot) {
      #pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        const T w = T(fast::exp2(scores[f].thread_elements()[e] - peak));
        weights[f].thread_elements()[e] = w;
        total += float(w);  // the rounded weight, as the product below takes it
      }
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);  // K has been read
  for (int i = tid; i < BK * ROW_VECTORS; i += THREADS) {
    const int key = i / ROW_VECTORS;
    uint4 piece = uint4(0);
    if (tile + key < key_end) {
      piece = ((const device uint4*)(v_cache + key_slots[key] * key_stride + kv_head * D))[i % ROW_VECTORS];
    }
    stage[key * (ROW_VECTORS + 1) + i % ROW_VECTORS] = piece;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < BK && tile + BK + tid < key_end) {  // of the next stage
    const int key = tile + BK + tid;
    key_slots[tid] = block_table[table_row + key / BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE;
  }
  #pragma clang loop unroll(full)
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    if (f % slots == slot) {
      #pragma clang loop unroll(full)
      for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        simdgroup_matrix<T, 8, 8> values;
        simdgroup_load(values, staged + f * 8 * STRIDE + d * 8, STRIDE);
        simdgroup_multiply_accumulate(output[d], weights[f], values, output[d]);
      }
    }
  }
}

// Merge the slots of each row.
total += simd_shuffle_xor(total, ushort(1));
total += simd_shuffle_xor(total, ushort(8));
if (lane_column == 0) {
  row_state[(group * 8 + lane_row) * 2] = peak;
  row_state[(group * 8 + lane_row) * 2 + 1] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float row_peak = LOWEST;
for (int s = 0; s < slots; ++s) {
  row_peak = max(row_peak, row_state[((s * row_fragments + row_fragment) * 8 + lane_row) * 2]);
}
float sink = LOWEST;
if (HAS_SINKS && row_exists && partial_row < 0) {
  sink = float(sinks[head]) * LOG2E;
  row_peak = max(row_peak, sink);
}
float row_total = HAS_SINKS ? fast::exp2(sink - row_peak) : 0.0f;
for (int s = 0; s < slots; ++s) {
  const int other = ((s * row_fragments + row_fragment) * 8 + lane_row) * 2;
  row_total += row_state[other + 1] * fast::exp2(row_state[other] - row_peak);
}
const float factor = fast::exp2(peak - row_peak) / row_total;
if (partial_row >= 0 && slot == 0 && lane_column == 0 && row_exists) {
  partial_lse[(partial_row + row) * num_kv_heads + kv_head] = row_peak + precise::log2(row_total);
}

threadgroup float* carried = (threadgroup float*)stage;  // [GROUPS * 8, CARRIED_STRIDE]
for (int first = 0; first < D; first += COLUMNS) {
  if (first > 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the columns before have been read
  }
  #pragma clang loop unroll(full)
  for (int d = 0; d < DIM_FRAGMENTS; ++d) {
    if (d * 8 >= first && d * 8 < first + COLUMNS) {
      const int at = (group * 8 + lane_row) * CARRIED_STRIDE + d * 8 - first + lane_column;
      carried[at] = output[d].thread_elements()[0] * factor;
      carried[at + 1] = output[d].thread_elements()[1] * factor;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = tid; i < num_rows * COLUMNS; i += THREADS) {
    const int r = i / COLUMNS;
    const int column = i % COLUMNS;
    float sum = 0.0f;
    for (int s = 0; s < slots; ++s) {
      sum += carried[((s * row_fragments + r / 8) * 8 + r % 8) * CARRIED_STRIDE + column];
    }
    if (partial_row >= 0) {
      partial_out[(ulong(partial_row + r) * num_kv_heads + kv_head) * D + first + column] = sum;
    } else {
      const ulong at = (ulong(first_row + r / G) * num_kv_heads + kv_head) * G + r % G;
      out[at * D + first + column] = T(sum);
    }
  }
}
