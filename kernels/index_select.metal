// Selects the keys with the largest scores of each row: the body of a kernel, one threadgroup per row. Of equal scores,
// the lowest positions are selected. The positions are written in rising order.
//
// metal_sim: never small: scores, rows, positions
//
// A score becomes an unsigned integer of the same order. Three passes over the row find the smallest selected integer,
// 11, 11 and 10 bits at a time. A pass counts the integers whose highest bits equal the bits found so far, by their
// next bits. `left` is the number of selected integers among them. Finally, each SIMD group has a range of keys. It
// counts the keys above and at the smallest selected integer, and writes its selected keys after those of earlier
// ranges.
//
//     rows          (packed row, position, request) of each row of `scores`
//     sizes         keys of a row of `scores`, top_k. A row that sees at most top_k keys selects all of them, followed
//                   by -1.
//
// Template: SIMD_GROUPS.

constexpr int NUM_THREADS = SIMD_GROUPS * 32;
constexpr int BINS = 2048;
constexpr int OWN_BINS = BINS / NUM_THREADS;
static_assert(BINS % NUM_THREADS == 0, "threads have whole bins");

threadgroup uint bins[BINS];
threadgroup uint totals[SIMD_GROUPS];           // integers in each SIMD group's bins
threadgroup uint found[2];                      // next bits; number of selected integers that begin with them
threadgroup uint range_counts[SIMD_GROUPS * 2]; // for each range: keys above and at the smallest selected integer

const uint tid = thread_index_in_threadgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint row = threadgroup_position_in_grid.x;
const uint top_k = uint(sizes[1]);
const uint num_keys = uint(rows[row * 3 + 1]) + 1;  // keys that the row sees
const device float* of_row = scores + ulong(row) * uint(sizes[0]);
device int* selected = positions + ulong(row) * top_k;

if (num_keys <= top_k) {
  for (uint i = tid; i < top_k; i += NUM_THREADS) {
    selected[i] = i < num_keys ? int(i) : -1;
  }
} else {
  uint begin_bits = 0, known = 0, left = top_k;
  for (int shift = 21; shift >= 0; shift -= shift == 21 ? 11 : 10) {
    const uint mask = shift == 0 ? 1023 : 2047;
    for (uint i = tid; i < BINS; i += NUM_THREADS) {
      bins[i] = 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < num_keys; i += NUM_THREADS) {
      const uint bits = ordered_bits(of_row[i]);
      if ((bits & known) == begin_bits) {
        threadgroup atomic_uint* bin = (threadgroup atomic_uint*)(bins + ((bits >> shift) & mask));
        atomic_fetch_add_explicit(bin, 1u, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Thread 0 has the largest bins.
    uint own[OWN_BINS], sum = 0;
    #pragma clang loop unroll(full)
    for (int i = 0; i < OWN_BINS; ++i) {
      own[i] = bins[BINS - 1 - tid * OWN_BINS - i];
      sum += own[i];
    }
    uint up_to = sum;  // integers in the bins of the lanes up to this one
    #pragma clang loop unroll(full)
    for (uint step = 1; step < 32; step *= 2) {
      const uint below = simd_shuffle(up_to, ushort(lane >= step ? lane - step : lane));
      up_to += lane >= step ? below : 0;
    }
    if (lane == 31) {
      totals[group] = up_to;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint larger = up_to - sum;  // integers in larger bins
    for (uint g = 0; g < group; ++g) {
      larger += totals[g];
    }
    #pragma clang loop unroll(full)
    for (int i = 0; i < OWN_BINS; ++i) {
      if (larger < left && larger + own[i] >= left) {
        found[0] = BINS - 1 - tid * OWN_BINS - i;
        found[1] = left - larger;
      }
      larger += own[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    begin_bits |= found[0] << shift;
    known |= mask << shift;
    left = found[1];
  }

  const uint range = ((num_keys + NUM_THREADS - 1) / NUM_THREADS) * 32;
  const uint first = group * range;
  const uint end = min(first + range, num_keys);
  uint above = 0, equal = 0;
  for (uint i = first + lane; i < end; i += 32) {
    const uint bits = ordered_bits(of_row[i]);
    above += bits > begin_bits;
    equal += bits == begin_bits;
  }
  #pragma clang loop unroll(full)
  for (ushort step = 1; step < 32; step *= 2) {
    above += simd_shuffle_xor(above, step);
    equal += simd_shuffle_xor(equal, step);
  }
  if (lane == 0) {
    range_counts[group * 2] = above;
    range_counts[group * 2 + 1] = equal;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint above_before = 0, equal_before = 0;
  for (uint g = 0; g < group; ++g) {
    above_before += range_counts[g * 2];
    equal_before += range_counts[g * 2 + 1];
  }
  // A lane has is_above | is_equal << 16, so that one prefix sum counts both.
  for (uint begin = first; begin < end; begin += 32) {
    const uint i = begin + lane;
    const uint bits = i < end ? ordered_bits(of_row[i]) : 0;
    const bool is_above = i < end && bits > begin_bits;
    const bool is_equal = i < end && bits == begin_bits;
    uint up_to = uint(is_above) | uint(is_equal) << 16;
    #pragma clang loop unroll(full)
    for (uint step = 1; step < 32; step *= 2) {
      const uint below = simd_shuffle(up_to, ushort(lane >= step ? lane - step : lane));
      up_to += lane >= step ? below : 0;
    }
    const uint above_up_to = above_before + (up_to & 0xffff);
    const uint equal_up_to = equal_before + (up_to >> 16);
    if (is_above || (is_equal && equal_up_to <= left)) {
      selected[above_up_to + min(equal_up_to, left) - 1] = int(i);
    }
    const uint all = simd_shuffle(up_to, ushort(31));
    above_before += all & 0xffff;
    equal_before += all >> 16;
  }
}
