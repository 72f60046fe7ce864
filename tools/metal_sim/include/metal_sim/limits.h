// numeric_limits
#pragma once

namespace metal {

template <class T>
struct numeric_limits {
  static constexpr bool is_signed_() { return T(-1) < T(0); }
  static constexpr T max() {
    return is_signed_() ? T(~(T(1) << (sizeof(T) * 8 - 1))) : T(~T(0));
  }
  static constexpr T min() { return is_signed_() ? T(T(1) << (sizeof(T) * 8 - 1)) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
};

#define MS_FLOAT_LIMITS(T, DIGITS, MAX, MIN, EPS)                       \
  template <>                                                           \
  struct numeric_limits<T> {                                            \
    static constexpr constant int digits = DIGITS;                      \
    static constexpr T max() { return T(MAX); }                         \
    static constexpr T min() { return T(MIN); }                         \
    static constexpr T lowest() { return T(-MAX); }                     \
    static constexpr T epsilon() { return T(EPS); }                     \
    static constexpr T infinity() { return T(__builtin_inff()); }       \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }    \
  };
MS_FLOAT_LIMITS(float, 24, 0x1.fffffep+127f, 0x1p-126f, 0x1p-23f)
MS_FLOAT_LIMITS(half, 11, 65504.0f, 0x1p-14f, 0x1p-10f)
MS_FLOAT_LIMITS(bfloat, 8, 0x1.fep+127f, 0x1p-126f, 0x1p-7f)
#undef MS_FLOAT_LIMITS

}  // namespace metal

#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif
#define HUGE_VALF __builtin_inff()
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_E_F 2.71828182845904523536f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define FLT_MAX 0x1.fffffep+127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define HALF_MAX 65504.0h
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
