// Causal depthwise convolution over the packed rows of a step, with bias and SiLU: the body of a kernel. MLX writes the
// signature (mx.fast.metal_kernel), so the names of inputs and template arguments are those of
// metal_engine/recurrence/metal.py.
//
// metal_sim: never small: cu_seqlens, reads
//
// A thread computes one channel of a tile, which is at most TILE consecutive rows of one segment. It holds the inputs
// of these rows, and the K - 1 inputs before them, in registers. With TILE 8, K 4 and a segment of 11 rows (s: inputs
// in the segment's state, x: inputs of its rows):
//
//     s0 s1 s2 x0 x1 x2 x3 x4 x5 x6 x7 x8 x9 x10
//     |------| |--------------------|                first tile: reads the state, if the segment has one
//                             |------| |------|      last tile: reads the inputs before its own, and writes the new
//                                        -------     state, x8 x9 x10
//
// A tile has at least K - 1 rows or is its segment's last tile. Only the first tile of a segment therefore reads the
// state.
//
// A thread finds its segment without a table of tiles. Segment i begins at tile cu_seqlens[i] / TILE + i. This leaves
// each segment as many tiles as it needs, or one more, whose threads end at once. If cu_seqlens is padded, its last
// element is repeated.
//
// Grid: (channels, rows / TILE + segments, 1).
// Template: T (type of x, states and out), K (inputs of an output), TILE, HAS_BIAS, SILU.

static_assert(TILE >= K - 1, "only the first tile of a segment may reach into its state");

const int channel = int(thread_position_in_grid.x);
const int channels = int(x_shape[1]);
const int tile = int(thread_position_in_grid.y);

int segment = 0;  // last segment that begins at this tile or before
int after = int(cu_seqlens_shape[0]) - 1;
while (after - segment > 1) {
  const int middle = (segment + after) / 2;
  if (cu_seqlens[middle] / TILE + middle <= tile) {
    segment = middle;
  } else {
    after = middle;
  }
}
const int first = cu_seqlens[segment];                       // first packed row of the segment
const int length = cu_seqlens[segment + 1] - first;
const int begin = (tile - (first / TILE + segment)) * TILE;  // rows of the segment before this tile

if (begin == 0 || begin < length) {
  const int read = reads[segment];  // row of `states` with the initial state; -1: a zero state
  float taps[K];
  #pragma clang loop unroll(full)
  for (int j = 0; j < K; ++j) {
    taps[j] = float(weight[channel * K + j]);
  }
  float inputs[K - 1 + TILE];       // K - 1 inputs before the tile, then the tile's own
  #pragma clang loop unroll(full)
  for (int i = 0; i < K - 1 + TILE; ++i) {
    const int row = begin - (K - 1) + i;  // row of the segment; below zero: an input in its state
    if (row >= 0) {
      inputs[i] = row < length ? float(x[ulong(first + row) * channels + channel]) : 0.0f;
    } else {
      inputs[i] = read < 0 ? 0.0f : float(states[(ulong(read) * (K - 1) + (K - 1 + row)) * channels + channel]);
    }
  }
  const float shift = HAS_BIAS ? float(bias[channel]) : 0.0f;
  #pragma clang loop unroll(full)
  for (int i = 0; i < TILE; ++i) {
    if (begin + i < length) {
      float sum = shift;
      #pragma clang loop unroll(full)
      for (int j = 0; j < K; ++j) {
        sum += taps[j] * inputs[i + j];
      }
      out[ulong(first + begin + i) * channels + channel] = T(SILU ? sum / (1.0f + precise::exp(-sum)) : sum);
    }
  }
  // The loop makes the index of `inputs` known at compile time. Only one of its iterations stores the new state.
  #pragma clang loop unroll(full)
  for (int rows = 0; rows <= TILE; ++rows) {
    if (begin + rows == length) {
      #pragma clang loop unroll(full)
      for (int j = 0; j < K - 1; ++j) {
        new_states[(ulong(segment) * (K - 1) + j) * channels + channel] = T(inputs[rows + j]);
      }
    }
  }
}
