// Functions that both ways through paged_attention.metal use: to load pieces of rows, and to write results.
//
// A fragment is an 8x8 matrix of a SIMD group. A lane holds two neighbouring elements of one row: row `lane_row`,
// columns `lane_column` and the next. If lanes load a row of the cache, the four lanes of a fragment's row load one
// piece of COLUMNS elements each. A chunk of four pieces is therefore COLUMNS / 2 fragments. The columns of a chunk
// belong to fragments and lanes in this order (with COLUMNS 8; the digit is the fragment of the chunk):
//
//     column of the chunk   0 1 2 3 4 5 6 7   8 .. 15       16 .. 23      24 .. 31
//     fragment              0 0 1 1 2 2 3 3   0 0 1 1 ...   0 0 1 1 ...   0 0 1 1 ...
//     lane_column           0 (and the next)  2             4             6
//
// Queries and keys use the same order, so it does not change their products. write_rows restores the order of the
// output's columns.

// Below every score, and finite: the result of fast::exp2 is undefined for infinities.
constant constexpr float LOWEST = -1e30f;
constant constexpr float LOG2E = 1.4426950408889634f;
constant constexpr int GROUPS = 8;  // SIMD groups of a threadgroup
constant constexpr int THREADS = GROUPS * 32;
constant constexpr int CARRIED = 4;  // output fragments that write_rows stores in threadgroup memory at a time
constant constexpr int CARRIED_STRIDE = CARRIED * 8 + 4;  // floats from row to row: rows start in different banks

constexpr int divided_up(int a, int b) { return (a + b - 1) / b; }

template <int WORDS> struct Words {};
template <> struct Words<1> { typedef uint type; };
template <> struct Words<2> { typedef uint2 type; };
template <> struct Words<4> { typedef uint4 type; };

METAL_FUNC uint word(uint piece, int) { return piece; }
METAL_FUNC uint word(uint2 piece, int i) { return piece[i]; }
METAL_FUNC uint word(uint4 piece, int i) { return piece[i]; }

template <typename P>
METAL_FUNC void set_pair(thread simdgroup_matrix<float, 8, 8>& fragment, P piece, int i) {
  fragment.thread_elements()[0] = as_type<float>(word(piece, 2 * i));
  fragment.thread_elements()[1] = as_type<float>(word(piece, 2 * i + 1));
}
template <typename P, typename T>
METAL_FUNC void set_pair(thread simdgroup_matrix<T, 8, 8>& fragment, P piece, int i) {
  const uint both = word(piece, i);
  fragment.thread_elements()[0] = as_type<T>(ushort(both & 0xffff));
  fragment.thread_elements()[1] = as_type<T>(ushort(both >> 16));
}

// Returns the slot of a request's key in the cache. `table_row`: index of the first element of the request's row in
// `block_table`.
template <int BLOCK_SIZE, typename Key>
METAL_FUNC int slot_of(const device int* block_table, int table_row, Key key) {
  return block_table[table_row + int(key / BLOCK_SIZE)] * BLOCK_SIZE + int(key % BLOCK_SIZE);
}

// Returns the slot of key `at` of a list of positions. Returns 0, without a read, outside the item's range of the list.
template <int BLOCK_SIZE>
METAL_FUNC int slot_in_list(
    const device int* block_table, int table_row, const device int* list, int at, int begin, int end) {
  return at >= begin && at < end ? slot_of<BLOCK_SIZE>(block_table, table_row, uint(list[at])) : 0;
}

// Unquantized K or V of all slots, in rows of WIDTH elements. QuantizedRows (attention_quantized.metal) is used alike.
template <typename T, int WIDTH> struct Rows {
  const device T* elements;

  // Returns the piece of COLUMNS elements that begins at `column` of a row. A layer has fewer than 2^32 pieces.
  template <int COLUMNS>
  const device typename Words<COLUMNS * int(sizeof(T)) / 4>::type* piece(uint row, uint column) const thread {
    typedef typename Words<COLUMNS * int(sizeof(T)) / 4>::type Piece;
    return (const device Piece*)elements + (row * (WIDTH / COLUMNS) + column / COLUMNS);
  }
  // Data that a lane has loaded from a row in addition to its fragments: nothing for unquantized rows.
  template <int COLUMNS, int CHUNKS, int BEGIN> struct Loaded {};
  // Data that a thread has loaded for one piece of the stage.
  template <int COLUMNS> using Staged = typename Words<COLUMNS * int(sizeof(T)) / 4>::type;
};

