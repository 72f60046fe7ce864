// The product of 8x8 matrices from shuffles: d = a b + c in float, added in the order of k as the simulator does. A
// lane holds two adjacent elements of a row, as drawn in matrix.h. This file has the inverse: from a row and a pair of
// columns to the lane.
#pragma once

METAL_FUNC uint ms_lane_of(uint row, uint pair) {
  return (pair & 1) | ((row & 3) << 1) | ((pair & 2) << 2) | ((row & 4) << 2);
}

// Not inlined: a kernel with unrolled loops has hundreds of products, and 24 inlined shuffles for each would take
// compilers minutes.
__attribute__((noinline)) float2 ms_warp_product(float2 a, float2 b, float2 sum) {
  const uint lane = __ms_lane();
  const uint row = ((lane / 4) & 4) + (lane / 2) % 4, pair = ((lane / 4) & 2) + lane % 2;
#pragma clang loop unroll(full)
  for (uint k = 0; k < 8; ++k) {
    const float left = ms_take(k % 2 ? a[1] : a[0], ms_lane_of(row, k / 2));
    sum[0] += left * ms_take(b[0], ms_lane_of(k, pair));
    sum[1] += left * ms_take(b[1], ms_lane_of(k, pair));
  }
  return sum;
}

METAL_FUNC void ms_warp_multiply_accumulate(const ms_operands* in, float* out) {
  const float2 sum = ms_warp_product(float2{in->a[0], in->a[1]}, float2{in->b[0], in->b[1]}, float2{in->c[0], in->c[1]});
  out[0] = sum[0];
  out[1] = sum[1];
}
