// Functions with which paged_attention.metal reads quantized K and V. A row of the cache has WIDTH integers of BITS
// bits, packed into words, the first integer in the lowest bits. Each group of GROUP_SIZE integers has a scale and a
// bias of type T:
//
//     element = integer * scale + bias, in float32, rounded to T once
//
// Elements are computed late. Direct items hold integers in registers until they are multiplied. Staged items hold them
// until they are stored to threadgroup memory. One lane loads a scale or a bias. Shuffles copy it to the other lanes
// that have elements of the group.

template <int BYTES> struct Packed {};
template <> struct Packed<2> { typedef ushort type; };
template <> struct Packed<4> { typedef uint type; };
template <> struct Packed<8> { typedef uint2 type; };

METAL_FUNC uint word(ushort piece, int) { return piece; }

// Returns element i of a piece, which is one load of packed integers.
template <typename T, int BITS, typename P>
METAL_FUNC T dequantized(P piece, int i, float scale, float bias) {
  const uint integer = (word(piece, i * BITS / 32) >> (i * BITS % 32)) & ((1u << BITS) - 1);
  return T(fma(float(integer), scale, bias));
}

// Returns the maximum number of groups that `columns` columns touch. The columns are whole chunks of `chunk` columns.
// They begin at the start of a group if `aligned`, else at any chunk.
constexpr int groups_touched(int columns, int chunk, int group_size, bool aligned) {
  return divided_up(columns + (aligned ? 0 : group_size - chunk), group_size);
}

// A lane's pieces of CHUNKS chunks of a row. The four lanes of the row divide the groups that these chunks touch: lane
// i of the four has the scales and biases of group i, i + 4 and so on.
template <int BITS, int GROUP_SIZE, int COLUMNS, int CHUNKS, int BEGIN> struct LoadedPieces {
  enum : int {
    CHUNK = COLUMNS * 4,
    ALIGNED = BEGIN % GROUP_SIZE == 0 && CHUNKS * CHUNK % GROUP_SIZE == 0,
    ROUNDS = CHUNKS > 0 ? divided_up(groups_touched(CHUNKS * CHUNK, CHUNK, GROUP_SIZE, ALIGNED), 4) : 1,
  };
  static_assert(GROUP_SIZE % CHUNK == 0 && BEGIN % CHUNK == 0, "a chunk lies in one group");
  typename Packed<COLUMNS * BITS / 8>::type pieces[CHUNKS > 0 ? CHUNKS : 1];
  float scales[ROUNDS];
  float biases[ROUNDS];
};

template <int COLUMNS, int BITS> struct StagedPiece {
  typename Packed<COLUMNS * BITS / 8>::type piece;
  float number;  // the group's scale in the first thread with a piece of the group, its bias in the second
};

// Quantized K or V of all slots. Used like Rows (attention_rows.metal).
template <typename T, int WIDTH, int BITS, int GROUP_SIZE> struct QuantizedRows {
  const device uint* words;
  const device T* scales;
  const device T* biases;

  // Returns the piece of COLUMNS elements that begins at `column` of a row, as Rows::piece.
  template <int COLUMNS>
  const device typename Packed<COLUMNS * BITS / 8>::type* piece(uint row, uint column) const thread {
    typedef typename Packed<COLUMNS * BITS / 8>::type Piece;
    return (const device Piece*)words + (row * (WIDTH / COLUMNS) + column / COLUMNS);
  }
  // Returns the index, among the groups of all rows, of the group that `column` of a row is in.
  uint group(uint row, uint column) const thread { return row * (WIDTH / GROUP_SIZE) + column / GROUP_SIZE; }
  template <int COLUMNS, int CHUNKS, int BEGIN>
  using Loaded = LoadedPieces<BITS, GROUP_SIZE, COLUMNS, CHUNKS, BEGIN>;
  template <int COLUMNS> using Staged = StagedPiece<COLUMNS, BITS>;
};

