// The gated delta rule over the packed rows of a step: the body of a kernel. MLX writes the signature
// (mx.fast.metal_kernel), so the names of inputs and template arguments are those of metal_engine/recurrence/metal.py.
//
// metal_sim: never small: q, k, states, cu_seqlens, reads
//
// For every row t of a segment, the state S [Dv, Dk] of a value head becomes
//
//     S <- S * g[t]                                    g[t] is one number, or one number for each column
//     S <- S + outer((v[t] - S k[t]) * beta[t], k[t])  S k[t] moves towards v[t]
//     y[t] = S q[t]
//
// Rows of S are independent of each other. LANES lanes of a SIMD group hold one row of S, from the segment's first
// packed row to its last. They add their sums by shuffles. With Dk 128 and 4 lanes:
//
//     columns      0-3  4-7  8-11  12-15 | 16-19  20-23 ...      loads of neighbouring lanes are neighbours in memory
//     row 0 of S   l0   l1   l2    l3    | l0     l1             l0: lane 0
//     row 1        l4   l5   l6    l7    | l4     l5
//     row 7        l28  l29  l30   l31   | l28    l29
//
// S is therefore read once and written once, for any number of rows of its segment. Between, it stays in registers, in
// float32. The result of a segment does not depend on other segments in the step.
//
// Grid: (32, SIMD groups for the Dv rows of S, segments * Hv).
// Template: T (type of y), Hk, Hv (key and value heads), Dk, Dv, LANES, VECTOR_GATE (a decay for every column).

constexpr int PER_LANE = Dk / LANES;      // elements of S that a lane holds
constexpr int STATE_ROWS = 32 / LANES;    // rows of S in a SIMD group
static_assert(Dk % (LANES * 4) == 0, "lanes take four columns at a time");

const int lane = int(thread_index_in_simdgroup);
const int first_column = lane % LANES * 4;
const int row = int(thread_position_in_grid.y) * STATE_ROWS + lane / LANES;
const bool row_exists = row < Dv;         // lanes without a row only take part in shuffles
const int segment = int(thread_position_in_grid.z) / Hv;
const int v_head = int(thread_position_in_grid.z) % Hv;
const int k_head = v_head / (Hv / Hk);

float state[PER_LANE];
const int read = reads[segment];          // row of `states` with the initial state; -1: a zero state
const ulong read_at = ((ulong(max(read, 0)) * Hv + v_head) * Dv + row) * Dk;
#pragma clang loop unroll(full)
for (int i = 0; i < PER_LANE; ++i) {
  const int column = first_column + i / 4 * (LANES * 4) + i % 4;
  state[i] = row_exists && read >= 0 ? states[read_at + column] : 0.0f;
}

const int end = cu_seqlens[segment + 1];
for (int t = cu_seqlens[segment]; t < end; ++t) {
  const ulong k_at = (ulong(t) * Hk + k_head) * Dk;
  const ulong v_at = ulong(t) * Hv + v_head;
  const float decay = VECTOR_GATE ? 1.0f : g[v_at];
  const uint gates_at = uint(v_at) * Dk;  // below 2^32, as the host ensures: 64-bit indices would spill registers

  // Four sums, so that a lane's additions need not wait for each other.
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  #pragma clang loop unroll(full)
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = first_column + i / 4 * (LANES * 4) + i % 4;
    state[i] *= VECTOR_GATE ? g[gates_at + uint(column)] : decay;
    sums[i % 4] += state[i] * float(k[k_at + column]);
  }
  float held = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  #pragma clang loop unroll(full)
  for (int mask = 1; mask < LANES; mask *= 2) {
    held += simd_shuffle_xor(held, ushort(mask));
  }
  const float wanted = row_exists ? float(v[v_at * Dv + row]) : 0.0f;
  const float delta = (wanted - held) * float(beta[v_at]);

  sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
  #pragma clang loop unroll(full)
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = first_column + i / 4 * (LANES * 4) + i % 4;
    state[i] += float(k[k_at + column]) * delta;
    sums[i % 4] += state[i] * float(q[k_at + column]);
  }
  float out = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  #pragma clang loop unroll(full)
  for (int mask = 1; mask < LANES; mask *= 2) {
    out += simd_shuffle_xor(out, ushort(mask));
  }
  if (row_exists && lane % LANES == 0) {
    y[v_at * Dv + row] = T(out);
  }
}

const ulong write_at = ((ulong(segment) * Hv + v_head) * Dv + row) * Dk;
if (row_exists) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = first_column + i / 4 * (LANES * 4) + i % 4;
    new_states[write_at + column] = state[i];
  }
}
