// Exchange of values between the lanes of a SIMD group in the simulator.
//
// Every lane passes its value to the runtime and waits for the other lanes of its group. Then it computes its own
// result from all values. The runtime checks that all lanes reached the same call.
#pragma once

// Values exchanged by one SIMD operation, in memory that the run pass does not instrument.
struct ms_exchange {
  uint count;  // number of lanes of this group: 32, or fewer in the last group of a ragged threadgroup
  uint done;   // nonzero if a lane has stored the group's common result in `result`
  uchar result[32];
  uchar data[32][32];
};

extern "C" {
ms_exchange* __ms_simd(const constant char* name, const void* value, uint size);
void __ms_missing_lane(const constant char* name, uint lane);
}

namespace metal {

template <class T>
METAL_FUNC T ms_at(const constant char* name, ms_exchange* x, uint lane) {
  static_assert(sizeof(T) <= 32, "SIMD operation on a type that is too large");
  if (lane >= x->count) __ms_missing_lane(name, lane);
  return *reinterpret_cast<T*>(x->data[lane]);
}

// result = v[0] op v[1] op ..., as a tree. The first lane to resume computes it for all lanes.
#define MS_REDUCE(name, step)                                         \
  template <class T>                                                  \
  METAL_FUNC T name(T value) {                                        \
    ms_exchange* x = __ms_simd(#name, &value, sizeof(T));             \
    if (!x->done) {                                                   \
      T v[32];                                                        \
      for (uint i = 0; i < x->count; ++i) v[i] = ms_at<T>(#name, x, i); \
      for (uint n = x->count; n > 1; n = (n + 1) / 2) {               \
        for (uint i = 0; i < n / 2; ++i) {                            \
          T a = v[i], b = v[i + (n + 1) / 2];                         \
          v[i] = step;                                                \
        }                                                             \
      }                                                               \
      *reinterpret_cast<T*>(x->result) = v[0];                        \
      x->done = 1;                                                    \
    }                                                                 \
    return *reinterpret_cast<T*>(x->result);                          \
  }

#define MS_PREFIX(name, op, identity, last)                           \
  template <class T>                                                  \
  METAL_FUNC T name(T value) {                                        \
    ms_exchange* x = __ms_simd(#name, &value, sizeof(T));             \
    uint lane = __ms_lane();                                          \
    T sum = T(identity);                                              \
    for (uint i = 0; i < lane + last; ++i) sum = sum op ms_at<T>(#name, x, i); \
    return sum;                                                       \
  }

// Result of this lane = value of lane `from`, or `fallback` if `from` is outside the group.
#define MS_SHUFFLE(name, params, from, outside, fallback)             \
  template <class T>                                                  \
  METAL_FUNC T name params {                                          \
    ms_exchange* x = __ms_simd(#name, &value, sizeof(T));             \
    uint lane = __ms_lane();                                          \
    (void)lane;                                                       \
    if (outside) return fallback;                                     \
    return ms_at<T>(#name, x, (from));                                \
  }

#define MS_FILL(name, from, outside, fill)                            \
  template <class T>                                                  \
  METAL_FUNC T name(T value, T filling, ushort delta, ushort modulo = 32) { \
    ms_exchange* x = __ms_simd(#name, &value, sizeof(T));             \
    ms_exchange* f = __ms_simd(#name, &filling, sizeof(T));           \
    uint lane = __ms_lane(), at = lane & (modulo - 1u);               \
    if (outside) return ms_at<T>(#name, f, (fill));                   \
    return ms_at<T>(#name, x, (from));                                \
  }

#define MS_QUAD(name, step)                                           \
  template <class T>                                                  \
  METAL_FUNC T name(T value) {                                        \
    ms_exchange* x = __ms_simd(#name, &value, sizeof(T));             \
    uint base = __ms_lane() & ~3u;                                    \
    T a = ms_at<T>(#name, x, base);                                   \
    for (uint i = 1; i < 4; ++i) {                                    \
      T b = ms_at<T>(#name, x, base + i);                             \
      a = step;                                                       \
    }                                                                 \
    return a;                                                         \
  }

METAL_FUNC ulong ms_ballot(const constant char* name, bool predicate) {
  uchar mine = predicate;
  ms_exchange* x = __ms_simd(name, &mine, 1);
  ulong bits = 0;
  for (uint i = 0; i < x->count; ++i) bits |= ulong(ms_at<uchar>(name, x, i)) << i;
  return bits;
}

}  // namespace metal