// Loads this lane's pieces, scales and biases, with the arguments of load_row for Rows. unpack_chunk sets the
// fragments.
template <int COLUMNS, int CHUNKS, int PARTS, int BEGIN, int END, typename T, int WIDTH, int BITS, int GROUP_SIZE>
METAL_FUNC void load_row(
    QuantizedRows<T, WIDTH, BITS, GROUP_SIZE> rows, uint row, int first, int lane_column, bool exists,
    thread LoadedPieces<BITS, GROUP_SIZE, COLUMNS, CHUNKS, BEGIN>& loaded, thread simdgroup_matrix<T, 8, 8>*) {
  typedef LoadedPieces<BITS, GROUP_SIZE, COLUMNS, CHUNKS, BEGIN> Loaded;
  typedef typename Packed<COLUMNS * BITS / 8>::type Piece;
  constexpr bool WHOLE = CHUNKS * Loaded::CHUNK * PARTS == END - BEGIN;
  const int first_column = BEGIN + first * Loaded::CHUNK;
  const int end = min(END, first_column + CHUNKS * Loaded::CHUNK);
  #pragma clang loop unroll(full)
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    loaded.pieces[chunk] = Piece(0);
  }
  #pragma clang loop unroll(full)
  for (int round = 0; round < Loaded::ROUNDS; ++round) {
    loaded.scales[round] = 0.0f;
    loaded.biases[round] = 0.0f;
  }
  if (exists) {
    const int column = first_column + lane_column / 2 * COLUMNS;
    const device Piece* from = rows.template piece<COLUMNS>(row, column);
    #pragma clang loop unroll(full)
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (WHOLE || column + chunk * Loaded::CHUNK < end) {
        loaded.pieces[chunk] = from[chunk * 4];
      }
    }
    const uint groups = rows.group(row, first_column) + uint(lane_column / 2);
    #pragma clang loop unroll(full)
    for (int round = 0; round < Loaded::ROUNDS; ++round) {
      const int group = round * 4 + lane_column / 2;
      const bool has = WHOLE && Loaded::ALIGNED ? group < CHUNKS * Loaded::CHUNK / GROUP_SIZE
                                                : (first_column / GROUP_SIZE + group) * GROUP_SIZE < end;
      if (has) {
        loaded.scales[round] = float(rows.scales[groups + round * 4]);
        loaded.biases[round] = float(rows.biases[groups + round * 4]);
      }
    }
  }
}

// Converts a chunk that load_row has loaded to fragments. `scale` and `bias` have the values for the chunk before, and
// are set to the values for this chunk. All lanes of the SIMD group must call it together.
template <int COLUMNS, int CHUNKS, typename T, int BITS, int GROUP_SIZE, int BEGIN>
METAL_FUNC void unpack_chunk(
    int chunk, int first, int lane, thread const LoadedPieces<BITS, GROUP_SIZE, COLUMNS, CHUNKS, BEGIN>& loaded,
    thread float& scale, thread float& bias, thread simdgroup_matrix<T, 8, 8>* fragments) {
  typedef LoadedPieces<BITS, GROUP_SIZE, COLUMNS, CHUNKS, BEGIN> Loaded;
  // Offset of chunk 0 in its group.
  const int offset = Loaded::ALIGNED ? 0 : (BEGIN + first * Loaded::CHUNK) % GROUP_SIZE;
  if (!Loaded::ALIGNED || chunk * Loaded::CHUNK % GROUP_SIZE == 0) {
    const int group = (offset + chunk * Loaded::CHUNK) / GROUP_SIZE;
    scale = loaded.scales[0];
    bias = loaded.biases[0];
    #pragma clang loop unroll(full)
    for (int round = 1; round < Loaded::ROUNDS; ++round) {
      scale = group / 4 == round ? loaded.scales[round] : scale;
      bias = group / 4 == round ? loaded.biases[round] : bias;
    }
    // The numbers of the four lanes of a row differ in bits 0 and 3. Two exchanges, one for each bit, copy the group's
    // scale and bias from the lane that has loaded them.
    #pragma clang loop unroll(full)
    for (int bit = 0; bit < 2; ++bit) {
      const int mask = bit == 0 ? 1 : 8;
      const bool other = ((lane & mask) != 0) != ((group >> bit & 1) != 0);
      const float scale_there = simd_shuffle_xor(scale, ushort(mask));
      const float bias_there = simd_shuffle_xor(bias, ushort(mask));
      scale = other ? scale_there : scale;
      bias = other ? bias_there : bias;
    }
  }
  #pragma clang loop unroll(full)
  for (int i = 0; i < COLUMNS; ++i) {
    fragments[chunk * (COLUMNS / 2) + i / 2].thread_elements()[i % 2] =
        dequantized<T, BITS>(loaded.pieces[chunk], i, scale, bias);
  }
}

