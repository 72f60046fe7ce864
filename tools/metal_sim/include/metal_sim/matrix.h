// simdgroup_matrix: an 8x8 matrix spread over the 32 lanes of a SIMD group, two elements of a row in each lane.
//
// MLX's own kernels (steel/attn/mma.h) rely on this layout of Apple's GPUs:
// with quad = lane / 4,  row = (quad & 4) + (lane / 2) % 4,  column = (quad & 2) * 2 + (lane % 2) * 2.
//
//   columns   0 1    2 3    4 5    6 7
//   row 0      0      1      8      9        lanes; a lane holds (row, column) and (row, column + 1)
//   row 1      2      3     10     11
//   row 4     16     17     24     25
#pragma once

struct ms_operands {
  float a[2], b[2], c[2];
};
#if defined(METAL_SIM_AGX)
#include "../../agx/matrix.h"
#elif defined(METAL_SIM_CUDA)
#include "../../cuda/matrix.h"
#define __ms_multiply_accumulate ms_warp_multiply_accumulate
#else
extern "C" void __ms_multiply_accumulate(const ms_operands* in, float* out);
#endif

namespace metal {

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "Metal has simdgroup matrices of 8x8 only");
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>, "element type");
  typedef vec<T, 2> storage;
  storage elements;

  METAL_FUNC simdgroup_matrix() {}
  // A diagonal matrix.
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    uint lane = __ms_lane();
    uint row = ((lane / 4) & 4) + (lane / 2) % 4, column = ((lane / 4) & 2) * 2 + (lane % 2) * 2;
    elements[0] = row == column ? diagonal : T(0.0f);
    elements[1] = row == column + 1 ? diagonal : T(0.0f);
  }
  METAL_FUNC thread storage& thread_elements() thread { return elements; }
  METAL_FUNC const thread storage& thread_elements() const thread { return elements; }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R, class U>
METAL_FUNC simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(U value) {
  simdgroup_matrix<T, C, R> m;
  m.elements[0] = T(value);
  m.elements[1] = T(value);
  return m;
}

#ifdef METAL_SIM_AGX
// The lane's address, plus a 32-bit offset that may be known at compile time.
METAL_FUNC int ms_element(ulong stride, ulong2 origin, bool transpose, uint second) {
  const int lane = int(__ms_lane()), to_row = int(stride);
  const int row = ((lane / 4) & 4) + (lane / 2) % 4, column = ((lane / 4) & 2) * 2 + (lane % 2) * 2;
  const int x = int(origin.x), y = int(origin.y);
  return transpose ? column * to_row + row + int(second) * to_row + y * to_row + x
                   : row * to_row + column + int(second) + y * to_row + x;
}
#else
METAL_FUNC ulong ms_element(ulong stride, ulong2 origin, bool transpose, uint second) {
  uint lane = __ms_lane();
  uint row = ((lane / 4) & 4) + (lane / 2) % 4;
  uint column = ((lane / 4) & 2) * 2 + (lane % 2) * 2 + second;
  return transpose ? (origin.y + column) * stride + origin.x + row : (origin.y + row) * stride + origin.x + column;
}
#endif

template <int Bytes>
using ms_bits = conditional_t<Bytes == 4, uint, ushort>;

// Loads are volatile, because a GPU reads the whole matrix: the optimiser would drop the load of an unused element
// before it is counted and checked.
#define MS_LOAD_STORE(space)                                                                     \
  template <class T>                                                                             \
  METAL_FUNC T ms_loaded(const space T* src) {                                                   \
    ms_bits<sizeof(T)> bits = *(const volatile space ms_bits<sizeof(T)>*)src;                    \
    return __builtin_bit_cast(T, bits);                                                          \
  }                                                                                              \
  template <class T>                                                                             \
  METAL_FUNC void simdgroup_load(                                                                \
      thread simdgroup_matrix<T, 8, 8>& d, const space T* src, ulong elements_per_row = 8,       \
      ulong2 origin = ulong2{0, 0}, bool transpose = false) {                                    \
    __ms_group("simdgroup_load");                                                                \
    d.elements[0] = ms_loaded(src + ms_element(elements_per_row, origin, transpose, 0));         \
    d.elements[1] = ms_loaded(src + ms_element(elements_per_row, origin, transpose, 1));         \
  }                                                                                              \
  template <class T>                                                                             \
  METAL_FUNC void simdgroup_store(                                                               \
      simdgroup_matrix<T, 8, 8> a, space T* dst, ulong elements_per_row = 8,                     \
      ulong2 origin = ulong2{0, 0}, bool transpose = false) {                                    \
    __ms_group("simdgroup_store");                                                               \
    dst[ms_element(elements_per_row, origin, transpose, 0)] = a.elements[0];                     \
    dst[ms_element(elements_per_row, origin, transpose, 1)] = a.elements[1];                     \
  }
MS_LOAD_STORE(device)
MS_LOAD_STORE(threadgroup)
#undef MS_LOAD_STORE

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c) {
#ifdef METAL_SIM_AGX
  d.elements[0] = D(ms_stand_in(a.elements[0], b.elements[0], float(c.elements[0])));
  d.elements[1] = D(ms_stand_in(a.elements[1], b.elements[1], float(c.elements[1])));
#else
  ms_operands in = {
      {float(a.elements[0]), float(a.elements[1])},
      {float(b.elements[0]), float(b.elements[1])},
      {float(c.elements[0]), float(c.elements[1])}};
  float out[2];
  __ms_multiply_accumulate(&in, out);
  d.elements[0] = D(out[0]);
  d.elements[1] = D(out[1]);
#endif
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(0.0f));
}
template <class T>
METAL_FUNC simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal
