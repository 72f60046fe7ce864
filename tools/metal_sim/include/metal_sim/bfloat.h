// bfloat: the upper half of a float. Rounds to nearest even, after every operation.
//
// It converts implicitly only to float. float, half and integers convert to it only by a cast (Metal 3.1 language
// specification). A kernel with other implicit conversions fails in the check pass, as on a Mac.
#pragma once

struct bfloat {
  ushort bits_;

  bfloat() = default;

  template <class U, metal::enable_if_t<__is_arithmetic(U) || __is_same(U, half), bool> = true>
  constexpr METAL_FUNC explicit bfloat(U value) : bits_(round(static_cast<float>(value))) {}
  template <class U, metal::enable_if_t<__is_arithmetic(U) || __is_same(U, half), bool> = true>
  constexpr METAL_FUNC explicit bfloat(U value) constant : bits_(round(static_cast<float>(value))) {}

  // Implicit copies take a generic reference, which cannot be bound to constant memory.
  template <class U, metal::enable_if_t<__is_same(U, bfloat), bool> = true>
  constexpr METAL_FUNC bfloat(const constant U& other) : bits_(other.bits_) {}

  template <class U, metal::enable_if_t<__is_same(U, bfloat), bool> = true>
  METAL_FUNC bfloat& operator=(const constant U& other) {
    bits_ = other.bits_;
    return *this;
  }

  constexpr METAL_FUNC operator float() const {
    return __builtin_bit_cast(float, uint(bits_) << 16);
  }
  constexpr METAL_FUNC operator float() const constant {
    return __builtin_bit_cast(float, uint(bits_) << 16);
  }

  METAL_FUNC bfloat& operator+=(bfloat o) { return *this = bfloat(float(*this) + float(o)); }
  METAL_FUNC bfloat& operator-=(bfloat o) { return *this = bfloat(float(*this) - float(o)); }
  METAL_FUNC bfloat& operator*=(bfloat o) { return *this = bfloat(float(*this) * float(o)); }
  METAL_FUNC bfloat& operator/=(bfloat o) { return *this = bfloat(float(*this) / float(o)); }

 private:
  static constexpr METAL_FUNC ushort round(float f) {
    uint u = __builtin_bit_cast(uint, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return ushort((u >> 16) | 0x40);  // NaN stays NaN
    return ushort((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
};

// An operation on two bfloats, or on a bfloat and an integer, gives a bfloat; with a float it gives a float.
#define MS_BFLOAT_OP(op)                                                                        \
  constexpr METAL_FUNC bfloat operator op(bfloat a, bfloat b) {                                 \
    return bfloat(float(a) op float(b));                                                        \
  }                                                                                             \
  template <class U, metal::enable_if_t<__is_integral(U), bool> = true>                         \
  constexpr METAL_FUNC bfloat operator op(bfloat a, U b) {                                      \
    return bfloat(float(a) op float(bfloat(b)));                                                \
  }                                                                                             \
  template <class U, metal::enable_if_t<__is_integral(U), bool> = true>                         \
  constexpr METAL_FUNC bfloat operator op(U a, bfloat b) {                                      \
    return bfloat(float(bfloat(a)) op float(b));                                                \
  }
MS_BFLOAT_OP(+)
MS_BFLOAT_OP(-)
MS_BFLOAT_OP(*)
MS_BFLOAT_OP(/)
#undef MS_BFLOAT_OP
constexpr METAL_FUNC bfloat operator-(bfloat a) { return bfloat(-float(a)); }
