// Math functions for float, half and their vectors. Half goes through float, which rounds correctly.
//
// fast:: and precise:: are the same functions here: the simulator computes results within Metal's error bounds, not the
// exact rounding of a particular GPU. The __metal_* names are the compiler builtins behind Apple's headers. MLX's
// bfloat16 math calls them with a math mode.
#pragma once

#define MS_MATH1(name, expr, internal)                                                             \
  METAL_FUNC float internal(float x, int = 0) { return expr; }                                     \
  namespace metal {                                                                                \
  METAL_FUNC float name(float x) { return expr; }                                                  \
  METAL_FUNC half name(half h) { return half(internal(float(h))); }                                \
  template <class T, int N>                                                                        \
  METAL_FUNC ms_ext<T, N> name(ms_ext<T, N> v) {                                                   \
    for (int i = 0; i < N; ++i) v[i] = name(T(v[i]));                                              \
    return v;                                                                                      \
  }                                                                                                \
  namespace fast { using ::metal::name; }                                                          \
  namespace precise { using ::metal::name; }                                                       \
  }
#define MS_MATH2(name, expr, internal)                                                             \
  METAL_FUNC float internal(float x, float y, int = 0) { return expr; }                            \
  namespace metal {                                                                                \
  METAL_FUNC float name(float x, float y) { return expr; }                                         \
  METAL_FUNC half name(half x, half y) { return half(internal(float(x), float(y))); }              \
  template <class T, int N>                                                                        \
  METAL_FUNC ms_ext<T, N> name(                                                                    \
      ms_ext<T, N> a, ms_ext<T, N> b) {                                                            \
    for (int i = 0; i < N; ++i) a[i] = name(T(a[i]), T(b[i]));                                     \
    return a;                                                                                      \
  }                                                                                                \
  namespace fast { using ::metal::name; }                                                          \
  namespace precise { using ::metal::name; }                                                       \
  }
#define MS_MATH3(name, expr, internal)                                                             \
  METAL_FUNC float internal(float x, float y, float z, int = 0) { return expr; }                   \
  namespace metal {                                                                                \
  METAL_FUNC float name(float x, float y, float z) { return expr; }                                \
  METAL_FUNC half name(half x, half y, half z) {                                                   \
    return half(internal(float(x), float(y), float(z)));                                           \
  }                                                                                                \
  template <class T, int N>                                                                        \
  METAL_FUNC ms_ext<T, N> name(                                                                    \
      ms_ext<T, N> a, ms_ext<T, N> b,                                                              \
      ms_ext<T, N> c) {                                                                            \
    for (int i = 0; i < N; ++i) a[i] = name(T(a[i]), T(b[i]), T(c[i]));                            \
    return a;                                                                                      \
  }                                                                                                \
  namespace fast { using ::metal::name; }                                                          \
  namespace precise { using ::metal::name; }                                                       \
  }

#define MS_LIBM1(name) MS_MATH1(name, __builtin_##name##f(x), __metal_##name)
MS_LIBM1(acos)
MS_LIBM1(acosh)
MS_LIBM1(asin)
MS_LIBM1(asinh)
MS_LIBM1(atan)
MS_LIBM1(atanh)
MS_LIBM1(ceil)
MS_LIBM1(cos)
MS_LIBM1(cosh)
MS_LIBM1(exp)
MS_LIBM1(exp2)
MS_LIBM1(fabs)
MS_LIBM1(floor)
MS_LIBM1(log)
MS_LIBM1(log2)
MS_LIBM1(log10)
MS_LIBM1(rint)
MS_LIBM1(round)
MS_LIBM1(sin)
MS_LIBM1(sinh)
MS_LIBM1(sqrt)
MS_LIBM1(tan)
MS_LIBM1(tanh)
MS_LIBM1(trunc)
MS_MATH1(exp10, __builtin_powf(10.0f, x), __metal_exp10)
MS_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x), __metal_rsqrt)
MS_MATH1(cospi, __builtin_cosf(M_PI_F* x), __metal_cospi)
MS_MATH1(sinpi, __builtin_sinf(M_PI_F* x), __metal_sinpi)
MS_MATH1(tanpi, __builtin_tanf(M_PI_F* x), __metal_tanpi)
MS_MATH1(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f), __metal_fract)
MS_MATH1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f), __metal_saturate)
MS_MATH1(sign, (x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f), __metal_sign)

