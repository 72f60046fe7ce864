// Scores of an index's keys: the body of a kernel. MLX writes the signature (mx.fast.metal_kernel), so the names of
// inputs and template arguments are those of metal_engine/attention/metal/indexed.py.
//
// metal_sim: never small: queries, weights, index_keys, block_table, rows
//
//     scores[r, j] = sum over heads h of weights[r, h] * max(0, queries[r, h] . index_keys[j])     for j <= position of r
//
// With BY_HEAD, each head has its own scores: the largest product of the head with each 8 keys.
//
//     scores[r, h, f] = max over j in 8 f .. 8 f + 7 of queries[r, h] . index_keys[j]
//
// A score whose 8 keys include keys after the row is undefined.
//
// A threadgroup has ROW_TILE consecutive rows of one request, and a range of its keys. Each SIMD group loads HELD
// fragments of 8 keys into registers, once for all rows of the tile. For each row, the threadgroup copies the queries
// of HEADS heads to threadgroup memory, where all SIMD groups multiply them with their keys. Keys after a tile's last
// row are not read. Scores of keys after a row are not written.
//
//     rows          (packed row, position, request) of each row of `scores`. The rows of a request are consecutive.
//     sizes         number of rows of each request, keys of a threadgroup, keys that a row of `scores` covers
//
// Grid: (ranges of keys * THREADS, tiles of rows, requests).
// Template: T (type of queries and keys), H (heads), D (head dim, a multiple of 8), HEADS (a multiple of 8), HELD,
// ROW_TILE, BLOCK_SIZE, BY_HEAD (`weights` is not read).

constexpr int COLUMNS = 16 / sizeof(T);  // columns of a load
constexpr int CHUNKS = divided_up(D, COLUMNS * 4);
constexpr int FRAGMENTS = CHUNKS * (COLUMNS / 2);
constexpr int PADDED = CHUNKS * COLUMNS * 4;
constexpr int STEP = GROUPS * HELD * 8;

threadgroup uint4 shared[HEADS * PADDED * sizeof(T) / 16];
threadgroup float staged_weights[HEADS];

const int tid = int(thread_index_in_threadgroup);
const int group = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int lane_row = ((lane >> 2) & 4) + ((lane >> 1) & 3);
const int lane_column = ((lane >> 2) & 2) * 2 + (lane & 1) * 2;

const int num_rows = sizes[0];
const int range = sizes[1];
const int num_keys = sizes[2];
const int of_request = int(threadgroup_position_in_grid.z) * num_rows;
const int first_row = of_request + int(threadgroup_position_in_grid.y) * ROW_TILE;
const int end_row = min(first_row + ROW_TILE, of_request + num_rows);
const int first_key = int(threadgroup_position_in_grid.x) * range;
const int key_end = min(first_key + range, rows[(end_row - 1) * 3 + 1] + 1);
const int table_row = rows[first_row * 3 + 2] * int(block_table_shape[1]);
const Rows<T, D> key_rows = {index_keys};
// Queries of one row, [HEADS / 8, FRAGMENTS, 8 columns, 8 heads], with the columns in the order of load_row.
threadgroup T* staged = (threadgroup T*)shared;

bool is_staged = false;  // True if the queries are staged for all keys: the tile has one row, whose heads all fit
for (int begin = first_key; begin < key_end; begin += STEP) {
  simdgroup_matrix<T, 8, 8> keys[HELD][FRAGMENTS];  // [keys x columns]
  typename Rows<T, D>::template Loaded<COLUMNS, CHUNKS, 0> loaded;
  #pragma clang loop unroll(full)
  for (int h = 0; h < HELD; ++h) {
    const int key = begin + (h * GROUPS + group) * 8 + lane_row;
    const bool exists = key < key_end;
    const int slot = exists ? slot_of<BLOCK_SIZE>(block_table, table_row, uint(key)) : 0;
    load_row<COLUMNS, CHUNKS, 1, 0, D>(key_rows, uint(slot), 0, lane_column, exists, loaded, keys[h]);
  }
  for (int row = first_row; row < end_row; ++row) {
    const uint packed = uint(rows[row * 3]);
    const int last_key = min(rows[row * 3 + 1], key_end - 1);
    float sums[HELD];  // score of this lane's key in each fragment; over two of 8 heads until the lanes' sums are added
    #pragma clang loop unroll(full)
    for (int h = 0; h < HELD; ++h) {
      sums[h] = 0.0f;
    }
    for (int head = 0; head < H; head += HEADS) {
      if (!is_staged) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the queries staged before have been read
        for (int i = tid; i < HEADS * PADDED; i += THREADS) {
          const int own = i / PADDED, column = i % PADDED;
          const int in_chunk = column % (COLUMNS * 4);
          const int fragment = column / (COLUMNS * 4) * (COLUMNS / 2) + in_chunk % COLUMNS / 2;
          const int in_fragment = in_chunk / COLUMNS * 2 + in_chunk % 2;
          const int to = ((own / 8 * FRAGMENTS + fragment) * 8 + in_fragment) * 8 + own % 8;
          staged[to] = T(0.0f);
          if (head + own < H && column < D) {
            staged[to] = queries[(ulong(packed) * H + head + own) * D + column];
          }
        }
        for (int i = tid; i < HEADS; i += THREADS) {
          staged_weights[i] = !BY_HEAD && head + i < H ? float(weights[packed * H + head + i]) : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        is_staged = H <= HEADS && end_row - first_row == 1;
      }
      for (int f = 0; f < HEADS / 8; ++f) {
        threadgroup const T* from = staged + uint(f * FRAGMENTS * 64 + lane_row * 8 + lane_column);
        simdgroup_matrix<float, 8, 8> products[HELD];  // [keys x heads]
        #pragma clang loop unroll(full)
        for (int h = 0; h < HELD; ++h) {
          products[h] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
        #pragma clang loop unroll(full)
        for (int d = 0; d < FRAGMENTS; ++d) {
          simdgroup_matrix<T, 8, 8> of_heads;  // [columns x heads]
          of_heads.thread_elements()[0] = from[d * 64];
          of_heads.thread_elements()[1] = from[d * 64 + 1];
          #pragma clang loop unroll(full)
          for (int h = 0; h < HELD; ++h) {
            simdgroup_multiply_accumulate(products[h], keys[h][d], of_heads, products[h]);
          }
        }
        if (BY_HEAD) {
          #pragma clang loop unroll(full)
          for (int h = 0; h < HELD; ++h) {
            const int key = begin + (h * GROUPS + group) * 8;
            #pragma clang loop unroll(full)
            for (int e = 0; e < 2; ++e) {
              float most = products[h].thread_elements()[e];
              // The numbers of the eight lanes with the keys of a head differ in bits 1, 2 and 4.
              most = max(most, simd_shuffle_xor(most, ushort(2)));
              most = max(most, simd_shuffle_xor(most, ushort(4)));
              most = max(most, simd_shuffle_xor(most, ushort(16)));
              const int own = head + f * 8 + lane_column + e;
              if (lane_row == 0 && own < H && key <= last_key) {
                scores[(ulong(row) * H + own) * divided_up(num_keys, 8) + key / 8] = most;
              }
            }
          }
          continue;
        }
        const float weight0 = staged_weights[f * 8 + lane_column];
        const float weight1 = staged_weights[f * 8 + lane_column + 1];
        #pragma clang loop unroll(full)
        for (int h = 0; h < HELD; ++h) {
          sums[h] += weight0 * max(products[h].thread_elements()[0], 0.0f);
          sums[h] += weight1 * max(products[h].thread_elements()[1], 0.0f);
        }
      }
    }
    #pragma clang loop unroll(full)
    for (int h = 0; h < HELD; ++h) {
      // The numbers of the four lanes of a key differ in bits 0 and 3.
      sums[h] += simd_shuffle_xor(sums[h], ushort(1));
      sums[h] += simd_shuffle_xor(sums[h], ushort(8));
      const int key = begin + (h * GROUPS + group) * 8 + lane_row;
      if (!BY_HEAD && lane_column == 0 && key <= last_key) {
        scores[ulong(row) * num_keys + key] = sums[h];
      }
    }
  }
}