// Loads a thread's pieces of the stage, with the arguments of load_stage for Rows. All columns are staged. Neighbouring
// threads have neighbouring pieces, so the threads with pieces of one group of integers are in one SIMD group, and
// their first lane is a multiple of their number.
template <int COLUMNS, int ROW_PIECES, int LOADS, int BK, typename T, int WIDTH, int BITS, int GROUP_SIZE>
METAL_FUNC void load_stage(
    QuantizedRows<T, WIDTH, BITS, GROUP_SIZE> rows, threadgroup const int* key_slots, int num_keys, int num_kv_heads,
    int kv_head, int tid, thread StagedPiece<COLUMNS, BITS>* staged) {
  typedef typename Packed<COLUMNS * BITS / 8>::type Piece;
  const StagePlace<COLUMNS, ROW_PIECES, BK> place(tid);
  threadgroup const int* slots = key_slots + place.key;
  const int left = min(place.end, num_keys) - place.key;
  const int column = place.column;
  #pragma clang loop unroll(full)
  for (int i = 0; i < LOADS; ++i) {
    staged[i].piece = Piece(0);
    staged[i].number = 0.0f;
    if (i * place.AT_ONCE < left) {
      const uint row = uint(slots[i * place.AT_ONCE]) * uint(num_kv_heads) + uint(kv_head);
      staged[i].piece = *rows.template piece<COLUMNS>(row, column);
      const int number = column % GROUP_SIZE / COLUMNS;
      if (number < 2) {
        const device T* numbers = number == 0 ? rows.scales : rows.biases;
        staged[i].number = float(numbers[rows.group(row, column)]);
      }
    }
  }
}

// Returns a word of elements: one float, or two elements of 16 bits.
METAL_FUNC uint bits_of(float x, float) { return as_type<uint>(x); }
template <typename T>
METAL_FUNC uint bits_of(T x, T next) {
  return uint(as_type<ushort>(x)) | uint(as_type<ushort>(next)) << 16;
}

// Returns this thread's piece as elements of type T, for the stage. All lanes of the SIMD group must call it together.
template <int COLUMNS, typename T, int WIDTH, int BITS, int GROUP_SIZE>
METAL_FUNC uint4 unpack_piece(
    QuantizedRows<T, WIDTH, BITS, GROUP_SIZE>, int tid, StagedPiece<COLUMNS, BITS> staged) {
  constexpr int LANES = GROUP_SIZE / COLUMNS;  // lanes that have pieces of one group
  constexpr int IN_WORD = 4 / sizeof(T);
  const ushort from = ushort(tid % 32 / LANES * LANES);
  const float scale = simd_shuffle(staged.number, from);
  const float bias = simd_shuffle(staged.number, ushort(from + 1));
  uint4 unpacked;
  #pragma clang loop unroll(full)
  for (int i = 0; i < 4; ++i) {
    unpacked[i] = bits_of(
        dequantized<T, BITS>(staged.piece, i * IN_WORD, scale, bias),
        dequantized<T, BITS>(staged.piece, i * IN_WORD + IN_WORD - 1, scale, bias));
  }
  return unpacked;
}