// Loads this lane's pieces of CHUNKS chunks of a row into fragments. Chunks are counted from column BEGIN, and the
// first one loaded is chunk `first`. Zeros replace columns from END on, and the whole row if it does not exist. Neither
// is read.
template <int COLUMNS, int CHUNKS, int PARTS, int BEGIN, int END, typename T, int WIDTH, typename Loaded>
METAL_FUNC void load_row(
    Rows<T, WIDTH> rows, uint row, int first, int lane_column, bool exists, thread Loaded&,
    thread simdgroup_matrix<T, 8, 8>* fragments) {
  typedef typename Words<COLUMNS * int(sizeof(T)) / 4>::type Piece;
  constexpr bool WHOLE = COLUMNS * 4 * CHUNKS * PARTS == END - BEGIN;  // no piece of any part is beyond END
  const int first_column = (first * 4 + lane_column / 2) * COLUMNS;
  Piece pieces[CHUNKS > 0 ? CHUNKS : 1];
  #pragma clang loop unroll(full)
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    pieces[chunk] = Piece(0);
  }
  if (exists) {
    const device Piece* from = rows.template piece<COLUMNS>(row, BEGIN + first_column);
    #pragma clang loop unroll(full)
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (WHOLE || first_column + chunk * COLUMNS * 4 < END - BEGIN) {
        pieces[chunk] = from[chunk * 4];
      }
    }
  }
  #pragma clang loop unroll(full)
  for (int f = 0; f < CHUNKS * (COLUMNS / 2); ++f) {
    set_pair(fragments[f], pieces[f / (COLUMNS / 2)], f % (COLUMNS / 2));
  }
}

// Loads a lane's elements of transposed queries: fragments [columns x rows], with the columns in the order of load_row.
// A lane has two rows of q: `row0` and `row1`.
template <typename T, int COLUMNS, int CHUNKS, int END, int WIDTH>
METAL_FUNC void load_queries(
    const device T* q, uint row0, uint row1, bool exists0, bool exists1, int first, int lane_row,
    thread simdgroup_matrix<T, 8, 8>* fragments) {
  #pragma clang loop unroll(full)
  for (int f = 0; f < CHUNKS * (COLUMNS / 2); ++f) {
    const int column = ((first + f / (COLUMNS / 2)) * 4 + lane_row / 2) * COLUMNS + f % (COLUMNS / 2) * 2 + lane_row % 2;
    fragments[f] = make_filled_simdgroup_matrix<T, 8, 8>(T(0.0f));
    if (exists0 && column < END) {
      fragments[f].thread_elements()[0] = q[ulong(row0) * WIDTH + column];
    }
    if (exists1 && column < END) {
      fragments[f].thread_elements()[1] = q[ulong(row1) * WIDTH + column];
    }
  }
}

// A thread's place in the stage: one piece of COLUMNS elements of a row. A padded row has ROW_PIECES pieces. All
// threads together take AT_ONCE whole rows at a time, so a thread has the same columns of every AT_ONCE-th row. If
// THREADS is not a multiple of ROW_PIECES, the last threads have no rows.
template <int COLUMNS, int ROW_PIECES, int BK> struct StagePlace {
  enum : int { AT_ONCE = THREADS / ROW_PIECES, ALL = BK % AT_ONCE == 0 && THREADS % ROW_PIECES == 0 };
  int key;     // first key of this thread
  int column;  // first column of its pieces
  int end;     // end of the keys of this thread; 0 if it has none

  METAL_FUNC StagePlace(int tid) {
    key = int(uint(tid) / ROW_PIECES);
    column = int(uint(tid) % ROW_PIECES) * COLUMNS;
    end = THREADS % ROW_PIECES == 0 || key < AT_ONCE ? BK : 0;
  }
};

