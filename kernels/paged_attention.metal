// Variable-length paged attention: the body of a kernel. MLX writes the signature (mx.fast.metal_kernel), so the
// names of inputs and template arguments are those of metal_engine/attention/metal/backend.py and variants.py.
//
// metal_sim: never small: q, k_cache, v_cache, k_scales, k_biases, v_scales, v_biases, block_table, items, selected, list_rows
//
// One threadgroup takes one work item of one KV head. An item is a tile of query rows and a range of keys. A row is
// (token, query head of the group), so that all heads of a group share the K and V that the tile reads.
//
// There are two ways through the kernel. The number of an item's rows selects one. An item with few rows is *direct*:
// each SIMD group loads its own keys and values from the cache into registers. An item with more rows is *staged*: all
// threads copy K and then V to threadgroup memory, where the SIMD groups of all rows read them. In both ways, each
// element of the range is read from device memory once per tile. Keys outside the range are never read. Zeros replace
// them.
//
//     SIMD groups             GROUPS; group = (slot * row_groups + row_group) * parts + part
//     parts                   SIMD groups that divide the columns of wide heads: each has some columns of q, K, V and
//                             the output. The parts' scores are added through threadgroup memory
//     slots                   SIMD groups that divide the key fragments (8 keys each): slot s takes every fragment f
//                             with f % slots == s
//
//     staged, 64 rows: 8 row groups, 1 slot        direct, 4 rows: 8 slots        direct, 4 rows, 2 parts: 4 slots
//
//              keys ->                             keys ->                        keys ->
//     group 0  ########   rows 0-7                 01234567    (the group that    02460246   first half of the columns
//     group 7  ########   rows 56-63                            takes 8 keys)     13571357   second half
//
// The softmax is online and in base 2. Its state is float32, one for each row and slot. The slots of a row are merged
// at the end (attention_rows.metal). Weights in float16 are multiplied by 2^WEIGHT_SHIFT. Without this factor, small
// weights would be rounded to zero, although the sum of many of them matters.
//
// Template: T, DK, DV (head dims), LATENT (V is the first DV columns of K), G (query heads of a KV head), BLOCK_SIZE,
// HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_IMAGES (rows of images see later rows of their image), and the division of
// the work (variants.py). The host may also define macros:
//
//     TENSOR_OPS    the staged way multiplies with Metal's tensor operations (attention_tensor.metal)
//     QUANTIZED     the cache holds groups of GROUP_SIZE integers of BITS bits, each group with a scale and a bias
//                   (attention_quantized.metal)
//     SELECTED      a row of `selected` lists the positions of the keys of one token and KV head. An item's range of
//                   keys is a range of the list. `list_rows` has the token and the request of each list. Rows of the
//                   output are in the order of the lists.

constexpr float WEIGHT_SHIFT = is_same_v<T, half> ? 14.0f : 0.0f;
constexpr int K_FRAGMENTS = divided_up(DK, 8);
constexpr int V_FRAGMENTS = divided_up(DV, 8);
// Maximum keys of a stage. Registers hold the scores and the pieces of V for this number of keys. Splits begin at
// multiples of BK. The body of the loop over stages is unrolled. With 32 keys of wide heads, it would be larger than
// M1's instruction cache of 12 kB.
#ifdef TENSOR_OPS
constexpr int MOST_STAGE_KEYS = BK;
#elif defined(QUANTIZED)
constexpr int MOST_STAGE_KEYS = STAGED_PARTS > 1 || K_FRAGMENTS > 8 ? 16 : 32;
#else
constexpr int MOST_STAGE_KEYS = STAGED_PARTS > 1 ? 16 : 32;
#endif
constexpr int STAGE_KEYS = BK < MOST_STAGE_KEYS ? BK : MOST_STAGE_KEYS;
// Elements of a piece, which is one load for the stage; pieces of a padded row in the stage; and loads of each thread.
constexpr int K_PIECE = DK * sizeof(T) % 16 == 0 ? 16 / sizeof(T) : 8 / sizeof(T);
constexpr int V_PIECE = DV * sizeof(T) % 16 == 0 ? 16 / sizeof(T) : 8 / sizeof(T);
constexpr int K_ROW = K_FRAGMENTS * 8 / K_PIECE;
constexpr int V_ROW = V_FRAGMENTS * 8 / V_PIECE;
constexpr int K_LOADS = divided_up(STAGE_KEYS, THREADS / K_ROW);
constexpr int V_LOADS = divided_up(STAGE_KEYS, THREADS / V_ROW);
// Elements from one row of the stage to the next, so that rows start in different banks of threadgroup memory.
constexpr int STRIDE = (K_FRAGMENTS > V_FRAGMENTS ? K_FRAGMENTS : V_FRAGMENTS) * 8 + 16 / sizeof(T);
constexpr int KEY_FRAGMENTS = STAGE_KEYS / 8;
constexpr int STAGE_BYTES = STAGED_PARTS ? STAGE_KEYS * STRIDE * sizeof(T) : 0;
constexpr int SUMS_BYTES = STAGED_PARTS > 1 ? GROUPS * KEY_FRAGMENTS * 256 : 0;
constexpr int EXCHANGE_BYTES = 2 * GROUPS * HELD * STRIPS * 256;
#ifdef TENSOR_OPS
constexpr int MOST_STRIPS = STRIPS > 2 ? STRIPS : 2;  // row fragments of a SIMD group
#else
constexpr int MOST_STRIPS = STRIPS;
#endif
constexpr int CARRIED_BYTES = GROUPS * MOST_STRIPS * 8 * CARRIED_STRIDE * 4;
// Direct items of quantized heads read queries from threadgroup memory if queries and output would take 48 registers or
// more, because quantized keys, scales and unpacked numbers also take many registers. The queries are stored after the
// exchange, in memory that later holds the results. Wider heads take more than 104 registers in the staged way anyway.
constexpr int QUERIES_BYTES = STRIPS * PARTS * divided_up(DK, K_COLUMNS * 4 * PARTS) * (K_COLUMNS / 2) * 64 * sizeof(T);
#ifdef QUANTIZED
constexpr bool SHARES_QUERIES =
    !LATENT && sizeof(T) == 2 && STRIPS * (K_FRAGMENTS + 2 * V_FRAGMENTS) >= 48 * PARTS &&
    K_FRAGMENTS + V_FRAGMENTS <= 40 && EXCHANGE_BYTES + QUERIES_BYTES <= CARRIED_BYTES;
