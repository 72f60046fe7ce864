// A stand-in for the product of matrices, which Mesa's compiler does not have: one multiply-add for each element that a
// lane holds. It has the operands and results of Apple's instruction, so registers are as there; values are not.
#pragma once

METAL_FUNC half ms_operand(half x) { return x; }
METAL_FUNC float ms_operand(float x) { return x; }
// The bits pass for half's: the instruction takes bfloat as it is, and a conversion would take registers.
METAL_FUNC half ms_operand(bfloat x) { return __builtin_bit_cast(half, x.bits_); }

template <class A, class B>
METAL_FUNC float ms_stand_in(A a, B b, float c) {
  return __builtin_fmaf(float(ms_operand(a)), float(ms_operand(b)), c);
}