// Loads a thread's LOADS pieces of the stage, each with COLUMNS elements of a row of the cache. Zeros replace keys from
// `num_keys` on and columns from WIDTH on. Neither is read.
template <int COLUMNS, int ROW_PIECES, int LOADS, int BK, typename T, int WIDTH>
METAL_FUNC void load_stage(
    Rows<T, WIDTH> rows, threadgroup const int* key_slots, int num_keys, int num_kv_heads, int kv_head, int tid,
    thread typename Rows<T, WIDTH>::template Staged<COLUMNS>* staged) {
  typedef typename Words<COLUMNS * int(sizeof(T)) / 4>::type Piece;
  const StagePlace<COLUMNS, ROW_PIECES, BK> place(tid);
  threadgroup const int* slots = key_slots + place.key;
  const int left = (place.column < WIDTH ? min(place.end, num_keys) : 0) - place.key;
  #pragma clang loop unroll(full)
  for (int i = 0; i < LOADS; ++i) {
    staged[i] = Piece(0);
    if (i * place.AT_ONCE < left) {
      const uint row = uint(slots[i * place.AT_ONCE]) * uint(num_kv_heads) + uint(kv_head);
      staged[i] = *rows.template piece<COLUMNS>(row, place.column);
    }
  }
}

// Returns this thread's piece in the form in which the stage holds it.
template <int COLUMNS, typename T, int WIDTH>
METAL_FUNC typename Words<COLUMNS * int(sizeof(T)) / 4>::type unpack_piece(
    Rows<T, WIDTH>, int, typename Rows<T, WIDTH>::template Staged<COLUMNS> piece) {
  return piece;
}

// Stores a thread's pieces, which load_stage has loaded, in the stage. `to`: the stage, [BK, STRIDE].
template <int COLUMNS, int ROW_PIECES, int LOADS, int BK, int STRIDE, typename CacheRows, typename Piece, typename T>
METAL_FUNC void store_stage(CacheRows rows, thread const Piece* staged, int tid, threadgroup T* to) {
  typedef typename Words<COLUMNS * int(sizeof(T)) / 4>::type Unpacked;
  const StagePlace<COLUMNS, ROW_PIECES, BK> place(tid);
  threadgroup T* first = to + uint(place.key * STRIDE + place.column);
  #pragma clang loop unroll(full)
  for (int i = 0; i < LOADS; ++i) {
    const Unpacked unpacked = unpack_piece<COLUMNS>(rows, tid, staged[i]);
    if (place.ALL || place.key < place.end - i * place.AT_ONCE) {
      *(threadgroup Unpacked*)(first + i * place.AT_ONCE * STRIDE) = unpacked;
    }
  }
}

// A tile: rows of one request and one KV head.
struct Tile {
  // [first_row, num_rows, partial_row]. A row is (packed token) * G + (query head of the group). partial_row is the
  // first row of a split's result; -1 if the item is not split.
  threadgroup const int* fields;
  int kv_head;
  int num_kv_heads;
};

// Returns the number of row fragments into which a staged tile is divided, at most `most`.
METAL_FUNC int row_fragments_of(int num_rows, int most) {
  return min(num_rows <= 8 ? 1 : num_rows <= 16 ? 2 : num_rows <= 32 ? 4 : 8, most);
}

// Division of a tile among SIMD groups: group = (slot * row_groups + row_group) * parts + part.
struct Share {
  int parts;                  // number of parts of the head dimension
  int row_groups;             // number of parts of the rows, each with STRIPS fragments of 8 rows
  int slots;                  // number of parts of the keys
  int part, row_group, slot;  // parts of this SIMD group
};

