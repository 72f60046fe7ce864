// Operations across lanes by means of ms_take: the CUDA definitions behind the macros of include/metal_sim/simd.h. They
// add in the simulator's order, so that sums have the same bits as in the simulator.
#pragma once

#define MS_REDUCE(name, step)                                         \
  template <class T>                                                  \
  METAL_FUNC T name(T value) {                                        \
    const uint lane = __ms_lane();                                    \
    for (uint n = ms_lanes(); n > 1; n = (n + 1) / 2) {               \
      T a = value, b = ms_take(value, lane + (n + 1) / 2);            \
      if (lane < n / 2) value = step;                                 \
    }                                                                 \
    return ms_take(value, 0);                                         \
  }
#define MS_PREFIX(name, op, identity, last)                           \
  template <class T>                                                  \
  METAL_FUNC T name(T value) {                                        \
    const uint lane = __ms_lane();                                    \
    T sum = T(identity);                                              \
    for (uint i = 0; i < 32; ++i) {                                   \
      T other = ms_take(value, i);                                    \
      if (i < lane + last) sum = sum op other;                        \
    }                                                                 \
    return sum;                                                       \
  }
#define MS_SHUFFLE(name, params, from, outside, fallback)             \
  template <class T>                                                  \
  METAL_FUNC T name params {                                          \
    const uint lane = __ms_lane();                                    \
    (void)lane;                                                       \
    T other = ms_take(value, (from));                                 \
    return (outside) ? fallback : other;                              \
  }
#define MS_FILL(name, from, outside, fill)                            \
  template <class T>                                                  \
  METAL_FUNC T name(T value, T filling, ushort delta, ushort modulo = 32) { \
    const uint lane = __ms_lane(), at = lane & (modulo - 1u);         \
    T other = ms_take(value, (from)), filled = ms_take(filling, (fill)); \
    return (outside) ? filled : other;                                \
  }
#define MS_QUAD(name, step)                                           \
  template <class T>                                                  \
  METAL_FUNC T name(T value) {                                        \
    const uint base = __ms_lane() & ~3u;                              \
    T a = ms_take(value, base);                                       \
    for (uint i = 1; i < 4; ++i) {                                    \
      T b = ms_take(value, base + i);                                 \
      a = step;                                                       \
    }                                                                 \
    return a;                                                         \
  }

METAL_FUNC ulong ms_ballot(const constant char*, bool predicate) {
  const uint lanes = ms_lanes();
  ulong bits = 0;
  for (uint i = 0; i < 32; ++i) {
    const ulong bit = ms_take(uint(predicate), i);
    if (i < lanes) bits |= bit << i;
  }
  return bits;
}