MS_MATH2(atan2, __builtin_atan2f(x, y), __metal_atan2)
MS_MATH2(copysign, __builtin_copysignf(x, y), __metal_copysign)
MS_MATH2(divide, x / y, __metal_divide)
MS_MATH2(fdim, __builtin_fdimf(x, y), __metal_fdim)
MS_MATH2(fmax, __builtin_fmaxf(x, y), __metal_fmax)
MS_MATH2(fmin, __builtin_fminf(x, y), __metal_fmin)
MS_MATH2(fmod, __builtin_fmodf(x, y), __metal_fmod)
MS_MATH2(pow, __builtin_powf(x, y), __metal_pow)
MS_MATH2(powr, __builtin_powf(x, y), __metal_powr)
MS_MATH2(nextafter, __builtin_nextafterf(x, y), __metal_nextafter)
MS_MATH2(step, (y < x ? 0.0f : 1.0f), __metal_step)

MS_MATH3(fma, __builtin_fmaf(x, y, z), __metal_fma)
MS_MATH3(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)), __metal_fmax3)
MS_MATH3(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)), __metal_fmin3)
MS_MATH3(
    fmedian3,
    __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z)),
    __metal_fmedian3)
MS_MATH3(mix, x + (y - x) * z, __metal_mix)

METAL_FUNC float __metal_ldexp(float x, int e, int = 0) { return __builtin_ldexpf(x, e); }
METAL_FUNC float __metal_frexp(float x, thread int* e, int = 0) { return __builtin_frexpf(x, e); }
METAL_FUNC float __metal_frexp(float x, thread int& e, int = 0) { return __builtin_frexpf(x, &e); }

