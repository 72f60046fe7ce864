// Barriers, and operations across the lanes of a SIMD group.
#pragma once

#ifndef METAL_SIM_AGX
extern "C" {
void __ms_group(const constant char* name);
void __ms_threadgroup_barrier(uint flags);
void __ms_simdgroup_barrier(uint flags);
uint __ms_lane();
}
#endif
#if defined(METAL_SIM_CUDA)
#include "../../cuda/warp.h"
#include "../../cuda/simd.h"
#elif defined(METAL_SIM_AGX)
#include "../../agx/lanes.h"
#include "../../cuda/simd.h"
#else
#include "metal_sim/exchange.h"
#endif

METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort = 0) { return ushort(__ms_lane()); }
METAL_FUNC ushort __metal_get_simdgroup_size(ushort = 0) { return 32; }

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
constexpr METAL_FUNC mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

METAL_FUNC void threadgroup_barrier(mem_flags flags) { __ms_threadgroup_barrier(uint(flags)); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { __ms_simdgroup_barrier(uint(flags)); }

MS_REDUCE(simd_sum, a + b)
MS_REDUCE(simd_product, a* b)
MS_REDUCE(simd_max, max(a, b))
MS_REDUCE(simd_min, min(a, b))
MS_REDUCE(simd_and, a& b)
MS_REDUCE(simd_or, a | b)
MS_REDUCE(simd_xor, a ^ b)
#undef MS_REDUCE

MS_PREFIX(simd_prefix_inclusive_sum, +, 0, 1)
MS_PREFIX(simd_prefix_exclusive_sum, +, 0, 0)
MS_PREFIX(simd_prefix_inclusive_product, *, 1, 1)
MS_PREFIX(simd_prefix_exclusive_product, *, 1, 0)
#undef MS_PREFIX

MS_SHUFFLE(simd_shuffle, (T value, ushort source), source, false, value)
MS_SHUFFLE(simd_broadcast, (T value, ushort source), source, false, value)
MS_SHUFFLE(simd_broadcast_first, (T value), 0, false, value)
#ifdef METAL_SIM_AGX
template <class T>
METAL_FUNC T simd_shuffle_xor(T value, ushort mask) {
  return ms_take_xor(value, mask);
}
#else
MS_SHUFFLE(simd_shuffle_xor, (T value, ushort mask), lane ^ mask, false, value)
#endif
MS_SHUFFLE(simd_shuffle_down, (T value, ushort delta), lane + delta, lane + delta > 31, value)
MS_SHUFFLE(simd_shuffle_up, (T value, ushort delta), lane - delta, lane < delta, value)
MS_SHUFFLE(simd_shuffle_rotate_down, (T value, ushort delta), (lane + delta) & 31, false, value)
MS_SHUFFLE(simd_shuffle_rotate_up, (T value, ushort delta), (lane - delta) & 31, false, value)
MS_SHUFFLE(quad_shuffle, (T value, ushort source), (lane & ~3u) + source, false, value)
MS_SHUFFLE(quad_broadcast, (T value, ushort source), (lane & ~3u) + source, false, value)
MS_SHUFFLE(quad_shuffle_xor, (T value, ushort mask), lane ^ mask, false, value)
MS_SHUFFLE(quad_shuffle_down, (T value, ushort delta), lane + delta, (lane & 3) + delta > 3, value)
MS_SHUFFLE(quad_shuffle_up, (T value, ushort delta), lane - delta, (lane & 3) < delta, value)
#undef MS_SHUFFLE

// The lanes shifted in come from the other end of `filling`.
MS_FILL(simd_shuffle_and_fill_down, lane + delta, at + delta >= modulo, lane + delta - modulo)
MS_FILL(simd_shuffle_and_fill_up, lane - delta, at < delta, lane + modulo - delta)
#undef MS_FILL

MS_QUAD(quad_sum, a + b)
MS_QUAD(quad_max, max(a, b))
MS_QUAD(quad_min, min(a, b))
#undef MS_QUAD

class simd_vote {
 public:
  typedef ulong vote_t;
  METAL_FUNC explicit simd_vote(vote_t v) : bits(v) {}
  METAL_FUNC explicit operator vote_t() const { return bits; }
  METAL_FUNC bool all() const { return bits == 0xffffffffu; }
  METAL_FUNC bool any() const { return bits != 0; }

 private:
  vote_t bits;
};

METAL_FUNC simd_vote simd_ballot(bool predicate) { return simd_vote(ms_ballot("simd_ballot", predicate)); }
METAL_FUNC bool simd_any(bool predicate) { return ms_ballot("simd_any", predicate) != 0; }
METAL_FUNC bool simd_all(bool predicate) { return ms_ballot("simd_all", !predicate) == 0; }
// All lanes of a group are active in every SIMD operation that the simulator allows.
METAL_FUNC simd_vote simd_active_threads_mask() {
  return simd_vote(ms_ballot("simd_active_threads_mask", true));
}
METAL_FUNC bool simd_is_first() {
  __ms_group("simd_is_first");
  return __ms_lane() == 0;
}

}  // namespace metal

#define MS_INTERNAL(name) \
  template <class T>      \
  METAL_FUNC T __metal_##name(T value) { return metal::name(value); }
MS_INTERNAL(simd_sum)
MS_INTERNAL(simd_product)
MS_INTERNAL(simd_max)
MS_INTERNAL(simd_min)
MS_INTERNAL(simd_prefix_inclusive_sum)
MS_INTERNAL(simd_prefix_exclusive_sum)
MS_INTERNAL(simd_prefix_inclusive_product)
MS_INTERNAL(simd_prefix_exclusive_product)
#undef MS_INTERNAL
#define MS_INTERNAL(name) \
  template <class T>      \
  METAL_FUNC T __metal_##name(T value, ushort arg) { return metal::name(value, arg); }
MS_INTERNAL(simd_broadcast)
MS_INTERNAL(simd_shuffle)
MS_INTERNAL(simd_shuffle_xor)
MS_INTERNAL(simd_shuffle_up)
MS_INTERNAL(simd_shuffle_down)
MS_INTERNAL(simd_shuffle_rotate_up)
MS_INTERNAL(simd_shuffle_rotate_down)
#undef MS_INTERNAL
METAL_FUNC float __metal_simd_xor(float value) { return as_type<float>(metal::simd_xor(as_type<uint>(value))); }
template <class T>
METAL_FUNC T __metal_simd_shuffle_and_fill_up(T value, T filling, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_up(value, filling, delta, modulo);
}
template <class T>
METAL_FUNC T __metal_simd_shuffle_and_fill_down(T value, T filling, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_down(value, filling, delta, modulo);
}
