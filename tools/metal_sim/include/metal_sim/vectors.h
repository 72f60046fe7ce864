// vec<T, N>, and the construction of vectors from scalars and shorter vectors.
#pragma once

// bfloat is a class here, so its vectors are structs with elements by name and index, but without swizzles.
template <int N>
struct ms_bvec;
template <>
struct alignas(4) ms_bvec<2> {
  bfloat x, y;
  METAL_FUNC bfloat operator[](int i) const { return (&x)[i]; }
  METAL_FUNC bfloat& operator[](int i) { return (&x)[i]; }
};
template <>
struct alignas(8) ms_bvec<3> {
  bfloat x, y, z;
  METAL_FUNC bfloat operator[](int i) const { return (&x)[i]; }
  METAL_FUNC bfloat& operator[](int i) { return (&x)[i]; }
};
template <>
struct alignas(8) ms_bvec<4> {
  bfloat x, y, z, w;
  METAL_FUNC bfloat operator[](int i) const { return (&x)[i]; }
  METAL_FUNC bfloat& operator[](int i) { return (&x)[i]; }
};
typedef ms_bvec<2> bfloat2;
typedef ms_bvec<3> bfloat3;
typedef ms_bvec<4> bfloat4;

namespace metal {

template <class T, int N>
using ms_ext = T __attribute__((ext_vector_type(N)));

template <class T, int N>
struct ms_vec_of {
  typedef ms_ext<T, N> type;
};
template <int N>
struct ms_vec_of<bfloat, N> {
  typedef ms_bvec<N> type;
};
template <class T, int N>
using vec = typename ms_vec_of<T, N>::type;

// Element type and length of a scalar (length 1) or vector.
template <class V>
struct ms_shape {
  using element = V;
  static constexpr constant int size = 1;
};
template <class T, int N>
struct ms_shape<ms_ext<T, N>> {
  using element = T;
  static constexpr constant int size = N;
};
template <int N>
struct ms_shape<ms_bvec<N>> {
  using element = bfloat;
  static constexpr constant int size = N;
};
#ifdef METAL_SIM_GENERIC
template <class V>
struct ms_shape<__private V> : ms_shape<V> {};
#endif

template <int I, class V>
METAL_FUNC void ms_fill(thread V&) {
  static_assert(I == ms_shape<V>::size, "a vector is built from too few or too many elements");
}
template <int I, class V, class A, class... Rest>
METAL_FUNC void ms_fill(thread V& v, A a, Rest... rest) {
  using E = typename ms_shape<V>::element;
  constexpr int n = ms_shape<A>::size;
  if constexpr (n == 1) {
    v[I] = static_cast<E>(a);
  } else {
    for (int k = 0; k < n; ++k) v[I + k] = static_cast<E>(a[k]);
  }
  ms_fill<I + n>(v, rest...);
}

// V(args...): Metal's vector constructors and conversions between vector types.
template <class V>
METAL_FUNC V ms_make() {
  return V{};
}
template <class V, class A>
METAL_FUNC V ms_make(A a) {
  using E = typename ms_shape<V>::element;
  V v;
  if constexpr (ms_shape<V>::size == 1) {
    return static_cast<V>(a);
  } else if constexpr (ms_shape<A>::size == 1) {
    for (int k = 0; k < ms_shape<V>::size; ++k) v[k] = static_cast<E>(a);
  } else {
    ms_fill<0>(v, a);
  }
  return v;
}
template <class V, class A, class B, class... Rest>
METAL_FUNC V ms_make(A a, B b, Rest... rest) {
  V v;
  ms_fill<0>(v, a, b, rest...);
  return v;
}

}  // namespace metal