#else
constexpr bool SHARES_QUERIES = false;
#endif
constexpr int DIRECT_BYTES = EXCHANGE_BYTES > CARRIED_BYTES ? EXCHANGE_BYTES : CARRIED_BYTES;
constexpr int STAGED_BYTES = STAGE_BYTES + SUMS_BYTES;
constexpr int SHARED_BYTES = STAGED_BYTES > DIRECT_BYTES ? STAGED_BYTES : DIRECT_BYTES;

#ifdef QUANTIZED
static_assert(DK % GROUP_SIZE == 0 && (LATENT || DV % GROUP_SIZE == 0), "a row is whole groups");
typedef QuantizedRows<T, DK, BITS, GROUP_SIZE> KRows;
typedef QuantizedRows<T, DV, BITS, GROUP_SIZE> VRows;
const KRows k_rows = {k_cache, k_scales, k_biases};
const VRows v_rows = {v_cache, v_scales, v_biases};
#else
typedef Rows<T, DK> KRows;
typedef Rows<T, DV> VRows;
const KRows k_rows = {k_cache};
const VRows v_rows = {v_cache};
#endif

threadgroup uint4 shared[SHARED_BYTES / 16];  // stage and sums, or exchange; later the results
threadgroup float row_state[GROUPS * MOST_STRIPS * 8 * 2];
threadgroup int tile_fields[3];               // first_row, num_rows and partial_row, for the end
threadgroup int key_slots[STAGE_KEYS];        // slots of the keys of a stage in the cache

const int tid = int(thread_index_in_threadgroup);
const int group = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
// A lane's place in an 8x8 matrix: row `lane_row`, columns `lane_column` and the next.
const int lane_row = ((lane >> 2) & 4) + ((lane >> 1) & 3);
const int lane_column = ((lane >> 2) & 2) * 2 + (lane & 1) * 2;

const int kv_head = LATENT ? 0 : int(threadgroup_position_in_grid.y);
const int num_kv_heads = LATENT ? 1 : int(k_cache_shape[1]);
const int item = int(threadgroup_position_in_grid.x) * ITEM_FIELDS;
const int first_row = items[item + 0];      // (packed token) * G + (query head of the group)
const int num_rows = items[item + 1];
const int first_position = items[item + 2]; // absolute position of the first row's token
const int key_begin = items[item + 3];
const int key_end = items[item + 4];
#ifdef SELECTED
const int list_row = items[item + 5];
const int table_row = list_rows[list_row * 2 + 1] * int(block_table_shape[1]);
const device int* list = selected + (list_row * num_kv_heads + kv_head) * int(selected_shape[2]);
const int to_queries = (list_rows[list_row * 2] - list_row) * G;  // from rows of the output to rows of q
#else
const int table_row = items[item + 5] * int(block_table_shape[1]);
#endif
const int partial_row = items[item + 6];    // first row of a split's result in partial_out; -1: the item is not split
const int image_end = HAS_IMAGES ? items[item + 7] : 0;  // end of the image whose keys all rows see; 0: text
const int first_token = first_row / G;
const int last_position = first_position + (first_row + num_rows - 1) / G - first_token;
if (tid == 0) {  // in threadgroup memory, so that the fields take no registers until the end
  tile_fields[0] = first_row;
  tile_fields[1] = num_rows;
  tile_fields[2] = partial_row;
}
const Tile rows_of_tile = {tile_fields, kv_head, num_kv_heads};

const float scale = HAS_SOFTCAP ? numbers[0] / numbers[1] : numbers[0] * LOG2E;
const float softcap = numbers[1] * LOG2E;
const int window = HAS_WINDOW ? window_size[0] : 0;
// Every row of the tile sees the keys from `all_see` to before `all_see_end`.
const int all_see = HAS_WINDOW ? max(key_begin, last_position - window + 1) : key_begin;
const int all_see_end = min(key_end, HAS_IMAGES ? max(first_position + 1, image_end) : first_position + 1);

if (num_rows <= STRIPS * 8) {
#include "attention_direct.metal"
} else if (STAGED_PARTS > 0) {
#ifdef TENSOR_OPS
#include "attention_tensor.metal"
#else
#include "attention_staged.metal"
#endif
}
