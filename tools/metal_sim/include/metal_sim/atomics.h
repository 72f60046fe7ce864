// Atomic operations on device and threadgroup memory, relaxed as everywhere in Metal.
#pragma once

#if defined(METAL_SIM_AGX) || defined(METAL_SIM_CUDA)
// A stand-in with the same operands: an operation is a load and a store. PTX and machine code with atomic operations are
// never run.
METAL_FUNC ulong __ms_atomic_load(const void* address, uint size) {
  return size == 4 ? ulong(*(const volatile uint*)address) : *(const volatile ulong*)address;
}
METAL_FUNC void __ms_atomic_store(void* address, uint size, ulong value) {
  if (size == 4) {
    *(volatile uint*)address = uint(value);
  } else {
    *(volatile ulong*)address = value;
  }
}
#else
extern "C" {
ulong __ms_atomic_load(const void* address, uint size);
void __ms_atomic_store(void* address, uint size, ulong value);
}
#endif

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "no such atomic type");
  T value_;
};
template <class T>
using _atomic = atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

template <class T>
METAL_FUNC T ms_load(const void* p) {
  if constexpr (sizeof(T) == 4) {
    return as_type<T>(uint(__ms_atomic_load(p, 4)));
  } else {
    return as_type<T>(__ms_atomic_load(p, 8));
  }
}
template <class T>
METAL_FUNC void ms_store(void* p, T v) {
  if constexpr (sizeof(T) == 4) {
    __ms_atomic_store(p, 4, as_type<uint>(v));
  } else {
    __ms_atomic_store(p, 8, as_type<ulong>(v));
  }
}

#define MS_FETCH(space, name, expr)                                                     \
  template <class T, class U>                                                           \
  METAL_FUNC T name(volatile space atomic<T>* object, U operand, memory_order) {        \
    void* p = (void*)object;                                                            \
    T old = ms_load<T>(p), arg = T(operand);                                            \
    ms_store<T>(p, expr);                                                               \
    return old;                                                                         \
  }
#define MS_ATOMICS(space)                                                               \
  template <class T>                                                                    \
  METAL_FUNC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) { \
    return ms_load<T>((const void*)object);                                             \
  }                                                                                     \
  template <class T, class U>                                                           \
  METAL_FUNC void atomic_store_explicit(volatile space atomic<T>* object, U desired, memory_order) { \
    ms_store<T>((void*)object, T(desired));                                             \
  }                                                                                     \
  template <class T, class U>                                                           \
  METAL_FUNC bool atomic_compare_exchange_weak_explicit(                                \
      volatile space atomic<T>* object, thread T* expected, U desired, memory_order, memory_order) { \
    void* p = (void*)object;                                                            \
    T old = ms_load<T>(p);                                                              \
    bool same = old == *expected;                                                       \
    if (same) ms_store<T>(p, T(desired));                                               \
    *expected = old;                                                                    \
    return same;                                                                        \
  }                                                                                     \
  MS_FETCH(space, atomic_exchange_explicit, arg)                                        \
  MS_FETCH(space, atomic_fetch_add_explicit, T(old + arg))                              \
  MS_FETCH(space, atomic_fetch_sub_explicit, T(old - arg))                              \
  MS_FETCH(space, atomic_fetch_max_explicit, max(old, arg))                             \
  MS_FETCH(space, atomic_fetch_min_explicit, min(old, arg))                             \
  MS_FETCH(space, atomic_fetch_and_explicit, T(old & arg))                              \
  MS_FETCH(space, atomic_fetch_or_explicit, T(old | arg))                               \
  MS_FETCH(space, atomic_fetch_xor_explicit, T(old ^ arg))
MS_ATOMICS(device)
MS_ATOMICS(threadgroup)
#undef MS_ATOMICS
#undef MS_FETCH

}  // namespace metal
