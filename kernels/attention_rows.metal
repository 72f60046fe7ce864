// What the ways through paged_attention.metal share: how lanes load pieces of rows, and how results leave.
//
// A fragment is an 8x8 matrix of a SIMD group. A lane holds two neighbours of one row: row `lane_row`, columns
// `lane_column` and the next. Where a row of the cache is loaded by lanes, the four lanes of a fragment's row take one
// piece of COLUMNS elements each, in one load. So a chunk of four pieces is COLUMNS / 2 fragments, whose columns are
// dealt to lanes in this order (COLUMNS 8; the digit says which fragment of the chunk):
//
//     column of the chunk   0 1 2 3 4 5 6 7   8 .. 15       16 .. 23      24 .. 31
//     fragment              0 0 1 1 2 2 3 3   0 0 1 1 ...   0 0 1 1 ...   0 0 1 1 ...
//     lane_column           0 (and the next)  2             4             6
//
// Queries and keys use the same order, so their products are what they are, and results undo it.

// Below every score, and finite: fast::exp2 promises nothing for infinities.
constant constexpr float LOWEST = -1e30f;
constant constexpr float LOG2E = 1.4426950408889634f;
constant constexpr int GROUPS = 8;  // SIMD groups of a threadgroup
constant constexpr int THREADS = GROUPS * 32;
constant constexpr int CARRIED = 4;  // fragments that leave through threadgroup memory at a time
constant constexpr int CARRIED_STRIDE = CARRIED * 8 + 4;  // floats of their rows, which start in different banks

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

// Where the cache holds a request's key: a slot. `table_row`: where the request's row of the table begins.
template <int BLOCK_SIZE, typename Key>
METAL_FUNC int slot_of(const device int* block_table, int table_row, Key key) {
  return block_table[table_row + int(key / BLOCK_SIZE)] * BLOCK_SIZE + int(key % BLOCK_SIZE);
}

// The slot of key `at` of a list of positions. 0, without a read, outside the item's range of the list.
template <int BLOCK_SIZE>
METAL_FUNC int slot_in_list(
    const device int* block_table, int table_row, const device int* list, int at, int begin, int end) {
  return at >= begin && at < end ? slot_of<BLOCK_SIZE>(block_table, table_row, uint(list[at])) : 0;
}

// K or V of all slots as they are, in rows of WIDTH elements. QuantizedRows (attention_quantized.metal) is used alike.
template <typename T, int WIDTH> struct Rows {
  const device T* elements;

  // The piece of COLUMNS elements that begins at `column` of a row. Pieces of a layer have numbers below 2^32.
  template <int COLUMNS>
  const device typename Words<COLUMNS * int(sizeof(T)) / 4>::type* piece(uint row, uint column) const thread {
    typedef typename Words<COLUMNS * int(sizeof(T)) / 4>::type Piece;
    return (const device Piece*)elements + (row * (WIDTH / COLUMNS) + column / COLUMNS);
  }
  // What a lane has loaded of a row beside its fragments.
  template <int COLUMNS, int CHUNKS, int BEGIN> struct Loaded {};
  // What a thread has loaded for the stage.
  template <int COLUMNS> using Staged = typename Words<COLUMNS * int(sizeof(T)) / 4>::type;
};

// This lane's pieces of CHUNKS chunks of columns BEGIN to END of a row, from chunk `first` of these on. Zeros stand for
// columns from END on, and for the whole row where there is none; neither is read.
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

// The two rows of q that a lane's column pair stands for, as fragments [columns x rows] in the order of load_row.
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

// A thread's place in the stage: one piece of COLUMNS elements of a row, ROW_PIECES of which make a padded row. All threads
// take AT_ONCE whole rows at a time, so a thread has the same columns of every AT_ONCE-th row. The last threads have no
// rows where THREADS is not a multiple of ROW_PIECES.
template <int COLUMNS, int ROW_PIECES, int BK> struct StagePlace {
  enum : int { AT_ONCE = THREADS / ROW_PIECES, ALL = BK % AT_ONCE == 0 && THREADS % ROW_PIECES == 0 };
  int key;  // the first
  int column;
  int end;  // this thread has none of the keys from here on

  METAL_FUNC StagePlace(int tid) {
    key = int(uint(tid) / ROW_PIECES);
    column = int(uint(tid) % ROW_PIECES) * COLUMNS;
    end = THREADS % ROW_PIECES == 0 || key < AT_ONCE ? BK : 0;
  }
};

// A thread's LOADS pieces of the stage, COLUMNS elements of a row of the cache each. Zeros stand for keys from `num_keys`
// on and for columns from WIDTH on; neither is read.
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

// This thread's piece as the stage holds it.
template <int COLUMNS, typename T, int WIDTH>
METAL_FUNC typename Words<COLUMNS * int(sizeof(T)) / 4>::type unpack_piece(
    Rows<T, WIDTH>, int, typename Rows<T, WIDTH>::template Staged<COLUMNS> piece) {
  return piece;
}

// Stores them. `to`: [BK, STRIDE].
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
  // [first_row, num_rows, partial_row]: the first row is (packed token) * G + (query head of the group), and a split's
  // result goes to partial_row; -1: the item is whole.
  threadgroup const int* fields;
  int kv_head;
  int num_kv_heads;
};

// Row fragments into which a staged tile is divided, `most` at most.
METAL_FUNC int row_fragments_of(int num_rows, int most) {
  return min(num_rows <= 8 ? 1 : num_rows <= 16 ? 2 : num_rows <= 32 ? 4 : 8, most);
}

// How SIMD groups share a tile: group = (slot * row_groups + row_group) * parts + part.
struct Share {
  int parts;       // shares of the head dimension
  int row_groups;  // shares of the rows, STRIPS fragments of 8 rows each
  int slots;       // shares of the keys
  int part, row_group, slot;
};

// Merges the slots of each row and writes it. `output`: of each strip, WIDTH fragments in the order of load_row.
// `sink`: of this lane's row of each strip, in base 2. `weight_shift`: log2 of what weights were multiplied by.
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
  threadgroup_barrier(mem_flags::mem_threadgroup);  // and all that lay in `carried` has been read
  const int first_row = tile.fields[0];
  const int num_rows = tile.fields[1];
  const int partial_row = tile.fields[2];
  #pragma clang loop unroll(full)
  for (int strip = 0; strip < STRIPS; ++strip) {
    const int row = (share.row_group * STRIPS + strip) * 8 + lane_row;
    // From a slot's state to the next one's.
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
        // Whole chunks leave at a time, their columns in their order.
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
