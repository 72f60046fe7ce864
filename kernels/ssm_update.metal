// Mamba2's recurrence over the packed rows of a step: the body of a kernel. MLX writes the signature
// (mx.fast.metal_kernel), so the names of inputs and template arguments are those of metal_engine/recurrence/metal.py.
//
// metal_sim: never small: B, C, states, cu_seqlens, reads
//
// For every row t of a segment, the state S [Dh, Ds] of a head becomes
//
//     S <- S * exp(-exp(A_log) * dt[t]) + outer(x[t] * dt[t], B[t])
//     y[t] = S C[t] + x[t] * D
//
// LANES lanes hold one row of S as in gated_delta.metal: each lane takes four columns at a time, in float32 registers,
// from the segment's first packed row to its last. S is therefore read once and written once.
//
// Grid: (32, SIMD groups for the Dh rows of S, segments * H).
// Template: T (type of y), H (heads), G (groups of heads that share B and C), Dh, Ds, LANES.

constexpr int PER_LANE = Ds / LANES;      // elements of S that a lane holds
constexpr int STATE_ROWS = 32 / LANES;    // rows of S in a SIMD group
static_assert(Ds % (LANES * 4) == 0, "lanes take four columns at a time");

const int lane = int(thread_index_in_simdgroup);
const int first_column = lane % LANES * 4;
const int row = int(thread_position_in_grid.y) * STATE_ROWS + lane / LANES;
const bool row_exists = row < Dh;         // lanes without a row only take part in shuffles
const int segment = int(thread_position_in_grid.z) / H;
const int head = int(thread_position_in_grid.z) % H;
const int group = head / (H / G);
const float rate = -precise::exp(float(A_log[head]));
const float skip = float(D[head]);

float state[PER_LANE];
const int read = reads[segment];          // row of `states` with the initial state; -1: a zero state
const ulong read_at = ((ulong(max(read, 0)) * H + head) * Dh + row) * Ds;
#pragma clang loop unroll(full)
for (int i = 0; i < PER_LANE; ++i) {
  const int column = first_column + i / 4 * (LANES * 4) + i % 4;
  state[i] = row_exists && read >= 0 ? states[read_at + column] : 0.0f;
}

const int end = cu_seqlens[segment + 1];
for (int t = cu_seqlens[segment]; t < end; ++t) {
  const ulong group_at = (ulong(t) * G + group) * Ds;
  const ulong head_at = ulong(t) * H + head;
  const float step = dt[head_at];
  const float decay = precise::exp(rate * step);
  const float input = row_exists ? float(x[head_at * Dh + row]) : 0.0f;
  const float added = input * step;

  // Four sums, so that a lane's additions need not wait for each other.
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  #pragma clang loop unroll(full)
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = first_column + i / 4 * (LANES * 4) + i % 4;
    state[i] = state[i] * decay + added * float(B[group_at + column]);
    sums[i % 4] += state[i] * float(C[group_at + column]);
  }
  float out = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  #pragma clang loop unroll(full)
  for (int mask = 1; mask < LANES; mask *= 2) {
    out += simd_shuffle_xor(out, ushort(mask));
  }
  if (row_exists && lane % LANES == 0) {
    y[head_at * Dh + row] = T(out + input * skip);
  }
}

const ulong write_at = ((ulong(segment) * H + head) * Dh + row) * Ds;
if (row_exists) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = first_column + i / 4 * (LANES * 4) + i % 4;
    new_states[write_at + column] = state[i];
  }
}