namespace metal {

METAL_FUNC float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
METAL_FUNC half ldexp(half x, int e) { return half(__builtin_ldexpf(float(x), e)); }
METAL_FUNC float frexp(float x, thread int& e) { return __builtin_frexpf(x, &e); }

METAL_FUNC float abs(float x) { return __builtin_fabsf(x); }
METAL_FUNC half abs(half x) { return half(__builtin_fabsf(float(x))); }
template <class T, enable_if_t<is_integral_v<T>, bool> = true>
METAL_FUNC T abs(T x) {
  return x < T(0) ? T(-x) : x;
}

METAL_FUNC bool isnan(float x) { return __builtin_isnan(x); }
METAL_FUNC bool isnan(half x) { return __builtin_isnan(float(x)); }
METAL_FUNC bool isinf(float x) { return __builtin_isinf(x); }
METAL_FUNC bool isinf(half x) { return __builtin_isinf(float(x)); }
METAL_FUNC bool isfinite(float x) { return __builtin_isfinite(x); }
METAL_FUNC bool isfinite(half x) { return __builtin_isfinite(float(x)); }
METAL_FUNC bool signbit(float x) { return as_type<uint>(x) >> 31; }
METAL_FUNC bool signbit(half x) { return as_type<ushort>(x) >> 15; }

// max and min: integers by value, floating point as fmax and fmin (a NaN loses).
template <class T, enable_if_t<is_integral_v<T>, bool> = true>
METAL_FUNC T max(T a, T b) {
  return a < b ? b : a;
}
template <class T, enable_if_t<is_integral_v<T>, bool> = true>
METAL_FUNC T min(T a, T b) {
  return b < a ? b : a;
}
// Integers of two types are rejected, as in Metal, where the overloads for each type are ambiguous.
METAL_FUNC float max(float a, float b) { return __builtin_fmaxf(a, b); }
METAL_FUNC float min(float a, float b) { return __builtin_fminf(a, b); }
METAL_FUNC half max(half a, half b) { return half(__builtin_fmaxf(float(a), float(b))); }
METAL_FUNC half min(half a, half b) { return half(__builtin_fminf(float(a), float(b))); }
template <class T, enable_if_t<is_arithmetic_v<T> || is_same_v<T, half>, bool> = true>
METAL_FUNC T clamp(T x, T lo, T hi) {
  return min(max(x, lo), hi);
}

#define MS_VECTOR2(name)                                                                           \
  template <class T, int N>                                                                        \
  METAL_FUNC ms_ext<T, N> name(                                                                    \
      ms_ext<T, N> a, ms_ext<T, N> b) {                                                            \
    for (int i = 0; i < N; ++i) a[i] = name(T(a[i]), T(b[i]));                                     \
    return a;                                                                                      \
  }
MS_VECTOR2(max)
MS_VECTOR2(min)
#undef MS_VECTOR2
template <class T, int N>
METAL_FUNC ms_ext<T, N> abs(ms_ext<T, N> v) {
  for (int i = 0; i < N; ++i) v[i] = abs(T(v[i]));
  return v;
}
template <class T, int N>
METAL_FUNC ms_ext<T, N> clamp(
    ms_ext<T, N> v, T lo, T hi) {
  for (int i = 0; i < N; ++i) v[i] = clamp(T(v[i]), lo, hi);
  return v;
}

METAL_FUNC float max3(float a, float b, float c) { return __metal_fmax3(a, b, c); }
METAL_FUNC float min3(float a, float b, float c) { return __metal_fmin3(a, b, c); }

template <class T>
METAL_FUNC T select(T a, T b, bool c) {
  return c ? b : a;
}

template <class T, int N>
METAL_FUNC T dot(ms_ext<T, N> a, ms_ext<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
METAL_FUNC T length_squared(ms_ext<T, N> a) {
  return dot(a, a);
}
template <class T, int N>
METAL_FUNC T length(ms_ext<T, N> a) {
  return sqrt(dot(a, a));
}
// Comparisons of vectors give -1 in OpenCL and true in Metal. These functions only test for nonzero.
template <class T, int N>
METAL_FUNC bool all(ms_ext<T, N> a) {
  for (int i = 0; i < N; ++i)
    if (!a[i]) return false;
  return true;
}
template <class T, int N>
METAL_FUNC bool any(ms_ext<T, N> a) {
  for (int i = 0; i < N; ++i)
    if (a[i]) return true;
  return false;
}

METAL_FUNC int popcount(int x) { return __builtin_popcount(uint(x)); }
METAL_FUNC uint popcount(uint x) { return __builtin_popcount(x); }
METAL_FUNC ulong popcount(ulong x) { return __builtin_popcountl(x); }
METAL_FUNC uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
METAL_FUNC int clz(int x) { return x ? __builtin_clz(uint(x)) : 32; }
METAL_FUNC uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
METAL_FUNC int ctz(int x) { return x ? __builtin_ctz(uint(x)) : 32; }
METAL_FUNC uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
METAL_FUNC uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
METAL_FUNC int mulhi(int a, int b) { return int((long(a) * b) >> 32); }

#define MS_MODES(name)                     \
  namespace fast { using ::metal::name; }  \
  namespace precise { using ::metal::name; }
MS_MODES(abs)
MS_MODES(max)
MS_MODES(min)
MS_MODES(clamp)
MS_MODES(max3)
MS_MODES(min3)
MS_MODES(ldexp)
MS_MODES(frexp)
MS_MODES(isnan)
MS_MODES(isinf)
MS_MODES(isfinite)
#undef MS_MODES

}  // namespace metal