// Merges the slots of each row, and writes the row to `out`, or a split's row to `partial_out` and `partial_lse`.
// `output`: WIDTH fragments of each strip, with the columns in the order of load_row. `peak`, `total` and `sink`:
// values of this lane's row of each strip, in base 2. `weight_shift`: log2 of the factor of the weights.
template <typename T, int G, int DV, int STRIPS, int WIDTH, int COLUMNS, bool HAS_SINKS>
METAL_FUNC void write_rows(
    Tile tile, Share share, thread simdgroup_matrix<float, 8, 8>* output, thread const float* peak, thread float* total,
    thread const float* sink, float weight_shift, int tid, int group, int lane_row, int lane_column,
    threadgroup float* carried,    // [GROUPS, STRIPS, 8, CARRIED_STRIDE]
    threadgroup float* row_state,  // [GROUPS, STRIPS, 8, 2]: (peak, total)
    device T* out, device float* partial_out, device float* partial_lse) {
  #pragma clang loop unroll(full)
  for (int strip = 0; strip < STRIPS; ++strip) {
    total[strip] += simd_shuffle_xor(total[strip], ushort(1));
    total[strip] += simd_shuffle_xor(total[strip], ushort(8));
    if (lane_column == 0) {
      row_state[((group * STRIPS + strip) * 8 + lane_row) * 2] = peak[strip];
      row_state[((group * STRIPS + strip) * 8 + lane_row) * 2 + 1] = total[strip];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // also: the earlier content of this memory has been read
  const int first_row = tile.fields[0];
  const int num_rows = tile.fields[1];
  const int partial_row = tile.fields[2];
  #pragma clang loop unroll(full)
  for (int strip = 0; strip < STRIPS; ++strip) {
    const int row = (share.row_group * STRIPS + strip) * 8 + lane_row;
    // Elements of `row_state` from one slot's state of a row to the next slot's.
    const int step = share.row_groups * share.parts * STRIPS * 16;
    const int own = ((share.row_group * share.parts + share.part) * STRIPS + strip) * 16 + lane_row * 2;
    float row_peak = HAS_SINKS ? sink[strip] : LOWEST;
    for (int s = 0; s < share.slots; ++s) {
      row_peak = max(row_peak, row_state[own + s * step]);
    }
    float row_total = HAS_SINKS ? fast::exp2(sink[strip] - row_peak + weight_shift) : 0.0f;
    for (int s = 0; s < share.slots; ++s) {
      row_total += row_state[own + s * step + 1] * fast::exp2(row_state[own + s * step] - row_peak);
    }
    const float factor = fast::exp2(peak[strip] - row_peak) / row_total;
    #pragma clang loop unroll(full)
    for (int d = 0; d < WIDTH; ++d) {
      output[strip * WIDTH + d].thread_elements()[0] *= factor;
      output[strip * WIDTH + d].thread_elements()[1] *= factor;
    }
    if (partial_row >= 0 && share.part == 0 && share.slot == 0 && lane_column == 0 && row < num_rows) {
      const int at = (partial_row + row) * tile.num_kv_heads + tile.kv_head;
      partial_lse[at] = row_peak + precise::log2(row_total) - weight_shift;
    }
  }

  #pragma clang loop unroll(full)
  for (int first = 0; first < WIDTH; first += CARRIED) {
    if (first > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the columns before have been read
    }
    #pragma clang loop unroll(full)
    for (int d = first; d < first + CARRIED; ++d) {
      if (d < WIDTH) {
        // `carried` has whole chunks, with their columns in the order of the output.
        const int column = (d - first) / (COLUMNS / 2) * COLUMNS * 4 + lane_column / 2 * COLUMNS + d % (COLUMNS / 2) * 2;
        #pragma clang loop unroll(full)
        for (int strip = 0; strip < STRIPS; ++strip) {
          const int at = ((group * STRIPS + strip) * 8 + lane_row) * CARRIED_STRIDE + column;
          carried[at] = output[strip * WIDTH + d].thread_elements()[0];
          carried[at + 1] = output[strip * WIDTH + d].thread_elements()[1];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int width = (WIDTH - first < CARRIED ? WIDTH - first : CARRIED) * 8;
    for (int i = tid; i < num_rows * share.parts * width; i += THREADS) {
      const int row = i / (share.parts * width);
      const int part = i / width % share.parts;
      const int column = (part * WIDTH + first) * 8 + i % width;
      if (column < DV) {
        const int strip = row / 8 % STRIPS;
        float sum = 0.0f;
        for (int s = 0; s < share.slots; ++s) {
          const int from = (s * share.row_groups + row / 8 / STRIPS) * share.parts + part;
          sum += carried[((from * STRIPS + strip) * 8 + row % 8) * CARRIED_STRIDE + i % width];
        }
        if (partial_row >= 0) {
          const uint at = uint(partial_row + row) * uint(tile.num_kv_heads) + uint(tile.kv_head);
          partial_out[ulong(at) * DV + uint(column)] = sum;
        } else {
          const uint flat = uint(first_row + row);
          const uint at = (flat / G * uint(tile.num_kv_heads) + uint(tile.kv_head)) * G + flat % G;
          out[ulong(at) * DV + uint(column)] = T(sum);
        }
      }
    }
  }
}
